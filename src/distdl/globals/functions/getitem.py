"""Subscripts: ``x[...]`` and ``x[...] = value``, with numbers, slices, index tensors and masks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from distdl.globals.functions.gather_scatter import with_global_input
from distdl.globals.functions.masks import check_mask, check_value, is_number, select_by_mask, write_by_mask
from distdl.globals.functions.shapes import expanded
from distdl.globals.functions.slicing import check_index_bounds, index_by_tensors, part, together
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import gather_global, local_block
from distdl.globals.moving.writes_into_plain import split_beside, write_into_plain
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import check_range
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of, own_of
from distdl.globals.tensor.table import handles
from distdl.globals.views.aliasing import check_writable, note_written, write_back
from distdl.tensors.connection import saving, zeros_on

_INDICES = frozenset([torch.int64, torch.int32, torch.uint8, torch.bool])
_MASKS = (torch.bool, torch.uint8)


def _as_tuple(index: Any) -> tuple[Any, ...]:
    """A subscript as a tuple of Python numbers, slices, None, ``...`` and tensors. Its items are called *steps*.

    Raises: IndexError, with torch's text, for an item that is no index.
    """
    items = index if isinstance(index, tuple) or (type(index) is list and _stands_for_tuple(index)) else (index,)
    return tuple(map(_step, items))


def _stands_for_tuple(index: list[Any]) -> bool:
    """Whether torch takes a list for a tuple, as in ``x[[slice(1, -1), slice(None)]]``."""
    return len(index) < 32 and any(
        one is None or one is Ellipsis or isinstance(one, (slice, torch.Tensor, list, tuple)) for one in index
    )


def _step(step: Any) -> Any:
    """An item of a subscript as a number, a slice, None, ``...``, a bool, or a tensor that has dims or is a mask."""
    if step is None or step is Ellipsis or type(step) is int or isinstance(step, bool):
        return step
    if isinstance(step, slice):
        return slice(*(None if one is None else operator.index(one) for one in (step.start, step.stop, step.step)))
    if isinstance(step, (list, tuple, range, np.ndarray)):
        found = torch.as_tensor(np.asarray(step) if isinstance(step, np.ndarray) else list(step))
        return found.long() if found.is_floating_point() else found  # torch makes float32 of an empty list
    if isinstance(step, torch.Tensor):
        dtype = step.dtype
        is_integer = not (dtype in _MASKS or dtype.is_floating_point or dtype.is_complex)
        if not step.dim() and is_integer:  # torch takes it for a number, also beside index tensors
            imagined = type(step) is GlobalTensor and step._context.comm.imagined
            return 0 if imagined else int(step)
        if dtype not in _INDICES:  # torch checks this only where there are cells
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        return step
    if not isinstance(step, str) and not hasattr(step, "__index__"):
        raise IndexError(
            "only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables are valid indices (got "
            f"{type(step).__name__})"
        )
    return operator.index(step)


def _is_basic(step: Any) -> bool:
    return step is None or step is Ellipsis or isinstance(step, slice) or type(step) is int


def _in_two(index: tuple[Any, ...], shape: Sequence[int]) -> tuple[tuple[Any, ...], list[torch.Tensor | None]]:
    """Split a subscript that has tensors into two that are applied one after the other.

    A bool, or a mask without dims, makes a new dim, and picks one row of it or none.

    Args:
        shape: of the tensor that is indexed.
    Returns: the first subscript, of numbers, slices and None; and for each dim of its result an index tensor, plain and
        the same on every worker, or None.
    Raises: IndexError if the extents of a mask differ from those of the dims that it covers.
    """
    index = tuple(torch.tensor(step) if isinstance(step, bool) else step for step in index)
    dims = len(shape)
    wide = [step.dim() if _is_mask(step) else 1 for step in index if step is not None and step is not Ellipsis]
    fill = [slice(None)] * (dims - sum(wide))
    steps: list[Any] = []
    for step in index if any(one is Ellipsis for one in index) else (*index, Ellipsis):
        steps.extend(fill if step is Ellipsis else [step])
    basic: list[Any] = []
    cells: list[torch.Tensor | None] = []
    dim = 0
    for step in steps:
        if not isinstance(step, torch.Tensor):
            basic.append(step)
            cells.extend([] if type(step) is int else [None])
            dim += step is not None
            continue
        if _is_mask(step):
            check_mask(shape, step, dim)
        dim += step.dim() if _is_mask(step) else 1
        plain = gather_global(step)
        found = list(plain.nonzero(as_tuple=True)) if _is_mask(plain) else [plain]
        basic.extend([slice(None)] * len(found) if plain.dim() or not _is_mask(plain) else [None])
        cells.extend(found)
    return tuple(basic), cells


def _is_mask(step: Any) -> bool:
    return isinstance(step, torch.Tensor) and step.dtype in _MASKS


def _at_mask(index: tuple[Any, ...], x: GlobalTensor) -> tuple[tuple[Any, ...], GlobalTensor, int] | None:
    """Split a subscript of x whose only tensor is a global mask with dims.

    Returns: the subscript with full slices in place of the mask; the mask; and the dim of the tensor at that subscript
        where the mask begins. None for other subscripts, and in a rehearsal.
    """
    masks = [step for step in index if type(step) is GlobalTensor and _is_mask(step)]
    if len(masks) != 1 or not masks[0].dim() or x._context.comm.imagined:
        return None
    mask, dims = masks[0], masks[0].dim()
    if not all(step is mask or _is_basic(step) for step in index):
        return None
    used = sum(step is not None and step is not Ellipsis and step is not mask for step in index) + dims
    basic: list[Any] = []
    at = 0
    for step in index:
        if step is mask:
            at = sum(type(one) is not int for one in basic)
        wide = dims if step is mask else x.dim() - used if step is Ellipsis else 0
        basic.extend([slice(None)] * wide if wide or step is Ellipsis else [step])
    truths: Any = mask.bool()
    return tuple(basic), truths, at


@handles("__getitem__", "Tensor")
def get(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[index]``: a view for numbers, slices and None; for tensors, a copy.

    For a global mask, x and the mask come to the same rows; nothing else moves. Index tensors are gathered on every
    worker, and the dims that they index become whole. Into a plain x, each worker looks up its own indices.
    """
    x, given = args
    index = _as_tuple(given)
    if type(x) is not GlobalTensor:
        split = [step for step in index if type(step) is GlobalTensor]
        if not split:  # the only global tensor was a number
            return x[index]
        if not any(map(_is_mask, split)):
            return _look_up(func, x, index)
        x = split_beside(x, split)
    if all(map(_is_basic, index)):
        return part(x, index)
    masked = _at_mask(index, x)
    if masked is not None:
        rest, mask, at = masked
        return select_by_mask(part(x, rest), mask, at)
    first, cells = _in_two(index, x.shape)
    return index_by_tensors(part(x, first), cells)


def _look_up(func: Callable[..., Any], x: torch.Tensor, index: tuple[Any, ...]) -> Any:
    """``x[index]`` of a plain x, where an index tensor is global: each worker looks up its own indices.

    Several index tensors fall back, unless they follow each other. Then they become one index into their dims, merged.
    """
    first = next(place for place, step in enumerate(index) if not _is_basic(step))
    tensors = [step for step in index if not _is_basic(step)]
    masks = any(_is_mask(step) or isinstance(step, bool) for step in tensors)
    adjacent = all(step is one for step, one in zip(index[first:], tensors, strict=False))
    if len(tensors) > 1 and adjacent and not masks:
        return get(func, _merge(x, index, first, tensors), {})
    if len(tensors) != 1 or type(tensors[0]) is not GlobalTensor:
        return fall_back(func, (x, index), {})
    basic, dim = _without(index, first, x.dim())
    table = x[basic].movedim(dim, 0) if len(index) > 1 else x
    cells = tensors[0]
    layout, context = cells._layout, cells._context

    def make() -> KnownLayout:
        more = table.dim() - 1
        workers = layout.partition.workers.reshape(layout.partition.workers.shape + (1,) * more)
        return context.layout(workers, [*layout.intervals, *(((0, n),) for n in table.shape[1:])])

    target = context.keep(("looked up", layout, table.shape), make)
    y = GlobalTensor._of(entered(table, context)[cells._block].reshape(target.local), target)
    return y.movedim(list(range(cells.dim())), list(range(dim, dim + cells.dim()))) if dim else y


def _merge(
    x: torch.Tensor, index: tuple[Any, ...], first: int, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Any]:
    """Merge neighbouring index tensors, from the first place on, into one, and the dims that they index into one dim.

    Returns: x, indexed by all other steps, with these dims as one; and the index of the merged tensor into that.
    Raises: IndexError if they do not broadcast to each other, or reach beyond x.
    """
    together(tensors)  # raises torch's error on every worker
    others = tuple(step if _is_basic(step) else slice(None) for step in index)
    _, at = _without(index, first, x.dim())
    table = x[others]
    shape = table.shape[at : at + len(tensors)]
    cells: Any = 0
    for n, one in zip(shape, tensors, strict=True):
        # the merged index would hide an index that is out of range
        check_range(own_of(one), -n, n, partial(operator.getitem, torch.empty(n, device="cpu")))
        one = one.to(x.device) if one.device.type == "cpu" else one  # torch takes indices on the host, too
        cells = cells * n + one.long() % max(n, 1)
    return table.flatten(at, at + len(tensors) - 1), (*[slice(None)] * at, cells)


def _without(index: tuple[Any, ...], place: int, dims: int) -> tuple[tuple[Any, ...], int]:
    """Put a full slice in place of one step of an index. Returns the index, and the dim of its result for this slice.

    Args:
        place: of the step that is replaced.
        dims: how many the indexed tensor has.
    """
    used = sum(step is not None and step is not Ellipsis for step in index)
    basic: list[Any] = []
    at = 0
    for n, step in enumerate(index):
        if n == place:
            at = sum(type(one) is not int for one in basic)
        basic.extend([slice(None)] * (dims - used) if step is Ellipsis else [slice(None) if n == place else step])
    return tuple(basic), at


@handles("__setitem__", "Tensor")
def put(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``x[index] = value``, in place. The value comes to the workers that hold the cells."""
    x, given, value = args
    if type(x) is not GlobalTensor:
        write_into_plain(func, args, kwargs, x, (given, value), "an assignment")
        return
    index = _as_tuple(given)
    if all(map(_is_basic, index)):
        _write(part(x, index), value)
    else:
        _write_at(x, index, value)
    note_written(x, "an assignment to a part")


def _write_at(x: GlobalTensor, index: tuple[Any, ...], value: Any) -> None:
    """Write into x at a subscript that has tensors."""
    rest, mask, at = _at_mask(index, x) or ((), None, 0)
    if mask is not None and (is_number(value) or not at):
        y = part(x, rest)
        if at:
            y = y.movedim([at + dim for dim in range(mask.dim())], list(range(mask.dim())))
        write_back(y, write_by_mask(y, mask, value), "an assignment at a mask")
        return
    first, cells = _in_two(index, x.shape)
    y = part(x, first)
    write_back(y, with_cells(y, cells, value, False), "an assignment at indices")


def with_cells(x: GlobalTensor, cells: Sequence[torch.Tensor | None], value: Any, accumulate: bool) -> GlobalTensor:
    """A copy of x with a value put, or added, into the cells at index tensors.

    Each worker has all index tensors, and writes into the cells of its block.

    Args:
        cells: for each dim a plain index tensor, or None.
        value: a number or tensor, which broadcasts to the shape that the index tensors pick.
    Raises: IndexError for an index that is out of range; RuntimeError for a value of another shape.
    """
    dims = [dim for dim, one in enumerate(cells) if one is not None]
    together(cells)  # raises torch's error
    check_index_bounds(x, dims, cells)
    layout = x._layout
    tensors = torch.broadcast_tensors(*(cells[dim] for dim in dims))
    rows = _rows_of_value(x, dims, tensors[0].shape, value)
    values = local_block(rows, _layout_of_rows(layout, tuple(dims), len(rows)), "an assignment")
    block = block_of(x)
    if not block.numel() or any(one.is_meta for one in tensors):  # in a rehearsal, no index has values
        return GlobalTensor._of(saving(block + zeros_on(values, ()).to(block.dtype)), layout)
    own = torch.ones(len(rows), dtype=torch.bool)
    index: list[torch.Tensor] = []
    for dim, one in zip(dims, tensors, strict=True):
        start, stop = layout.box[dim]
        flat = one.reshape(-1).cpu() % x.shape[dim] - start
        own &= (flat >= 0) & (flat < stop - start)
        index.append(flat)
    found = block.movedim(dims, list(range(len(dims)))).index_put(
        tuple(one[own] for one in index), values[own], accumulate
    )
    return GlobalTensor._of(found.movedim(list(range(len(dims))), dims), layout)


def _rows_of_value(x: GlobalTensor, dims: Sequence[int], picked: torch.Size, value: Any) -> Any:
    """A value that is to be written into x at index tensors, as rows: one for each cell of their common shape.

    A row has the dims of x that have no index tensor.

    Args:
        dims: those of x that have one.
        picked: the common shape of the index tensors.
    Raises: RuntimeError if the value does not broadcast to ``x[index]``.
    """
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    rest = [dim for dim in range(x.dim()) if dim not in dims]
    at = len([dim for dim in rest if dim < dims[0]]) if adjacent else 0
    others = tuple(x.shape[dim] for dim in rest)
    shape = (*others[:at], *picked, *others[at:])
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, dtype=x.dtype, device=x.device)
    value = value.to(x.dtype) if is_number(value) else value
    check_value(x, value, shape)
    while value.dim() > len(shape):
        value = value.squeeze(0)
    rows = expanded(value, shape).movedim(list(range(at, at + len(picked))), list(range(len(picked))))
    return rows.reshape((picked.numel(), *others))


def _layout_of_rows(layout: KnownLayout, dims: tuple[int, ...], count: int) -> KnownLayout:
    """The layout in which workers need these rows: all rows, and along the other dims the cells of their blocks of x.

    Args:
        layout: of x.
        dims: those of x that have an index tensor.
        count: how many rows there are.
    """

    def make() -> KnownLayout:
        rest = [dim for dim in range(len(layout.extents)) if dim not in dims]
        workers = layout.partition.workers.transpose([*dims, *rest])
        workers = workers.reshape((-1, *workers.shape[len(dims) :]))
        along = [layout.intervals[dim] for dim in rest]
        return layout.context.layout(workers, [((0, count),) * workers.shape[0], *along])

    return layout.context.keep(("cells", layout, dims, count), make)


@handles("index_put index_put_ _index_put_impl_", "torch Tensor")
@with_global_input
def index_put(func: Any, input: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> Any:
    """Write, or add, at index tensors or masks; None stands for a whole dim."""
    index = _as_tuple(tuple(slice(None) if one is None else one for one in indices))
    # other than in a subscript, a number stays an index tensor, and takes no dim away
    index = tuple(torch.tensor(step, device="cpu") if type(step) is int else step for step in index)
    masked = None if accumulate else _at_mask(index, input)
    first, cells = _in_two(index, input.shape)
    if masked is not None and not masked[2]:
        y = write_by_mask(input, masked[1], values)
    else:
        y = with_cells(part(input, first), cells, values, accumulate)
        if y.dim() > input.dim():  # a bool has made a new dim
            y = part(y, tuple(0 if step is None else step for step in first))
    return write_back(input, y, func.__name__) if func.__name__.endswith("_") else y


def _write(y: GlobalTensor, value: Any) -> None:
    """Write a number or a tensor into a view y. The tensor broadcasts to y; more dims in front may have extent 1."""
    check_writable(y)
    if not isinstance(value, torch.Tensor):
        y.fill_(value)
        return
    while value.dim() > y.dim() and value.shape[0] == 1:
        value = value.squeeze(0)
    y.copy_(value)
