"""Parts of a global tensor: slices, elements, pieces, and what gathers and scatters along dims."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from distdl.geometry.boxes import Interval
from distdl.globals.adopting import adopt
from distdl.globals.bounds import check_range
from distdl.globals.context import KnownLayout
from distdl.globals.functions.pointwise import elementwise
from distdl.globals.functions.shapes import Intervals, frozen, reshaped, shape_of, view_of, whole_along
from distdl.globals.operands import block_of
from distdl.globals.replicas import entered
from distdl.globals.table import TABLE, handles
from distdl.globals.tensor import GlobalTensor, note_written
from distdl.tensors.connection import zeros_on

# -- basic indices: numbers, slices, None and ...


class _Part(NamedTuple):
    """A part of a tensor, which stays where it is.

    Attributes:
        local: the index of its cells in this worker's block; None on a worker that has none of its places.
        target: its layout.
    """

    local: tuple[Any, ...] | None
    target: KnownLayout


def part(x: GlobalTensor, index: Sequence[Any]) -> GlobalTensor:
    """The part of a tensor at a basic index. Cells stay where they are; a view, as in torch."""
    layout, key = x._layout, frozen(index)
    local, target = x._context.keep(("part", layout, key), lambda: _plan_part(layout, tuple(index)))
    block = block_of(x)
    block = block.reshape(-1)[:0].reshape(target.local) if local is None else block[local]
    return view_of(x, block, target, False)


def _plan_part(layout: KnownLayout, index: tuple[Any, ...]) -> _Part:
    context = layout.context
    torch.empty(layout.size, device="meta")[index]  # (for torch's error)
    steps = _steps(index, len(layout.rulers))
    own = context.me in layout.partition
    at = list(layout.partition.index_of(context.me)) if own else []
    picked: list[Any] = []  # of the partition
    local: list[Any] = []
    intervals: list[Intervals] = []
    here = own
    dim = 0
    for step in steps:
        if step is None:
            picked.append(None)
            local.append(None)
            intervals.append(((0, 1),))
            continue
        along = layout.intervals[dim]
        n = along[-1][1]
        if isinstance(step, slice):
            start, stop, by = step.indices(n)
            count = max(-(-(stop - start) // by), 0)
            first = [(min(max(-(-(a - start) // by), 0), count)) for a, _ in along]
            last = [(min(max(-(-(b - start) // by), 0), count)) for _, b in along]
            intervals.append(tuple(zip(first, last, strict=True)))
            picked.append(slice(None))
            if own:
                i, j, origin = first[at[dim]], last[at[dim]], along[at[dim]][0]
                local.append(
                    slice(start + i * by - origin, start + (j - 1) * by + 1 - origin, by) if j > i else slice(0, 0)
                )
        else:
            cell = operator.index(step) % n
            place = next(k for k, (a, b) in enumerate(along) if a <= cell < b)
            picked.append(place)
            here = here and at[dim] == place
            if own:
                local.append(cell - along[place][0])
        dim += 1
    target = context.layout(context.array(layout.partition.workers[tuple(picked)]), intervals)
    return _Part(tuple(local) if here else None, target)


def _steps(index: tuple[Any, ...], dims: int) -> list[Any]:
    """An index with a step for each dim, in the place of ``...`` and of what is left out."""
    used = sum(step is not None and step is not Ellipsis for step in index)
    fill = [slice(None)] * (dims - used)
    if not any(step is Ellipsis for step in index):
        return [*index, *fill]
    found: list[Any] = []
    for step in index:
        found.extend(fill if step is Ellipsis else [step])
    return found


def _normal(index: Any) -> tuple[Any, ...]:
    """An index as a tuple, with numbers as Python's, and lists and arrays as tensors."""
    items = index if isinstance(index, tuple) else (index,)
    return tuple(map(_item, items))


def _item(step: Any) -> Any:
    if step is None or step is Ellipsis or type(step) is int or isinstance(step, bool):
        return step
    if isinstance(step, slice):
        return slice(*(None if one is None else operator.index(one) for one in (step.start, step.stop, step.step)))
    if isinstance(step, (list, tuple, range, np.ndarray)):
        return torch.as_tensor(np.asarray(step) if isinstance(step, np.ndarray) else list(step))
    if isinstance(step, torch.Tensor):
        if not step.dim() and not (step.dtype is torch.bool or step.is_floating_point()) and type(step) is torch.Tensor:
            return int(step)
        return step
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


def _chosen(index: tuple[Any, ...], dims: int) -> _Chosen | None:
    """An index that has tensors, in two steps; None if it has a bool, or a mask that is split."""
    if any(isinstance(step, bool) for step in index):
        return None
    if any(type(step) is GlobalTensor and step.dtype in (torch.bool, torch.uint8) for step in index):
        return None
    wide = [step.dim() if _is_mask(step) else 1 for step in index if step is not None and step is not Ellipsis]
    fill = [slice(None)] * (dims - sum(wide))
    steps: list[Any] = []
    for step in index if any(one is Ellipsis for one in index) else (*index, Ellipsis):
        steps.extend(fill if step is Ellipsis else [step])
    basic: list[Any] = []
    cells: list[torch.Tensor | None] = []
    for step in steps:
        if not isinstance(step, torch.Tensor):
            basic.append(step)
            cells.extend([] if type(step) is int else [None])
            continue
        whole = step.full_tensor() if type(step) is GlobalTensor else step
        found = list(whole.nonzero(as_tuple=True)) if _is_mask(whole) else [whole]
        basic.extend([slice(None)] * len(found))
        cells.extend(found)
    return _Chosen(tuple(basic), cells)


def _is_mask(step: Any) -> bool:
    return isinstance(step, torch.Tensor) and step.dtype in (torch.bool, torch.uint8)


@handles("__getitem__", "Tensor")
def get(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A part of a tensor. Behind an index tensor, the dims that it picks from are whole."""
    x, given = args
    index = _normal(given)
    if type(x) is not GlobalTensor:
        return _looked_up(func, x, given)
    if all(map(_is_basic, index)):
        return part(x, index)
    chosen = _chosen(index, x.dim())
    if chosen is None:
        return TABLE[None](func, args, kwargs)
    return picked(part(x, chosen.basic), chosen.cells)


def _looked_up(func: Callable[..., Any], table: torch.Tensor, index: Any) -> Any:
    """Rows of a tensor that is the same everywhere, at indices that are split."""
    if type(index) is not GlobalTensor or _is_mask(index):
        return TABLE[None](func, (table, index), {})
    layout, context = index._layout, index._context

    def make() -> KnownLayout:
        more = table.dim() - 1
        workers = layout.partition.workers.reshape(layout.partition.workers.shape + (1,) * more)
        return context.layout(context.array(workers), [*layout.intervals, *(((0, n),) for n in table.shape[1:])])

    n = table.shape[0]
    check_range(index, -n, n, lambda wrong: torch.empty(n)[wrong])
    target = context.keep(("looked up", layout, table.shape), make)
    return GlobalTensor._of(entered(table, context)[index._block].reshape(target.local), target)


def picked(x: GlobalTensor, cells: Sequence[torch.Tensor | None]) -> GlobalTensor:
    """What index tensors pick, which are the same on every worker."""
    dims = [dim for dim, one in enumerate(cells) if one is not None]
    shape = torch.broadcast_shapes(*(cells[dim].shape for dim in dims))  # type: ignore[union-attr]
    _check_cells(x, dims, cells)
    y = whole_along(x, dims, "indexing")
    layout, context = y._layout, y._context

    def make() -> KnownLayout:
        rest = [dim for dim in range(len(cells)) if dim not in dims]
        first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0  # where the picked dims go
        before = [dim for dim in rest if dim < dims[0]] if first else []
        behind = [dim for dim in rest if dim not in before]
        intervals = [
            *(layout.intervals[dim] for dim in before), *(((0, n),) for n in shape),
            *(layout.intervals[dim] for dim in behind),
        ]  # fmt: skip
        return context.layout(
            context.array(layout.partition.workers.reshape([len(one) for one in intervals])), intervals
        )

    target = context.keep(("picked", layout, tuple(dims), shape), make)
    block = block_of(y)
    if not block.numel():
        return GlobalTensor._of(zeros_on(block, target.local), target)
    index = tuple(slice(None) if one is None else one for one in cells)
    return GlobalTensor._of(block[index].reshape(target.local), target)


def _check_cells(x: GlobalTensor, dims: Sequence[int], cells: Sequence[Any]) -> None:
    """Check that index tensors do not reach beyond the tensor: a worker without cells would not see it."""
    for dim in dims:
        n, one = x.shape[dim], cells[dim]
        if one.numel() and not (-n <= int(one.min()) and int(one.max()) < n):
            wrong = next(int(i) for i in one.ravel() if not -n <= i < n)
            raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {n}")


@handles("__setitem__", "Tensor")
def put(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write into a part of a tensor, in place; a value comes to where the cells are."""
    x, given, value = args
    if type(x) is not GlobalTensor:
        x = adopt(x, (given, value), "an assignment")
    index = _normal(given)
    if all(map(_is_basic, index)):
        _write(part(x, index), value)
    elif len(index) == 1 and type(index[0]) is GlobalTensor and _is_mask(index[0]) and _is_number(value):
        mask: Any = index[0].to(torch.bool)
        x.masked_fill_(reshaped(mask, (*mask.shape, *[1] * (x.dim() - mask.dim()))), value)
    else:
        chosen = _chosen(index, x.dim())
        if chosen is None:
            raise NotImplementedError(
                "a global tensor is written at a split mask only with one number for all; use torch.where"
            )
        y = part(x, chosen.basic)
        dims = [dim for dim, one in enumerate(chosen.cells) if one is not None]
        _check_cells(y, dims, chosen.cells)
        if _is_number(value):
            mask = torch.zeros([n if dim in dims else 1 for dim, n in enumerate(y.shape)], dtype=torch.bool)
            mask[tuple(0 if one is None else one for one in chosen.cells)] = True
            y.masked_fill_(mask, value)
        else:
            index = tuple(slice(None) if one is None else one for one in chosen.cells)
            y.copy_(TABLE[None](assignment, (y, index, value), {}))
    note_written(x, "an assignment to a part")


def assignment(x: torch.Tensor, index: tuple[Any, ...], value: torch.Tensor) -> torch.Tensor:
    """What an assignment to elements gives, apart from x."""
    y = x.clone()
    y[index] = value
    return y


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (not value.dim() and type(value) is torch.Tensor)


def _write(y: GlobalTensor, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        y.fill_(value)
        return
    while value.dim() > y.dim() and value.shape[0] == 1:
        value = value.squeeze(0)
    y.copy_(value)


# -- pieces


@handles("select narrow", "torch Tensor")
def select(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    def run(input: GlobalTensor, dim: int, *rest: Any, **more: Any) -> GlobalTensor:
        named = [more[name] for name in ("index", "start", "length") if name in more]  # (in the order of places)
        numbers = [operator.index(one) for one in (*rest, *named)]
        shape_of(func, input, (dim, *rest), more)  # (for torch's error)
        dim %= input.dim()
        first = numbers[0] % input.shape[dim] if numbers[0] < 0 else numbers[0]
        step = first if func.__name__ == "select" else slice(first, first + numbers[1])
        return part(input, [*[slice(None)] * dim, step])

    return run(*args, **kwargs)


@handles("split chunk tensor_split split_with_sizes hsplit vsplit dsplit", "torch Tensor")
def split(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces along a dim, each where it is."""
    (x, rest), kwargs = _apart(args, kwargs)
    size = x.shape

    def make() -> tuple[Any, int, list[Interval]]:
        pieces = func(torch.empty(size, device="meta"), *rest, **kwargs)
        name = func.__name__
        if name in ("hsplit", "vsplit", "dsplit"):
            dim = {"hsplit": min(1, len(size) - 1), "vsplit": 0, "dsplit": 2}[name]
        else:
            dim = kwargs.get("dim", rest[1] if len(rest) > 1 else 0) % len(size)
        stride = torch.empty(size, device="meta").stride(dim)
        starts = [piece.storage_offset() // stride for piece in pieces]
        return type(pieces), dim, [(i, i + piece.shape[dim]) for i, piece in zip(starts, pieces, strict=True)]

    kind, dim, pieces = x._context.keep(("split", func, size, frozen(rest), frozen(kwargs)), make)
    return kind(part(x, [*[slice(None)] * dim, slice(*piece)]) for piece in pieces)


@handles("unbind", "torch Tensor")
def unbind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[GlobalTensor, ...]:
    (x, rest), kwargs = _apart(args, kwargs)
    dim = kwargs.get("dim", rest[0] if rest else 0)
    n = x.shape[dim]
    return tuple(part(x, [*[slice(None)] * (dim % x.dim()), one]) for one in range(n))


@handles("__iter__", "Tensor")
def iterate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[GlobalTensor]:
    if not args[0].dim():
        raise TypeError("iteration over a 0-d tensor")
    return iter(args[0].unbind(0))


def _apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, tuple[Any, ...]], dict[str, Any]]:
    """The tensor, and what else is given."""
    if args:
        return (args[0], args[1:]), kwargs
    name = "input" if "input" in kwargs else "tensor"
    return (kwargs[name], ()), {key: value for key, value in kwargs.items() if key != name}


@handles("where", "torch Tensor")
def where(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Element by element; with a condition alone, it is nonzero."""
    return (TABLE[None] if len(args) + len(kwargs) == 1 else elementwise)(func, args, kwargs)
