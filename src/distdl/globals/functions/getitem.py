"""Subscripts: ``x[...]`` and ``x[...] = value``, with numbers, slices, index tensors and masks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from distdl.globals.functions.gather_scatter import brought, of_global
from distdl.globals.functions.masks import check_mask, check_value, chosen_by, is_number, written_by
from distdl.globals.functions.shapes import expanded
from distdl.globals.functions.slicing import check_cells, part, picked, together
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import entire
from distdl.globals.moving.writes_into_plain import split_beside, write
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import check_range
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of, own_of
from distdl.globals.tensor.table import handles
from distdl.globals.views.aliasing import check_written, note_written, write_back
from distdl.tensors.connection import saving, zeros_on

_INDICES = frozenset([torch.int64, torch.int32, torch.uint8, torch.bool])
_MASKS = (torch.bool, torch.uint8)


def _normal(index: Any) -> tuple[Any, ...]:
    """An index as a tuple, with numbers as Python's, and lists and arrays as tensors."""
    items = index if isinstance(index, tuple) or (type(index) is list and _is_of_steps(index)) else (index,)
    return tuple(map(_item, items))


def _is_of_steps(index: list[Any]) -> bool:
    """Whether torch takes a list for a tuple: ``x[[slice(1, -1), slice(None)]]``."""
    return len(index) < 32 and any(
        one is None or one is Ellipsis or isinstance(one, (slice, torch.Tensor, list, tuple)) for one in index
    )


def _item(step: Any) -> Any:
    if step is None or step is Ellipsis or type(step) is int or isinstance(step, bool):
        return step
    if isinstance(step, slice):
        return slice(*(None if one is None else operator.index(one) for one in (step.start, step.stop, step.step)))
    if isinstance(step, (list, tuple, range, np.ndarray)):
        found = torch.as_tensor(np.asarray(step) if isinstance(step, np.ndarray) else list(step))
        return found.long() if found.is_floating_point() else found  # (as an empty list)
    if isinstance(step, torch.Tensor):
        dtype = step.dtype
        whole = not (dtype in _MASKS or dtype.is_floating_point or dtype.is_complex)
        if not step.dim() and whole:  # (a number, as in torch: beside other tensors, it is none of them)
            imagined = type(step) is GlobalTensor and step._context.comm.imagined
            return 0 if imagined else int(step)
        if dtype not in _INDICES:  # (which torch sees only where there are cells)
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


class _Chosen(NamedTuple):
    """An index of tensors: the basic part is taken first.

    Attributes:
        basic: its numbers, slices and None.
        cells: behind it, for each dim an index tensor, or None.
    """

    basic: tuple[Any, ...]
    cells: list[torch.Tensor | None]


def _chosen(index: tuple[Any, ...], shape: Sequence[int]) -> _Chosen:
    """An index that has tensors, in two steps. A bool, or a mask without dims, picks one row or none of a new dim.

    Args:
        shape: of what the index is for.
    Raises: IndexError if a mask has not the extents of the dims that it covers.
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
        whole = entire(step)
        found = list(whole.nonzero(as_tuple=True)) if _is_mask(whole) else [whole]
        basic.extend([slice(None)] * len(found) if whole.dim() or not _is_mask(whole) else [None])
        cells.extend(found)
    return _Chosen(tuple(basic), cells)


def _is_mask(step: Any) -> bool:
    return isinstance(step, torch.Tensor) and step.dtype in _MASKS


class _Masked(NamedTuple):
    """An index of one split mask, and else of numbers, slices and None, which are taken first.

    Attributes:
        basic: these; in the place of the mask, its dims whole.
        mask: the mask.
        at: how many dims are in front of it, behind the basic index.
    """

    basic: tuple[Any, ...]
    mask: GlobalTensor
    at: int


def _masked(index: tuple[Any, ...], x: GlobalTensor) -> _Masked | None:
    """An index that has one split mask; None for another one."""
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
    return _Masked(tuple(basic), truths, at)


@handles("__getitem__", "Tensor")
def get(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A part of a tensor. Behind an index tensor, the dims that it picks from are whole."""
    x, given = args
    index = _normal(given)
    if type(x) is not GlobalTensor:
        split = [step for step in index if type(step) is GlobalTensor]
        if not split:  # (but a number)
            return x[index]
        if not any(map(_is_mask, split)):
            return _looked_up(func, x, index)
        x = split_beside(x, split)
    if all(map(_is_basic, index)):
        return part(x, index)
    masked = _masked(index, x)
    if masked is not None:
        return chosen_by(part(x, masked.basic), masked.mask, masked.at)
    chosen = _chosen(index, x.shape)
    return picked(part(x, chosen.basic), chosen.cells)


def _looked_up(func: Callable[..., Any], x: torch.Tensor, index: tuple[Any, ...]) -> Any:
    """Rows of a tensor that is the same everywhere, at indices that are split; numbers, slices and None come first."""
    first = next(place for place, step in enumerate(index) if not _is_basic(step))
    tensors = [step for step in index if not _is_basic(step)]
    masks = any(_is_mask(step) or isinstance(step, bool) for step in tensors)
    adjacent = all(step is one for step, one in zip(index[first:], tensors, strict=False))
    if len(tensors) > 1 and adjacent and not masks:
        return get(func, _as_one(x, index, first, tensors), {})
    if len(tensors) != 1 or type(tensors[0]) is not GlobalTensor:
        return fall_back(func, (x, index), {})
    basic, dim = _around(index, first, x.dim())
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


def _as_one(
    x: torch.Tensor, index: tuple[Any, ...], first: int, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Any]:
    """Several index tensors behind each other, as one: of their dims together. They may be the same tensor.

    Args:
        first: the place of the first of them.
    Raises: IndexError, as torch does.
    """
    together(tensors)  # (for torch's error, alike on every worker)
    others = tuple(step if _is_basic(step) else slice(None) for step in index)
    _, at = _around(index, first, x.dim())
    table = x[others]
    shape = table.shape[at : at + len(tensors)]
    cells: Any = 0
    for n, one in zip(shape, tensors, strict=True):
        # (of the index tensors as one, torch could not tell)
        check_range(own_of(one), -n, n, partial(operator.getitem, torch.empty(n, device="cpu")))
        one = one.to(x.device) if one.device.type == "cpu" else one  # (torch takes some of the host beside others)
        cells = cells * n + one.long() % max(n, 1)
    return table.flatten(at, at + len(tensors) - 1), (*[slice(None)] * at, cells)


def _around(index: tuple[Any, ...], place: int, dims: int) -> tuple[tuple[Any, ...], int]:
    """An index without the tensor at a place: there, a dim stays whole. And which dim of the result that is."""
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
    """Write into a part of a tensor, in place; a value comes to where the cells are."""
    x, given, value = args
    if type(x) is not GlobalTensor:
        write(func, args, kwargs, x, (given, value), "an assignment")
        return
    index = _normal(given)
    if all(map(_is_basic, index)):
        _write(part(x, index), value)
    else:
        _write_at(x, index, value)
    note_written(x, "an assignment to a part")


def _write_at(x: GlobalTensor, index: tuple[Any, ...], value: Any) -> None:
    """Write at index tensors, or at a mask."""
    masked = _masked(index, x)
    if masked is not None and (is_number(value) or not masked.at):
        y = part(x, masked.basic)
        dims = masked.mask.dim()
        if masked.at:
            y = y.movedim([masked.at + dim for dim in range(dims)], list(range(dims)))
        write_back(y, written_by(y, masked.mask, value), "an assignment at a mask")
        return
    chosen = _chosen(index, x.shape)
    y = part(x, chosen.basic)
    write_back(y, with_cells(y, chosen.cells, value, False), "an assignment at indices")


def with_cells(x: GlobalTensor, cells: Sequence[torch.Tensor | None], value: Any, accumulate: bool) -> GlobalTensor:
    """x with other values at the cells that index tensors name, which are the same on every worker.

    Each worker writes those of the cells that it has. The values come to where they are written.
    """
    dims = [dim for dim, one in enumerate(cells) if one is not None]
    together(cells)  # (for torch's error)
    check_cells(x, dims, cells)
    layout, context = x._layout, x._context
    tensors = torch.broadcast_tensors(*(cells[dim] for dim in dims))
    count = tensors[0].numel()
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    before = [n for dim, n in enumerate(x.shape) if dim not in dims and dim < dims[0]] if adjacent else []
    rest = [dim for dim in range(x.dim()) if dim not in dims]
    shape = (*before, *tensors[0].shape, *(x.shape[dim] for dim in rest[len(before) :]))
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, dtype=x.dtype, device=x.device)
    value = value.to(x.dtype) if is_number(value) else value
    check_value(x, value, shape)
    while value.dim() > len(shape):
        value = value.squeeze(0)
    picked = list(range(len(before), len(before) + tensors[0].dim()))
    rows = expanded(value, shape).movedim(picked, list(range(len(picked))))
    rows = rows.reshape((count, *(x.shape[dim] for dim in rest)))

    def make() -> KnownLayout:
        workers = layout.partition.workers.transpose([*dims, *rest])
        workers = workers.reshape((-1, *workers.shape[len(dims) :]))
        along = [layout.intervals[dim] for dim in rest]
        return context.layout(workers, [((0, count),) * workers.shape[0], *along])

    needed = context.keep(("cells", layout, tuple(dims), count), make)
    given = brought(rows, needed, "an assignment")
    block = block_of(x)
    if not block.numel() or any(one.is_meta for one in tensors):  # (in a rehearsal, where no index has values)
        return GlobalTensor._of(saving(block + zeros_on(given, ()).to(block.dtype)), layout)
    own = torch.ones(count, dtype=torch.bool)
    index: list[torch.Tensor] = []
    for dim, one in zip(dims, tensors, strict=True):
        start, stop = layout.box[dim]
        flat = one.reshape(-1).cpu() % x.shape[dim] - start
        own &= (flat >= 0) & (flat < stop - start)
        index.append(flat)
    found = block.movedim(dims, list(range(len(dims)))).index_put(
        tuple(one[own] for one in index), given[own], accumulate
    )
    return GlobalTensor._of(found.movedim(list(range(len(dims))), dims), layout)


@handles("index_put index_put_ _index_put_impl_", "torch Tensor")
@of_global
def index_put(func: Any, input: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> Any:
    """Write, or add, at index tensors."""
    index = _normal(tuple(slice(None) if one is None else one for one in indices))
    # (a number takes no dim away here, other than in a subscript)
    index = tuple(torch.tensor(step, device="cpu") if type(step) is int else step for step in index)
    masked = None if accumulate else _masked(index, input)
    chosen = _chosen(index, input.shape)
    if masked is not None and not masked.at:
        y = written_by(input, masked.mask, values)
    else:
        y = with_cells(part(input, chosen.basic), chosen.cells, values, accumulate)
        if y.dim() > input.dim():  # the dims of truths
            y = part(y, tuple(0 if step is None else step for step in chosen.basic))
    return write_back(input, y, func.__name__) if func.__name__.endswith("_") else y


def _write(y: GlobalTensor, value: Any) -> None:
    check_written(y)
    if not isinstance(value, torch.Tensor):
        y.fill_(value)
        return
    while value.dim() > y.dim() and value.shape[0] == 1:
        value = value.squeeze(0)
    y.copy_(value)
