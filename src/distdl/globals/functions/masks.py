"""Masks: reading and writing the elements of a global tensor where a split mask is true.

How many elements a mask selects depends on its values. So the workers gather one number each: how many they select. The
only other messages bring x and the mask to the same rows.
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
from distdl.globals.moving.alignment import block_in, local_block
from distdl.globals.moving.writes_into_plain import split_beside
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.globals.views.aliasing import write_back
from distdl.partition.sharing import gather_values
from distdl.tensors.modes import uncounted


class _MaskedRows(NamedTuple):
    """A tensor as rows, one row for each cell of a flattened mask.

    Attributes:
        x: the tensor of shape (cells of the mask, *dims behind the mask).
        mask: the mask of the rows in this worker's block of x, a plain vector.
        selected: the layout of the selected rows.
    """

    x: GlobalTensor
    mask: torch.Tensor
    selected: KnownLayout


def _masked_rows(x: GlobalTensor, mask: GlobalTensor, name: str) -> _MaskedRows:
    """Flatten the first dims of x, which a mask covers, to rows; bring the mask to the workers of these rows."""
    rest = x.shape[mask.dim() :]
    y = reshaped(x, (mask.numel(), *rest), name)
    layout = y._layout
    along_rows = layout.context.keep(
        ("first dim", layout),
        lambda: layout.context.layout(
            layout.partition.workers.reshape(layout.partition.workers.shape[0], -1),
            [layout.intervals[0], ((0, 1),) * prod(layout.partition.workers.shape[1:])],
        ),
    )
    known: Any = mask.detach()
    flat = reshaped(known, (mask.numel(), 1), name)
    local_mask = block_in(flat, along_rows, name).reshape(-1)
    return _MaskedRows(y, local_mask, _selected_layout(layout, local_mask))


def _selected_layout(layout: KnownLayout, mask: torch.Tensor) -> KnownLayout:
    """The layout of the rows that a mask selects along the first dim. Each selected row stays on its worker.

    Collective: the workers gather how many rows each selects.

    Args:
        layout: of the tensor from which rows are selected.
        mask: this worker's part of the mask.
    """
    context, name = layout.context, "the number of elements that a mask chooses"
    context.comm.where = name
    counts = gather_values(context.comm, context.everyone, name, int(mask.sum()))
    workers = layout.partition.workers
    stop, along = 0, []
    for worker in workers.reshape(workers.shape[0], -1)[:, 0].tolist():
        start, stop = stop, stop + counts[worker]
        along.append((start, stop))
    return context.layout(layout.partition.workers, [along, *layout.intervals[1:]])


def select_by_mask(x: GlobalTensor, mask: GlobalTensor, at: int) -> GlobalTensor:
    """Return ``x[:, ..., :, mask]``, where ``at`` dims stand in front of the mask. Collective.

    Raises: IndexError if the mask does not have the extents of the dims that it covers.
    """
    check_mask(x.shape, mask, at)
    dims = range(mask.dim())
    mask_first = x.movedim([at + dim for dim in dims], list(dims)) if at else x
    rows = _masked_rows(mask_first, mask, "indexing")
    block = block_of(rows.x)
    y = GlobalTensor._of(block[rows.mask].reshape(rows.selected.local), rows.selected)
    if at:
        y = y.movedim(0, at)
        y._strides = ()  # torch's result is contiguous
    return y


def check_mask(shape: Sequence[int], mask: torch.Tensor, at: int) -> None:
    """Check that a mask has the extents of the dims that it covers, beginning with dim ``at`` of a shape.

    Raises: IndexError, with torch's text, if it does not.
    """
    for dim, n in enumerate(mask.shape):
        if len(shape) <= at + dim or shape[at + dim] != n:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {dim} does not match the shape of the indexed "
                f"tensor {list(shape)} at index {at + dim}"
            )


def write_by_mask(x: GlobalTensor, mask: GlobalTensor, value: Any) -> GlobalTensor:
    """Return x with ``x[mask] = value`` done. The mask covers the first dims of x. x itself is not written.

    Args:
        value: a number or a tensor that broadcasts to ``x[mask]``: one row for all, or one for each selected row.
    Raises: IndexError or RuntimeError, as torch does, for a mask or a value that does not fit.
    """
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
    rows = _masked_rows(x, mask, "an assignment")
    return reshaped(_replace_selected(rows, value), x.shape)


def check_value(x: GlobalTensor, value: torch.Tensor, shape: Sequence[int]) -> None:
    """Check that a tensor can be written into a part of x that has the given shape.

    Raises: RuntimeError, as torch does, for another dtype or for a shape that does not broadcast.
    """
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
    """Whether a value is a Python number or a tensor without dims."""
    return not isinstance(value, torch.Tensor) or not value.dim()


def _replace_selected(rows: _MaskedRows, value: Any) -> GlobalTensor:
    """Return the rows, in which the selected ones are replaced by those of a value that broadcasts to them."""
    shape = rows.selected.extents
    check_value(rows.x, value, shape)
    local_value = local_block(expanded(value, shape), rows.selected, "an assignment")
    block = block_of(rows.x).index_put((rows.mask,), local_value)
    return GlobalTensor._of(block, rows.x._layout)


@handles("masked_select", "torch Tensor")
@by_name
def masked_select(func: Any, input: Any, mask: Any) -> Any:
    """The elements where the mask is true, as a vector; tensor and mask broadcast to each other. Collective."""
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    x, mask = _expand_both(input, mask, shape)
    if not shape or x._context.comm.imagined:
        return NotImplemented
    return select_by_mask(x, mask, 0)


def _expand_both(x: Any, mask: Any, shape: Sequence[int]) -> tuple[GlobalTensor, GlobalTensor]:
    """Expand a tensor and its mask to a shape. At least one is global; the other is split as that one."""
    if type(x) is not GlobalTensor:
        x = split_beside(x, (mask,))
    if type(mask) is not GlobalTensor:
        mask = split_beside(mask, (x,))
    return expanded(x, tuple(shape)), expanded(mask, tuple(shape))


@handles("masked_fill masked_fill_", "torch Tensor")
def masked_fill(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Element by element, but for a tensor, a mask and a value that all have no dims.

    torch's kernel reads the value as a number, and only one worker has it. So ``where`` computes that case.
    """

    def run(input: Any, mask: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim():
            return elementwise(func, args, kwargs)
        if value.is_complex() and not input.is_complex():  # torch's error depends on the value
            torch.zeros(1, dtype=input.dtype).masked_fill(torch.tensor(True), value.item())
        if input.dim() or mask.dim():
            return elementwise(func, args, kwargs)
        y = torch.where(mask, value.to(input.dtype), input)
        return input.copy_(y) if func.__name__.endswith("_") else y

    return run(*args, **kwargs)


@handles("masked_scatter masked_scatter_", "torch Tensor")
@with_global_input
def masked_scatter(func: Any, input: Any, mask: Any, source: Any) -> Any:
    """Write the first elements of a source, in order, to where the mask is true. Collective.

    Raises: RuntimeError, as torch does, for a mask that is not boolean, or a source with too few elements.
    """
    in_place = func.__name__.endswith("_")
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"{func.__name__} only supports boolean masks, but got mask with dtype {mask.dtype}")
    if in_place:
        torch.empty(mask.shape, dtype=mask.dtype, device="meta").expand(input.shape)  # raises torch's error
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    if not shape or input._context.comm.imagined:
        return NotImplemented
    x, mask = _expand_both(input, mask, shape)
    rows = _masked_rows(reshaped(x, (x.numel(),)), reshaped(mask, (x.numel(),)), func.__name__)
    count = rows.selected.extents[0]
    if source.numel() < count:
        raise RuntimeError("masked_scatter: expected self and source to have the same number of elements")
    y = reshaped(_replace_selected(rows, source.reshape(-1)[:count]), shape)
    return write_back(input, y, func.__name__) if in_place else y


@handles("nonzero argwhere", "torch Tensor")
@by_name
def nonzero(func: Any, input: Any, *, as_tuple: bool = False) -> Any:
    """The indices of all nonzero elements, one row each; or a tuple of one vector for each dim. Collective."""
    if not input.dim() or input._context.comm.imagined:
        return NotImplemented
    indices = _nonzero_indices(input)
    return indices.unbind(1) if as_tuple else indices


@handles("where", "torch Tensor")
def where(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``where(condition, x, y)``, element by element; ``where(condition)`` is ``nonzero(as_tuple=True)``."""
    if len(args) + len(kwargs) > 1:
        return elementwise(func, args, kwargs)
    (condition,) = (*args, *kwargs.values())
    return condition.nonzero(as_tuple=True)


def _nonzero_indices(x: GlobalTensor) -> GlobalTensor:
    """The indices of all nonzero elements, one row each; each row lies on the worker of its element. Collective."""
    shape = x.shape
    known: Any = x.detach()
    flat = reshaped(known, (x.numel(),), "nonzero")
    layout, context = flat._layout, flat._context
    local_mask = block_of(flat) != 0
    flat_indices = local_mask.nonzero().reshape(-1) + layout.box[0][0]
    indices = torch.stack(torch.unravel_index(flat_indices, shape), 1)
    selected = _selected_layout(layout, local_mask)
    workers = layout.partition.workers[:, None]
    target = context.layout(workers, [selected.intervals[0], ((0, len(shape)),)])
    return GlobalTensor._of(indices.reshape(target.local), target)
