"""Modules that become parts of a distributed model: those that it has, and those that are put into it later."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from distdl.globals.consistency.equality import make_equal, whole_of
from distdl.globals.layouts.context import Context
from distdl.globals.models.parameters import Buffers, Copies, Parameters
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.tensors.derivatives import is_recomputed
from distdl.transport.callsite import Place, put


class Modules(dict[str, Any]):
    """The modules in one module. One that is put there later becomes a part of the model, too.

    One that the forward itself has made does so at once, as it computes with it. Any other does at the next forward.
    """

    def __init__(self, copies: Copies, place: Place, modules: dict[str, Any]) -> None:
        super().__init__(modules)
        self.copies, self.place = copies, place

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            if self.copies.running or is_recomputed():
                _join_now(value, self.copies, self.place.of(name))
            else:
                self.copies.additions.note(value, self.copies.running)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.copies.additions.open = True  # (lists of modules go on with another dict, which takes note of nothing)
        super().__delitem__(name)


def join(module: torch.nn.Module, copies: Copies, place: Place) -> None:
    """Make a module, and those in it, parts of a distributed model; those that are parts already stay as they are."""
    new = []
    for path, child in module.named_modules():
        if _joins(child):
            new.append(child)
            own = place.of(path)
            # (set so because a module that torch.compile has made sets the attributes of another)
            child.__dict__["_parameters"] = Parameters(copies, child._parameters)
            child.__dict__["_buffers"] = Buffers(copies, child._buffers)
            put(child, own)  # (each says so: a checkpoint recomputes one of them alone)
        if isinstance(child._parameters, Parameters) and not isinstance(child._modules, Modules):
            child.__dict__["_modules"] = Modules(copies, place.of(path), child._modules)
    copies.enlarged(new)


def _joins(module: torch.nn.Module) -> bool:
    """Whether a module is no part of a model yet. One whose parameters have no shapes yet stays as it is."""
    return not isinstance(module._parameters, Parameters) and not any(is_lazy(one) for one in module.parameters(False))


def _join_now(module: torch.nn.Module, copies: Copies, place: Place) -> None:
    """Make parts of a model of a module that its forward has made, and of those in it. Collective.

    Every worker gets the parameters of worker 0, and the whole of what is a global tensor, as if the module had been
    there when the model was distributed. But its parameters stay whole.
    """
    later = [child for child in module.modules() if _joins(child)]
    if not later:
        return
    join(module, copies, place)
    for child in later:
        for name, value in [*child._parameters.items(), *child._buffers.items()]:
            if type(value) is GlobalTensor:
                held: dict[str, Any] = child._parameters if name in child._parameters else child._buffers
                held[name] = value
    made = {id(one) for child in later for one in (*child._parameters.values(), *child._buffers.values())}
    made &= {id(one) for _, one in whole_of(module)}
    if made:
        make_equal(module, Context.of(copies.P.comm), made)
    copies.additions.settle(module)
