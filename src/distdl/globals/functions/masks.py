"""Masks: the elements that a split mask chooses, where it is true, and writing there.

How many elements there are follows from values. So the workers tell each other how many each has: one number from each
worker, and no other message but those that bring x and the mask to the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from distdl.globals.functions.gather_scatter import with_global_input
from distdl.globals.functions.pointwise import elementwise
from distdl.globals.functions.shapes import expanded, reshaped
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import moved, part_of
from distdl.globals.moving.writes_into_plain import split_beside
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.globals.views.aliasing import write_back
from distdl.partition.sharing import gather_values
from distdl.tensors.modes import uncounted


class _Rows(NamedTuple):
    """The rows of x at the cells of a mask, which is flat.

    Attributes:
        x: of a dim for all cells of the mask, and the dims behind.
        mask: this worker's, beside its block of x.
        chosen: the layout of the rows that are chosen.
    """

    x: GlobalTensor
    mask: torch.Tensor
    chosen: KnownLayout


def _rows(x: GlobalTensor, mask: GlobalTensor, name: str) -> _Rows:
    """x as rows, of which the mask chooses some. The mask covers the first dims of x."""
    rest = x.shape[mask.dim() :]
    y = reshaped(x, (mask.numel(), *rest), name)
    layout = y._layout
    first = layout.context.keep(
        ("first dim", layout),
        lambda: layout.context.layout(
            layout.partition.workers.reshape(layout.partition.workers.shape[0], -1),
            [layout.intervals[0], ((0, 1),) * prod(layout.partition.workers.shape[1:])],
        ),
    )
    known: Any = mask.detach()
    flat = reshaped(known, (mask.numel(), 1), name)
    own = moved(flat, first, name).reshape(-1)
    return _Rows(y, own, _chosen(layout, own))


def _chosen(layout: KnownLayout, mask: torch.Tensor) -> KnownLayout:
    """The layout of what masks choose along the first dim of a tensor."""
    context = layout.context
    context.comm.where = "the number of elements that a mask chooses"
    told = gather_values(context.comm, context.everyone, "the number of elements that a mask chooses", int(mask.sum()))
    workers = layout.partition.workers
    stop, along = 0, []
    for worker in workers.reshape(workers.shape[0], -1)[:, 0].tolist():
        start, stop = stop, stop + told[worker]
        along.append((start, stop))
    return context.layout(layout.partition.workers, [along, *layout.intervals[1:]])


def chosen_by(x: GlobalTensor, mask: GlobalTensor, at: int) -> GlobalTensor:
    """``x[:, ..., mask]``, with so many dims in front of the mask."""
    check_mask(x.shape, mask, at)
    dims = range(mask.dim())
    first = x.movedim([at + dim for dim in dims], list(dims)) if at else x
    rows = _rows(first, mask, "indexing")
    block = block_of(rows.x)
    y = GlobalTensor._of(block[rows.mask].reshape(rows.chosen.local), rows.chosen)
    if at:
        y = y.movedim(0, at)
        y._strides = ()  # (as torch's is contiguous)
    return y


def check_mask(shape: Sequence[int], mask: torch.Tensor, at: int) -> None:
    """Raises: IndexError if a mask has not the extents of the dims that it covers, of a tensor of a shape."""
    for dim, n in enumerate(mask.shape):
        if len(shape) <= at + dim or shape[at + dim] != n:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {dim} does not match the shape of the indexed "
                f"tensor {list(shape)} at index {at + dim}"
            )


def written_by(x: GlobalTensor, mask: GlobalTensor, value: Any) -> GlobalTensor:
    """x with other values where a mask, which covers its first dims, is true: one for all rows, or one for each."""
    check_mask(x.shape, mask, 0)
    rest = x.shape[mask.dim() :]
    while not is_number(value) and value.dim() > len(rest) + 1 and value.shape[0] == 1:
        value = value.squeeze(0)
    if is_number(value) or value.dim() <= len(rest) or value.shape[0] == 1:
        over: Any = reshaped(mask, (*mask.shape, *[1] * len(rest)))
        if is_number(value):
            return x.masked_fill(over, value)
        check_value(x, value, (1, *rest))
        y: Any = torch.where(over, value.squeeze(0) if value.dim() > len(rest) else value, x)
        return reshaped(y, x.shape)
    rows = _rows(x, mask, "an assignment")
    return reshaped(_replaced(rows, value), x.shape)


def check_value(x: GlobalTensor, value: torch.Tensor, shape: Sequence[int]) -> None:
    """Raises: RuntimeError, as torch does, if a tensor cannot be written to a part of the given shape."""
    if value.dim() and value.dtype != x.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {x.dtype} for the destination and "
            f"{value.dtype} for the source."
        )
    if len(value.shape) > len(shape) and set(value.shape[: len(value.shape) - len(shape)]) == {1}:
        shape = (*value.shape[: len(value.shape) - len(shape)], *shape)
    with uncounted():
        torch.empty(tuple(value.shape), device="meta").expand(tuple(shape))


def is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or not value.dim()


def _replaced(rows: _Rows, value: Any) -> GlobalTensor:
    """Rows with other values, one for each that is chosen."""
    shape = rows.chosen.extents
    check_value(rows.x, value, shape)
    given = part_of(expanded(value, shape), rows.chosen, "an assignment")
    block = block_of(rows.x).index_put((rows.mask,), given)
    return GlobalTensor._of(block, rows.x._layout)


@handles("masked_select", "torch Tensor")
@by_name
def masked_select(func: Any, input: Any, mask: Any) -> Any:
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    x, chosen = _both(input, mask, shape)
    if not shape or x._context.comm.imagined:
        return NotImplemented
    return chosen_by(x, chosen, 0)


def _both(x: Any, mask: Any, shape: Sequence[int]) -> tuple[GlobalTensor, GlobalTensor]:
    """A tensor and its mask, of which one at least is global, as global ones of a shape."""
    if type(x) is not GlobalTensor:
        x = split_beside(x, (mask,))
    if type(mask) is not GlobalTensor:
        mask = split_beside(mask, (x,))
    return expanded(x, tuple(shape)), expanded(mask, tuple(shape))


@handles("masked_fill masked_fill_", "torch Tensor")
def masked_fill(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Element by element. (Torch wants a number: of tensors without dims, a worker without cells has none.)"""

    def run(input: Any, mask: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim():
            return elementwise(func, args, kwargs)
        if value.is_complex() and not input.is_complex():  # (for torch's error, which depends on the value)
            torch.zeros(1, dtype=input.dtype).masked_fill(torch.tensor(True), value.item())
        if input.dim() or mask.dim():
            return elementwise(func, args, kwargs)
        y = torch.where(mask, value.to(input.dtype), input)
        return input.copy_(y) if func.__name__.endswith("_") else y

    return run(*args, **kwargs)


@handles("masked_scatter masked_scatter_", "torch Tensor")
@with_global_input
def masked_scatter(func: Any, input: Any, mask: Any, source: Any) -> Any:
    """The first elements of a source, to where a mask is true."""
    in_place = func.__name__.endswith("_")
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"{func.__name__} only supports boolean masks, but got mask with dtype {mask.dtype}")
    if in_place:
        torch.empty(mask.shape, dtype=mask.dtype, device="meta").expand(input.shape)  # (for torch's error)
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    if not shape or input._context.comm.imagined:
        return NotImplemented
    x, chosen = _both(input, mask, shape)
    rows = _rows(reshaped(x, (x.numel(),)), reshaped(chosen, (x.numel(),)), func.__name__)
    count = rows.chosen.extents[0]
    if source.numel() < count:
        raise RuntimeError("masked_scatter: expected self and source to have the same number of elements")
    y = reshaped(_replaced(rows, source.reshape(-1)[:count]), shape)
    return write_back(input, y, func.__name__) if in_place else y


@handles("nonzero argwhere", "torch Tensor")
@by_name
def nonzero(func: Any, input: Any, *, as_tuple: bool = False) -> Any:
    """The places of all elements that are not zero, one in each row."""
    if not input.dim() or input._context.comm.imagined:
        return NotImplemented
    places = where_true(input)
    return places.unbind(1) if as_tuple else places


@handles("where", "torch Tensor")
def where(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Element by element; with a condition alone, it is nonzero."""
    if len(args) + len(kwargs) > 1:
        return elementwise(func, args, kwargs)
    (condition,) = (*args, *kwargs.values())
    return condition.nonzero(as_tuple=True)


def where_true(x: GlobalTensor) -> GlobalTensor:
    """The places, one in each row."""
    shape = x.shape
    known: Any = x.detach()
    flat = reshaped(known, (x.numel(),), "nonzero")
    layout, context = flat._layout, flat._context
    own = block_of(flat) != 0
    numbers = own.nonzero().reshape(-1) + layout.box[0][0]
    places = torch.stack(torch.unravel_index(numbers, shape), 1)
    chosen = _chosen(layout, own)
    workers = layout.partition.workers[:, None]
    target = context.layout(workers, [chosen.intervals[0], ((0, len(shape)),)])
    return GlobalTensor._of(places.reshape(target.local), target)
