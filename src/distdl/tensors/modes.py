"""Modes that see each operator of torch: those of others are not to see what we compute for ourselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from distdl.tensors.private_torch import disable_current_modes, len_torch_dispatch_stack

P = ParamSpec("P")
T = TypeVar("T")


def unobserved() -> AbstractContextManager[Any]:
    """A context for what a worker computes once (set-ups), or as messages arrive: no mode of others sees it.

    A selective checkpoint counts the operators of its forward, and hands out their results when it recomputes that. Of
    set-ups there are none then, and which of two workers copies a message differs from time to time. And what writes
    (a message into a buffer) would not be called again, where what it gives has been saved.
    """
    if not len_torch_dispatch_stack():
        return _NOTHING
    own = any(type(one).__module__.startswith("distdl.") for one in _get_current_dispatch_mode_stack())
    return _NOTHING if own else disable_current_modes()


def uncounted() -> AbstractContextManager[Any]:
    """A context for what torch is asked about tensors without memory: no mode sees it, not even one of ours."""
    return disable_current_modes() if len_torch_dispatch_stack() else _NOTHING


def is_seen() -> bool:
    """Whether a mode sees the operators that are called. What records a step changes nothing, and does not count."""
    if not len_torch_dispatch_stack():
        return False
    return not all(getattr(one, "unseen", False) for one in _get_current_dispatch_mode_stack())


def hidden(function: Callable[P, T]) -> Callable[P, T]:
    """A function that runs in such a context."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with unobserved():
            return function(*args, **kwargs)

    return run


def is_selective() -> bool:
    """Whether a selective checkpoint sees the operators that are called."""
    if not len_torch_dispatch_stack():
        return False
    return any(type(one).__module__ == _CHECKPOINTS for one in _get_current_dispatch_mode_stack())


_CHECKPOINTS = "torch.utils.checkpoint"
_NOTHING: AbstractContextManager[Any] = nullcontext()
