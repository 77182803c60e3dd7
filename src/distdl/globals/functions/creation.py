"""Functions that make new tensors from the shape, dtype or values of a global one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.globals.functions.shapes import expanded
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.rules.applying import as_list
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import check_once
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.structures import map_tensors
from distdl.globals.tensor.table import TABLE, by_name, handles
from distdl.tensors.private_torch import variable_functions
from distdl.tensors.recorders import as_one_call

_one_hot = as_one_call(torch.nn.functional.one_hot)  # it reads the classes, to check them


@handles("new_zeros new_ones new_full new_empty", "Tensor")
def new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor of x's dtype: split like x if it has as many dims, and plain otherwise."""
    x, *rest = args
    size, more = (kwargs["size"], rest) if "size" in kwargs else (rest[0], rest[1:]) if rest else ((), [])
    if not isinstance(size, (tuple, list)):
        size, more = [one for one in rest if isinstance(one, int)], []
    size = tuple(int(n) for n in size)
    named = {name: value for name, value in kwargs.items() if name != "size"}
    if not size or len(size) != x.dim():
        return func(x._block.detach(), size, *more, **named)
    layout = x._context.keep(("like", x._layout, size), lambda: x._layout.resized(size))
    return GlobalTensor._of(func(x._block.detach(), layout.local, *more, **named), layout)


@handles("new_tensor", "Tensor")
def new_tensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    if type(x) is not GlobalTensor or any(type(one) is GlobalTensor for one in (*rest, *kwargs.values())):
        return fall_back(func, args, kwargs)
    return x._block.detach().new_tensor(*rest, **kwargs)


@handles("new", "Tensor")
def constructor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.new(2, 3)``, without values, or ``x.new([1., 2.])``. Other forms fall back."""
    x, *rest = args
    first = rest[0] if len(rest) == 1 else None
    if type(x) is GlobalTensor and not kwargs:
        size = first if isinstance(first, torch.Size) else tuple(rest) or (0,)
        if all(type(n) is int for n in size):
            return new(torch.Tensor.new_empty, (x, size), {})
        if isinstance(first, (list, tuple)):
            return new_tensor(torch.Tensor.new_tensor, args, {})
    return fall_back(func, args, kwargs)


@handles("one_hot", "functional")
@by_name
def one_hot(func: Any, tensor: Any, num_classes: int = -1) -> GlobalTensor:
    """A new last dim of classes, which is not split. Without their number, the largest class number is gathered."""
    if num_classes < 1:
        num_classes = int(tensor.max()) + 1
    layout: KnownLayout = tensor._layout

    def make() -> KnownLayout:
        return layout.context.layout(layout.partition.workers[..., None], [*layout.intervals, ((0, num_classes),)])

    target = layout.context.keep(("one_hot", layout, num_classes), make)
    return GlobalTensor._of(_one_hot(block_of(tensor), num_classes).reshape(target.local), target)


@handles("linspace logspace", "torch")
def between_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor between ends that are numbers or 0-d tensors, whose values are gathered on every worker.

    Raises: RuntimeError for an end that has dims.
    """

    def value(one: torch.Tensor) -> Any:
        if one.dim():
            raise RuntimeError(f"{func.__name__} needs numbers and tensors without dims; got one with {one.dim()}")
        return one.item()

    given, named = map_tensors((args, kwargs), value)
    return func(*given, **named)


@handles("meshgrid", "torch")
@by_name
def meshgrid(func: Any, *tensors: Any, indexing: str | None = None) -> Any:
    """The coordinates of a grid, expanded without memory. Tensors of more than one dim fall back, for torch's error."""
    axes = as_list(tensors)
    if any(one.dim() > 1 for one in axes):
        return NotImplemented
    check_once(func, tensors, {} if indexing is None else {"indexing": indexing})
    order = list(range(len(axes)))
    if indexing == "xy" and len(axes) > 1:
        order[:2] = [1, 0]
    shape = tuple(axes[place].numel() for place in order)
    lines = [one.reshape([-1 if place == at else 1 for place in order]) for at, one in enumerate(axes)]
    return tuple(expanded(one, shape) for one in lines)


# torch.meshgrid asks no subclass itself, but calls this function, which does
TABLE[variable_functions.meshgrid] = meshgrid
