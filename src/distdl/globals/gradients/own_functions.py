"""``Function.apply`` of users' autograd functions, which runs on blocks or on whole tensors, by its arguments' types.

Torch asks no tensor subclass there, so ``apply`` is replaced. With global tensors or weights, the function computes on
whole tensors (:mod:`distdl.globals.gradients.whole_functions`); with blocks, on blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints

from distdl.globals.gradients.parts import enter_results
from distdl.globals.gradients.recomputing import CheckpointFunction
from distdl.globals.gradients.whole_functions import apply_whole
from distdl.globals.layouts.context import worlds
from distdl.globals.tensor.block import Block, as_block
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica, plain_of, tied_of
from distdl.globals.tensor.running import is_on_blocks, on_blocks
from distdl.globals.tensor.stale import current
from distdl.globals.tensor.torch_function import check_unmixed
from distdl.tensors.derivatives import recomputing
from distdl.tensors.private_torch import DisableTorchFunctionSubclass, current_graph_task_id


def _now(one: Any) -> Any:
    """Return an argument anew if it is outdated: a block with the graph of its plain tensor, a replica as it is now."""
    return as_block(one._plain) if type(one) is Block else current(one)


def _types(y: Any) -> set[type]:
    return {type(one) for one in (y if type(y) is tuple else (y,))}


def _changed(y: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a change to the one result of an autograd function, or to each of several."""
    return tuple(map(change, y)) if isinstance(y, tuple) else change(y)


def _on_blocks(function: Any) -> Any:
    """Return the autograd function with a backward that runs as a function on blocks, as its forward does.

    Otherwise a backward that goes through a module of the model would add up the gradients of all workers' blocks.
    """
    if function is CheckpointFunction:  # see recomputing.install
        return function
    made = vars(function).get("_distdl_on_blocks")
    if made is None:
        name = "backward" if function.vjp is torch.autograd.Function.vjp else "vjp"
        backward = staticmethod(on_blocks()(getattr(function, name)))
        made = function._distdl_on_blocks = type(function.__name__, (function,), {name: backward})
    return made


def _without_graph(function: Any, y: Any) -> Any:
    """Return the global results of an autograd function of plain tensors.

    Raises: RuntimeError if one has a graph: the gradients of the plain tensors would have to be added up over workers.
    """
    with DisableTorchFunctionSubclass():
        curved = [one for one in (y if isinstance(y, tuple) else (y,)) if isinstance(one, torch.Tensor) and one.grad_fn]
    if curved:
        raise RuntimeError(
            f"the autograd function {function.__name__} takes plain tensors and gives global ones, as a checkpoint "
            "with re-entry of a distributed model does; give it a global tensor, as by distdl.distribute_tensor, or "
            "take use_reentrant=False"
        )
    return y


def apply_of(torch_apply: Any) -> Any:
    """The class method ``apply`` of autograd functions, which looks for global tensors among their arguments.

    Args:
        torch_apply: torch's own, as it stands in the class. It is written in Python, and since 2.14 in C.
    """

    def applied_to(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kinds, named = _types((*args, *kwargs.values())), f"the autograd function {cls.__name__}"
        if Replica in kinds or Block in kinds:
            args, kwargs = tuple(map(_now, args)), {name: _now(one) for name, one in kwargs.items()}
            kinds = _types((*args, *kwargs.values()))
        if is_on_blocks() and GlobalTensor not in kinds:
            apply = torch_apply.__get__(None, _on_blocks(cls))
            y = apply(*map(plain_of, args), **{name: plain_of(one) for name, one in kwargs.items()})
            return _changed(y, tied_of)
        check_unmixed(named, kinds)
        if GlobalTensor in kinds or (Replica in kinds and torch.is_grad_enabled()):
            return apply_whole(cls, args, kwargs)
        y = torch_apply.__get__(None, cls)(*args, **kwargs)
        made = _types(y)
        if GlobalTensor in made:
            return _without_graph(cls, y)
        if Block in made | kinds:
            check_unmixed(named, made | kinds)
            return _changed(y, lambda one: as_block(tied_of(one)))
        if Replica in made and torch.is_grad_enabled():  # the function used weights that are no arguments
            found = y if isinstance(y, tuple) else (y,)
            return enter_results(y, next(one._context for one in found if type(one) is Replica))
        return y

    @wraps(torch_apply.__get__(None, torch.autograd.Function))
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not worlds.ever:
            return torch_apply.__get__(None, cls)(*args, **kwargs)
        if cls is checkpoints.CheckpointFunction:
            cls = CheckpointFunction
        if current_graph_task_id() == -1:
            return applied_to(cls, args, kwargs)
        with recomputing():  # inside of a backward
            return applied_to(cls, args, kwargs)

    return classmethod(apply)
