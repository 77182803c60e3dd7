"""Which way an autograd function of a user's own goes, by the types of its arguments.

Torch asks no subclass of tensors there, so ``Function.apply`` is replaced. With global tensors or weights, the function
computes with whole tensors (:mod:`distdl.globals.gradients.whole_functions`); with blocks, on blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from distdl.globals.gradients.parts import enter_results
from distdl.globals.gradients.whole_functions import apply_whole
from distdl.globals.tensor.block import Block, as_block
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica, plain_of, tied_of
from distdl.globals.tensor.running import is_on_blocks, on_blocks
from distdl.globals.tensor.stale import current
from distdl.globals.tensor.torch_function import check_unmixed
from distdl.tensors.derivatives import recomputing


def _now(one: Any) -> Any:
    """An argument as it is now: a block that has been written since, say, has the graph of its plain tensor."""
    return as_block(one._plain) if type(one) is Block else current(one)


def _types(y: Any) -> set[type]:
    return {type(one) for one in (y if type(y) is tuple else (y,))}


def _changed(y: Any, change: Callable[[Any], Any]) -> Any:
    """The results of an autograd function, each changed."""
    return tuple(map(change, y)) if isinstance(y, tuple) else change(y)


def _on_blocks(function: Any) -> Any:
    """An autograd function whose backward, which runs later, is a function on blocks, as its forward is.

    A backward that goes through a module of the model would else add up the gradients of all workers' blocks.
    """
    if function is CheckpointFunction:  # (which knows it)
        return function
    made = vars(function).get("_distdl_on_blocks")
    if made is None:
        name = "backward" if function.vjp is torch.autograd.Function.vjp else "vjp"
        backward = staticmethod(on_blocks()(getattr(function, name)))
        made = function._distdl_on_blocks = type(function.__name__, (function,), {name: backward})
    return made


def _without_graph(function: Any, y: Any) -> Any:
    """What an autograd function of plain tensors gives that has made global ones.

    Raises: RuntimeError if it has a gradient: that of the plain tensors would be the sum of what the workers have.
    """
    with torch._C.DisableTorchFunctionSubclass():
        curved = [one for one in (y if isinstance(y, tuple) else (y,)) if isinstance(one, torch.Tensor) and one.grad_fn]
    if curved:
        raise RuntimeError(
            f"the autograd function {function.__name__} takes plain tensors and gives global ones, as a checkpoint "
            "with re-entry of a distributed model does; give it a global tensor, as by distdl.distribute_tensor, or "
            "take use_reentrant=False"
        )
    return y


def install() -> None:
    """Let autograd functions look for global tensors among their arguments: torch asks nobody there."""
    known: Any = torch.autograd.Function
    torch_apply = known.__dict__["apply"]  # (written in Python, and since 2.14 in C: both bind to a class)

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
        if Replica in made and torch.is_grad_enabled():  # (which follows from weights from around it)
            found = y if isinstance(y, tuple) else (y,)
            return enter_results(y, next(one._context for one in found if type(one) is Replica))
        return y

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return applied_to(cls, args, kwargs)
        with recomputing():  # (its forward makes no graph)
            return applied_to(cls, args, kwargs)

    apply.__doc__ = known.apply.__doc__
    known.apply = classmethod(apply)
