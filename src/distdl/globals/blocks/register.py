"""``register``: users give functions a handler of global tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.globals.functions.pointwise import elementwise, result_of
from distdl.globals.moving.alignment import aligned
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import opaque_in, tensors_in
from distdl.globals.tensor.table import TABLE, Handler, name_of
from distdl.partition import dims


def register(function: Any, handler: Handler | str | None = None) -> Any:
    """Say what a function does with global tensors. Every worker has to say it, before it calls the function.

    Args:
        function: a function of torch, or of a library that dispatches on tensor subclasses as torch does
            (``torch.overrides``); or a subclass of ``torch.autograd.Function``. Classes derived from it do not count.
        handler: ``handler(function, args, kwargs)``, which every worker calls in place of the function if an argument
            is a global tensor. Or ``"elementwise"``: the function computes each element by itself, so it is applied to
            blocks; for a block without cells, its result has to depend on the same arguments. Without a handler,
            ``register`` returns a decorator of one.
    Returns: the handler.
    Raises: TypeError for another function or handler.
    """
    if handler is None:
        return lambda given: register(function, given)
    if handler != "elementwise" and not callable(handler):
        raise TypeError(f'register needs a handler(function, args, kwargs), or "elementwise"; got {handler!r}')
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        _register_class(function, handler)
    elif callable(function) and not isinstance(function, type):
        TABLE[function] = _elements if isinstance(handler, str) else handler
    else:
        raise TypeError(f"register needs a function, or a subclass of torch.autograd.Function; got {function!r}")
    return handler


def _register_class(function: Any, handler: Handler | str) -> None:
    """Replace ``function.apply`` by one that looks for global tensors; not that of classes derived from it."""
    if "_apply_of_its_own" not in vars(function):
        function._apply_of_its_own = vars(function).get("apply")  # mostly None: the class inherits torch's
    own = vars(function)["_apply_of_its_own"]

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        apply = super(function, cls).apply if own is None else own.__get__(None, cls)
        named = [name for name, one in kwargs.items() if isinstance(one, torch.Tensor)]
        operands = [*args, *(kwargs[name] for name in named)]
        found = [one for one in operands if type(one) is GlobalTensor]
        if not found or cls is not function:
            return apply(*args, **kwargs)
        if not isinstance(handler, str):
            return handler(apply, args, kwargs)
        layout, blocks = aligned(found[0]._context, operands, None, function.__name__)
        given, rest = blocks[: len(args)], dict(zip(named, blocks[len(args) :], strict=True))
        return _checked(function, result_of(apply, found[0], apply(*given, **{**kwargs, **rest}), found, layout))

    function.apply = classmethod(applied)


def _elements(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a registered element-wise function to blocks. Raises TypeError for global tensors in a structure."""
    structures = [one for one in (*args, *kwargs.values()) if isinstance(one, (tuple, list, dict))]
    if GlobalTensor in map(type, tensors_in(structures)):
        raise TypeError(
            f"{name_of(function)} is registered as elementwise, but got global tensors in a structure; "
            "distdl.register(function, handler) says what functions of such arguments do"
        )
    return _checked(function, elementwise(function, args, kwargs))


def _checked(function: Any, y: Any) -> Any:
    """Return the result of an element-wise function.

    Raises: ValueError if a result's block has another shape; TypeError for an object, whose blocks would go unseen.
    """
    opaque = opaque_in(y)
    if opaque is not None:
        raise TypeError(
            f"{name_of(function)} is registered as elementwise, but gave a {type(opaque).__name__}, and no tensors, "
            "alone or in tuples, lists and dicts; distdl.register(function, handler) says what other functions do"
        )
    for one in tensors_in(y):
        if type(one) is GlobalTensor and tuple(one._block.shape) != tuple(one._layout.local):
            raise ValueError(
                f"{name_of(function)} is registered as elementwise, but gave {dims(one._block.shape) or '0-d'} for a "
                f"block of {dims(one._layout.local) or '0-d'} on worker {one._context.me}; "
                "distdl.register(function, handler) says what other functions do"
            )
    return y
