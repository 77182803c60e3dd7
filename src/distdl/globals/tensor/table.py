"""The tables from functions of torch to handlers, which do the same for global tensors and replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

from distdl.nn.compiling import leave_uncompiled

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

TABLE: dict[Any, Handler] = {}
"""From a torch function to its handler, which gets the function, its arguments and its keyword arguments."""

REPLICATED: dict[Any, Handler] = {}
"""The same for replicas. A function without a handler here is torch's, called with the plain tensors."""

METHODS: dict[str, Callable[..., Any]] = {}
"""Methods of the types, by name. The files that know how tensors move and how modules take them enter theirs."""

OPERATOR = "operator"
"""The key in ``REPLICATED`` of the handler for all operators that users have made (``torch.library``)."""

SPACES: dict[str, Any] = {
    "torch": torch,
    "Tensor": torch.Tensor,
    "functional": functional,
    "special": torch.special,
    "linalg": torch.linalg,
    "fft": torch.fft,
    "autograd": torch.autograd,
}


def named(names: str, spaces: str = "torch Tensor functional special") -> Iterator[Any]:
    """The functions of torch that have one of these names, in any of the name spaces.

    Raises: LookupError for a name that none of them has.
    """
    for name in names.split():
        found = [getattr(SPACES[space], name) for space in spaces.split() if hasattr(SPACES[space], name)]
        if not found:
            raise LookupError(f"torch has no function {name}")
        yield from (function for function in found if callable(function))


def handles(names: str, spaces: str = "torch Tensor functional special") -> Callable[[Handler], Handler]:
    """Enter a handler for the functions of these names: ``@handles("sum mean")``."""

    def enter(handler: Handler) -> Handler:
        for function in named(names, spaces):
            TABLE[function] = handler
        return handler

    return enter


def torch_calls(kind: type[torch.Tensor]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function be the ``__torch_function__`` of a type of tensors; compilers leave it as it is."""

    def enter(method: Callable[..., Any]) -> Callable[..., Any]:
        leave_uncompiled(method)
        type.__setattr__(kind, "__torch_function__", classmethod(method))
        return method

    return enter


def by_name(handler: Callable[..., Any]) -> Handler:
    """A handler that gets the function, and its arguments one by one: ``def histc(func, input, bins=100)``.

    Where it returns NotImplemented, the function falls back.
    """

    @wraps(handler)
    def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y = handler(func, *args, **kwargs)
        return TABLE[None](func, args, kwargs) if y is NotImplemented else y

    return run


def handles_property(*names: str) -> Callable[[Handler], Handler]:
    """Enter a handler for reading these attributes of a tensor."""

    def enter(handler: Handler) -> Handler:
        for name in names:
            TABLE[getattr(torch.Tensor, name).__get__] = handler
        return handler

    return enter


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function, or of the class of another object that is called: the same on every worker."""
    return getattr(func, "__name__", type(func).__name__)


def writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function writes into its first argument, as its name or an option says."""
    name = name_of(func)
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return (name.endswith("_") and name != "requires_grad_") or bool(kwargs.get("inplace"))


def composite(func: Any, **others: Any) -> Callable[..., Any]:
    """A function that torch has written in Python, rebuilt so that the functions that it calls are handled, not it.

    Args:
        others: in the place of what it calls by these names.
    """
    asks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    own = {**func.__globals__, **dict.fromkeys(asks, lambda *_: False), **others}
    rebuilt = FunctionType(func.__code__, own, func.__name__, func.__defaults__, func.__closure__)
    rebuilt.__kwdefaults__ = func.__kwdefaults__
    return rebuilt


def copied(func: Any) -> Any:
    """A function of torch's as torch has it, which stays so where torch's gets other code."""
    func = func.__wrapped__ if is_lent(func) else func  # an earlier import of distdl has replaced its code
    copy = FunctionType(func.__code__, func.__globals__, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = func.__kwdefaults__, func.__annotations__
    copy.__module__, copy.__qualname__ = func.__module__, func.__qualname__
    return copy


def is_lent(function: Any) -> bool:
    """Whether a function has got other code (see :mod:`distdl.globals.patches`)."""
    return f"_distdl_{function.__name__}" in function.__code__.co_names


ORIGINAL = "_distdl_original"
"""An attribute of what has replaced something of torch's: that."""


def original_of(value: Any) -> Any:
    """What torch has, of something that may have replaced it."""
    return getattr(value, ORIGINAL, value)


def check_is_tensor(value: object, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the object of an AttributeError: a handler takes arguments for tensors without asking first.

    Raises: TypeError if the object is an argument, or in one, and no tensor.
    """
    for one in (*args, *kwargs.values()):
        inside = (one, *one) if isinstance(one, (tuple, list)) else (one,)
        if any(item is value for item in inside) and not isinstance(value, torch.Tensor):
            raise TypeError(f"{func.__name__}() needs a tensor where it got {value!r}, a {type(value).__name__}")
