"""Membership: which modules are parts of a distributed model, also those that are put into it later."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from distdl.globals.consistency.equality import make_equal, whole_of
from distdl.globals.layouts.context import Context
from distdl.globals.models.parameters import Buffers, Parameters, Weights
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.tensors.derivatives import is_recomputed
from distdl.transport.callsite import Place, put


class Modules(dict[str, Any]):
    """The modules in one module of a distributed model. A module that is put here joins the model.

    It joins at once if the model's forward puts it here, as the forward computes with it; else at the next forward.
    """

    def __init__(self, weights: Weights, place: Place, modules: dict[str, Any]) -> None:
        super().__init__(modules)
        self.weights, self.place = weights, place

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            if self.weights.depth or is_recomputed():
                _join_now(value, self.weights, self.place.of(name))
            else:
                self.weights.additions.note_set(value, in_forward=False)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        # lists of modules delete by making another dict, which takes note of nothing
        self.weights.additions.pending = True
        super().__delitem__(name)


def join(module: torch.nn.Module, weights: Weights, place: Place) -> None:
    """Make a module, and those in it, parts of a distributed model. Those that are parts already stay as they are.

    Args:
        place: of the module in the model. Each module is given its own, as a checkpoint may recompute one of them.
    """
    new = []
    for path, child in module.named_modules():
        if _can_join(child):
            new.append(child)
            own = place.of(path)
            # by __dict__, as a module that torch.compile has made sets the attributes of the one that it wraps
            child.__dict__["_parameters"] = Parameters(weights, child._parameters)
            child.__dict__["_buffers"] = Buffers(weights, child._buffers)
            put(child, own)
        if isinstance(child._parameters, Parameters) and not isinstance(child._modules, Modules):
            child.__dict__["_modules"] = Modules(weights, place.of(path), child._modules)
    weights.adopt(new)


def _can_join(module: torch.nn.Module) -> bool:
    """Whether a module is no part of a model yet, and its parameters have shapes (lazy ones get them later)."""
    return not isinstance(module._parameters, Parameters) and not any(is_lazy(one) for one in module.parameters(False))


def _join_now(module: torch.nn.Module, weights: Weights, place: Place) -> None:
    """Make a module that a forward has just made, and those in it, parts of the model. Collective.

    Every worker gets the parameters of worker 0, and global tensors among them are gathered, as if the module had been
    there when the model was distributed. But with sharded weights, its parameters stay whole.
    """
    new = [child for child in module.modules() if _can_join(child)]
    if not new:
        return
    join(module, weights, place)
    for child in new:
        for name, value in [*child._parameters.items(), *child._buffers.items()]:
            if type(value) is GlobalTensor:
                owner: dict[str, Any] = child._parameters if name in child._parameters else child._buffers
                owner[name] = value
    ids = {id(one) for child in new for one in (*child._parameters.values(), *child._buffers.values())}
    ids &= {id(one) for _, one in whole_of(module)}
    if ids:
        make_equal(module, Context.of(weights.P.comm), ids)
    weights.additions.note_equal(module)
