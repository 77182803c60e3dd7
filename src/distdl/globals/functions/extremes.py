"""The largest and the smallest elements along dims of a global tensor, and their places."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from distdl.globals.functions.reductions import (
    check_nonempty,
    dims_of,
    gather_entries,
    reduce_and_merge,
    reduced_layout,
    reduced_shape,
    split_along,
    sum_blocks,
    without_dims,
)
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.tensors.connection import local
from distdl.tensors.dtypes import RARE
from distdl.tensors.function import Function


@handles("amax amin", "torch Tensor")
@by_name
def extreme(func: Any, input: Any, dim: Any = (), keepdim: bool = False) -> Any:
    """The largest or smallest element over dims. Raises: torch's error where there are no elements."""
    if isinstance(dim, (tuple, list)) and not dim:
        _check_filled(input, func.__name__)
    dims = dims_of(input, dim)
    if input.is_complex() and not input.numel():  # torch takes complex numbers if the result is empty
        check_nonempty(input, dims, func.__name__)
        return input.sum(dims, keepdim)
    return extreme_over(input, dims, keepdim, func.__name__)


def _check_filled(x: GlobalTensor, name: str) -> None:
    if not x.numel():
        raise RuntimeError(
            f"{name}(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with "
            "the 'dim' argument."
        )


@handles("max min", "torch Tensor")
@by_name
def max_or_min(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
    """``max`` or ``min``: of all elements; along a dim, with the places; or element by element of two tensors."""
    name, other = func.__name__, dim if isinstance(dim, torch.Tensor) else other
    if other is not None:
        return torch.maximum(input, other) if name == "max" else torch.minimum(input, other)
    if dim is None:
        _check_filled(input, name)
        return extreme_over(input, dims_of(input, None), False, "a" + name, nan="equal")
    values, indices = _with_index(input, dims_of(input, int(dim)), keepdim, name)
    return getattr(torch.return_types, name)((values, indices))


@handles("aminmax", "torch Tensor")
@by_name
def both_extremes(func: Any, input: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    """The smallest and the largest element, of all or along a dim."""
    dims = dims_of(input, dim)
    if not input.numel() or input.is_complex():  # torch refuses both
        torch.aminmax(torch.zeros([min(n, 1) for n in input.shape], dtype=input.dtype), dim=dim)
    found = (extreme_over(input, dims, keepdim, "amin"), extreme_over(input, dims, keepdim, "amax"))
    return torch.return_types.aminmax(found)


@handles("argmax argmin", "torch Tensor")
@by_name
def place_of_extreme(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The place of the largest or smallest element along a dim, or in the flat tensor; the first of equal ones."""
    name = func.__name__.removeprefix("arg")
    if dim is None and input.dim() != 1:
        return _flat_place(input.detach(), keepdim, name)
    return _with_index(input.detach(), dims_of(input, dim), keepdim, name)[1]


def extreme_over(x: GlobalTensor, dims: tuple[int, ...], keepdim: bool, name: str, nan: str = "nan") -> GlobalTensor:
    """The largest or smallest element over dims. All elements equal to it get equal shares of its gradient.

    Args:
        name: "amax" or "amin".
        nan: the gradient where the result is nan. "nan": it is nan, as of ``amax``. "equal": the elements that are nan
            share it, as of ``max`` over all elements. "none": it is zero, as of a norm.
    """
    check_nonempty(x, dims, name)
    layout = x._layout

    def over(block: torch.Tensor) -> Any:
        return getattr(block, name)(dims, keepdim=True) if dims else getattr(block, name)()

    torch_differentiates = not split_along(layout, dims) and not (nan == "equal" and dims)
    if torch_differentiates or not (x.requires_grad and torch.is_grad_enabled()):
        return reduce_and_merge(over, x, dims, keepdim, name)
    block, least, shape = block_of(x), (1,) * x.dim(), reduced_shape(layout, dims)
    with torch.no_grad():
        of_blocks = gather_entries(local(over, shape, (block, least)), layout, dims, name, everywhere=True)
        value = local(over, shape, (of_blocks, least))
        ties = (block == value) | (block.isnan() & value.isnan()) if nan == "equal" else block == value
        counts = gather_entries(ties.sum(dims, keepdim=True).to(block.dtype), layout, dims, name, everywhere=True)
        counts = counts.sum(dims, keepdim=True)
        counts = counts.clamp_min(1) if nan == "none" else counts
        share = ties / counts if layout.active else ties.to(block.dtype)
    y = sum_blocks((block * share).sum(dims, keepdim=True), layout, dims, name)
    target = y._layout
    if not target.active:
        value = value.reshape(-1)[:0].reshape(target.local)
    y = GlobalTensor._of(ValueOf.apply(y._block, value), target)
    return y if keepdim else without_dims(y, dims)


class ValueOf(Function):
    """The given value, with the derivative of y. It takes the place of a y that is inexact, or not finite."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None

    @staticmethod
    def jvp(ctx: Any, dy: torch.Tensor, _: Any) -> torch.Tensor:
        return dy.view_as(dy)


def _with_index(x: GlobalTensor, dims: tuple[int, ...], keepdim: bool, name: str) -> tuple[GlobalTensor, GlobalTensor]:
    """``max`` or ``min`` along one dim, and the first place of each. Without dims, a copy of x and zeros."""
    check_nonempty(x, dims, name)
    layout, block = x._layout, block_of(x)
    target = reduced_layout(layout, dims)
    if not dims:
        return GlobalTensor._of(block.clone(), layout), GlobalTensor._of(
            block.detach().new_zeros(block.shape, dtype=torch.int64), layout
        )
    (dim,) = dims
    shape = reduced_shape(layout, dims)
    values, indices = _extreme_of_block(name, block, dim, shape)
    if split_along(layout, dims):
        if layout.active:
            indices = indices + layout.box[dim][0]
        values, indices = (gather_entries(one, layout, dims, name) for one in (values, indices))
        values, places = _extreme_of_block(name, values, dim, target.local)
        indices = indices.gather(dim, places) if target.active and 0 not in target.local else places
    found = GlobalTensor._of(values, target), GlobalTensor._of(indices, target)
    return found if keepdim else (without_dims(found[0], dims), without_dims(found[1], dims))


def _extreme_of_block(
    name: str, block: torch.Tensor, dim: int, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The extremes along a dim of a block, and their places in it. A block without cells gives zeros of a shape."""
    if block.numel():
        values, indices = getattr(block, name)(dim, keepdim=True)
        return values, indices
    values = local(lambda one: getattr(one, name)(dim, keepdim=True)[0], shape, (block, (1,) * block.dim()))
    return values, torch.zeros(shape, dtype=torch.int64, device=block.device)


def _flat_place(x: GlobalTensor, keepdim: bool, name: str) -> GlobalTensor:
    """The place of the ``max`` or ``min`` in the flat tensor. Each worker finds that of its block.

    Raises: IndexError without elements; torch's error for a dtype that it does not compare.
    """
    dims = tuple(range(x.dim()))
    if not x.numel():
        raise IndexError(f"arg{name}(): Expected reduction dim to be specified for input.numel() == 0.")
    layout, block = x._layout, block_of(x)
    if x.dtype is torch.bool or x.is_complex() or x.dtype in RARE:
        getattr(torch, "arg" + name)(torch.zeros(1, dtype=x.dtype))  # raises torch's error on every worker
    target = reduced_layout(layout, dims)
    if not dims:
        return GlobalTensor._of(block.new_zeros(block.shape, dtype=torch.int64), layout)
    shape = reduced_shape(layout, dims)
    value, flat = block.new_zeros(shape), torch.zeros(shape, dtype=torch.int64, device=block.device)
    if block.numel():
        at = int(getattr(torch, "arg" + name)(block))
        value = block.reshape(-1)[at].reshape(shape)
        own = torch.unravel_index(torch.tensor(at), block.shape)
        strides = [prod(layout.extents[dim + 1 :]) for dim in dims]
        flat += sum((start + int(i)) * n for (start, _), i, n in zip(layout.box, own, strides, strict=True))
    if split_along(layout, dims):
        values, flats = (gather_entries(one, layout, dims, name) for one in (value, flat))
        if target.active:
            best = getattr(values, "a" + name)()
            first = torch.where((values == best) | (values.isnan() & best.isnan()), flats, x.numel()).amin()
            flat = first.reshape(target.local)
        else:
            flat = flats.reshape(target.local)
    y = GlobalTensor._of(flat, target)
    return y if keepdim else without_dims(y, dims)
