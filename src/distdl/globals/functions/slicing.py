"""Parts of a global tensor: basic indices, index tensors, and pieces along a dim."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from distdl.geometry.boxes import Interval, Intervals
from distdl.globals.functions.shapes import view_of, with_whole_dims
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.rules.meta_checks import as_key, result_shape
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.structures import map_tensors
from distdl.globals.tensor.table import TABLE, by_name, handles
from distdl.globals.views.strides import View
from distdl.tensors.connection import saving, zeros_on

# -- basic indices: numbers, slices, None and ...


class _Part(NamedTuple):
    """How a part of a tensor lies, whose cells stay on their workers.

    Attributes:
        local: the index of the part in this worker's block; None on a worker that is outside the part's partition.
        target: the layout of the part.
    """

    local: tuple[Any, ...] | None
    target: KnownLayout


def part(x: GlobalTensor, index: Sequence[Any]) -> GlobalTensor:
    """The part of a tensor at a basic index of numbers, slices, None and ``...``: a view, as in torch. Nothing moves.

    Raises: IndexError, as torch does, for an index that the tensor does not have.
    """
    layout, key = x._layout, as_key(index)
    local, target = x._context.keep(("part", layout, key), lambda: _plan_part(layout, tuple(index)))
    block = block_of(x)
    if local is not None:
        block = block[local]
    else:  # a tensor without cells is reshaped as a view, whatever its strides
        block = (block if block.dim() else block.reshape(1))[:0].reshape(target.local)
    return view_of(x, block, target, False, View(("part", key), lambda whole: whole[tuple(index)]))


def _plan_part(layout: KnownLayout, index: tuple[Any, ...]) -> _Part:
    """Work out where the part at a basic index lies, dim by dim."""
    context = layout.context
    torch.empty(layout.size, device="meta")[index]  # raises torch's error
    active = context.me in layout.partition
    at = list(layout.partition.index_of(context.me)) if active else []
    kept_workers: list[Any] = []  # the index of the part's workers in the partition
    local: list[Any] = []
    intervals: list[Intervals] = []
    dim = 0
    for step in _steps(index, len(layout.rulers)):
        if step is None:
            kept_workers.append(None)
            local.append(None)
            intervals.append(((0, 1),))
            continue
        along = layout.intervals[dim]
        n = along[-1][1]
        if isinstance(step, slice):
            start, stop, by = step.indices(n)
            split = _sliced_intervals(along, start, stop, by)
            kept_workers.append(slice(None))
            intervals.append(split)
            if active:
                (i, j), shift = split[at[dim]], start - along[at[dim]][0]
                local.append(slice(shift + i * by, shift + (j - 1) * by + 1, by) if j > i else slice(0, 0))
        else:
            cell = operator.index(step) % n
            place = next(k for k, (a, b) in enumerate(along) if a <= cell < b)
            kept_workers.append(place)
            active = active and at[dim] == place
            local.append(cell - along[place][0])
        dim += 1
    target = context.layout(layout.partition.workers[tuple(kept_workers)], intervals)
    return _Part(tuple(local) if active else None, target)


def _sliced_intervals(along: Intervals, start: int, stop: int, by: int) -> Intervals:
    """Which cells of ``range(start, stop, by)`` lie in each interval, counted from the first cell of the range."""
    count = max(-(-(stop - start) // by), 0)

    def cells_before(end: int) -> int:
        return min(max(-(-(end - start) // by), 0), count)

    return tuple((cells_before(a), cells_before(b)) for a, b in along)


def _steps(index: tuple[Any, ...], dims: int) -> list[Any]:
    """An index with a step for each dim: ``...`` and the dims left out become full slices."""
    used = sum(step is not None and step is not Ellipsis for step in index)
    fill = [slice(None)] * (dims - used)
    if not any(step is Ellipsis for step in index):
        return [*index, *fill]
    found: list[Any] = []
    for step in index:
        found.extend(fill if step is Ellipsis else [step])
    return found


def index_by_tensors(x: GlobalTensor, cells: Sequence[torch.Tensor | None]) -> GlobalTensor:
    """Index a tensor by index tensors. Their dims become whole.

    Args:
        cells: for each dim of x an index tensor, which is the same on every worker, or None for the whole dim.
    Raises: IndexError, as torch does, if the index tensors do not fit each other or the tensor.
    """
    dims = [dim for dim, one in enumerate(cells) if one is not None]
    shape = together(cells)
    check_index_bounds(x, dims, cells)
    y = with_whole_dims(x, dims, "indexing")
    layout, context = y._layout, y._context

    def make() -> KnownLayout:
        rest = [dim for dim in range(len(cells)) if dim not in dims]
        first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0  # where the dims of the indices go
        before = [dim for dim in rest if dim < dims[0]] if first else []
        behind = [dim for dim in rest if dim not in before]
        intervals = [
            *(layout.intervals[dim] for dim in before), *(((0, n),) for n in shape),
            *(layout.intervals[dim] for dim in behind),
        ]  # fmt: skip
        return context.layout(layout.partition.workers.reshape([len(one) for one in intervals]), intervals)

    target = context.keep(("picked", layout, tuple(dims), shape), make)
    block = block_of(y)
    if not block.numel():
        return GlobalTensor._of(saving(zeros_on(block, target.local)), target)
    index = tuple(slice(None) if one is None else one for one in cells)
    return GlobalTensor._of(block[index].reshape(target.local), target)


def together(cells: Sequence[torch.Tensor | None]) -> torch.Size:
    """The common shape of index tensors.

    Raises: IndexError, as torch does, if they do not broadcast to each other.
    """
    shapes = [one.shape for one in cells if one is not None]
    try:
        found: torch.Size = torch.broadcast_shapes(*shapes)
        return found
    except RuntimeError:
        raise IndexError(
            "shape mismatch: indexing tensors could not be broadcast together with shapes "
            + ", ".join(str(list(shape)) for shape in shapes)
        ) from None


def check_index_bounds(x: GlobalTensor, dims: Sequence[int], cells: Sequence[Any]) -> None:
    """Check the bounds of index tensors, because a worker without cells does not call torch's function.

    Raises: IndexError, on every worker, for an index beyond the tensor. As in torch, not if there is nothing to pick.
    """
    if any(not n for dim, n in enumerate(x.shape) if dim not in dims):
        return
    for dim in dims:
        n, one = x.shape[dim], cells[dim]
        if one.numel() and not one.is_meta and not (-n <= int(one.min()) and int(one.max()) < n):
            wrong = next(int(i) for i in one.ravel() if not -n <= i < n)
            raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {n}")


# -- pieces


@handles("select narrow", "torch Tensor")
@by_name
def select(func: Any, input: GlobalTensor, dim: int, *rest: Any, **more: Any) -> GlobalTensor:
    """One cell of a dim, or as many as ``length`` from a start."""
    named = [more[name] for name in ("index", "start", "length") if name in more]
    numbers = [operator.index(one) for one in (*rest, *named)]
    result_shape(func, input, (dim, *rest), more)  # raises torch's error
    dim %= input.dim()
    first = numbers[0] % input.shape[dim] if numbers[0] < 0 else numbers[0]
    step = first if func.__name__ == "select" else slice(first, first + numbers[1])
    return part(input, [*[slice(None)] * dim, step])


@by_name
def slice_dim(func: Any, input: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """The cells of a dim from start to end, by steps."""
    return part(input, [*[slice(None)] * (dim % input.dim()), slice(start, end, step)])


TABLE[torch.ops.aten.slice] = slice_dim  # torch's associative scan calls it


@handles(
    "split chunk tensor_split split_with_sizes hsplit vsplit dsplit unsafe_split unsafe_chunk unsafe_split_with_sizes",
    "torch Tensor",
)
def split(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Split a tensor into pieces along a dim. Nothing moves. Sizes may be given as tensors."""
    x, *rest = args
    size = x.shape
    rest, kwargs = map_tensors((rest, kwargs), lambda one: one.tolist())
    if type(x) is not GlobalTensor:  # but the sizes are
        return func(x, *rest, **kwargs)

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

    kind, dim, pieces = x._context.keep(("split", func, size, as_key(rest), as_key(kwargs)), make)
    if func.__name__ in _OF_MANY_VIEWS:
        return kind(_pieces(x, dim, tuple(slice(*piece) for piece in pieces)))
    return kind(part(x, [*[slice(None)] * dim, slice(*piece)]) for piece in pieces)


_OF_MANY_VIEWS = ("split", "chunk", "split_with_sizes")


def _pieces(x: GlobalTensor, dim: int, steps: Sequence[slice | int]) -> list[GlobalTensor]:
    """All pieces of a tensor along a dim, as views of one function, because torch refuses writes into such views.

    Args:
        steps: slices or numbers that cover the dim, in order.
    """
    layout = x._layout
    key = tuple(map(as_key, steps))

    def make() -> tuple[list[int], list[KnownLayout], list[View]]:
        """How many cells of each piece this worker has; the layouts of the pieces; how torch takes each as a view."""
        sizes: list[int] = []
        targets, views = [], []
        first, last = layout.box[dim]
        for step, frozen_step in zip(steps, key, strict=True):
            index = (*[slice(None)] * dim, step)
            start, stop = (step.start, step.stop) if isinstance(step, slice) else (step, step + 1)
            sizes.append(max(min(last, stop) - max(first, start), 0) if layout.active else 0)
            targets.append(_plan_part(layout, index).target)
            views.append(View(("piece", dim, frozen_step), operator.itemgetter(index)))
        return sizes, targets, views

    sizes, targets, views = x._context.keep(("pieces", layout, dim, key), make)
    block = block_of(x)
    # the derivative is torch.cat, which cuts the graph at empty vectors; so a vector with one gets a second dim
    vector = block.dim() == 1 and 0 in sizes
    blocks: Sequence[torch.Tensor] = (block[None] if vector else block).split_with_sizes(sizes, dim + vector)
    if vector or (steps and not isinstance(steps[0], slice)):
        blocks = [block.view(target.local) for block, target in zip(blocks, targets, strict=True)]
    return [view_of(x, one, to, False, view) for one, to, view in zip(blocks, targets, views, strict=True)]


@handles("unbind", "torch Tensor")
def unbind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[GlobalTensor, ...]:
    """All parts of extent 1 along a dim, without this dim."""
    x, *rest = args
    dim = kwargs.get("dim", rest[0] if rest else 0)
    n = x.shape[dim]
    return tuple(_pieces(x, dim % x.dim(), range(n)))
