"""Parts of a global tensor: slices, elements, pieces, and what gathers and scatters along dims."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from distdl.geometry.boxes import Interval, Intervals
from distdl.globals.functions.shapes import view_of, whole_along
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.rules.meta_checks import frozen, shape_of
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.structures import map_tensors
from distdl.globals.tensor.table import TABLE, by_name, handles
from distdl.globals.views.strides import View
from distdl.tensors.connection import saving, zeros_on

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
    if local is not None:
        block = block[local]
    else:  # (without a cell, any shape is a view, whatever the strides)
        block = (block if block.dim() else block.reshape(1))[:0].reshape(target.local)
    return view_of(x, block, target, False, View(("part", key), lambda whole: whole[tuple(index)]))


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
    target = context.layout(layout.partition.workers[tuple(picked)], intervals)
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


def picked(x: GlobalTensor, cells: Sequence[torch.Tensor | None]) -> GlobalTensor:
    """What index tensors pick, which are the same on every worker."""
    dims = [dim for dim, one in enumerate(cells) if one is not None]
    shape = together(cells)
    check_cells(x, dims, cells)
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
        return context.layout(layout.partition.workers.reshape([len(one) for one in intervals]), intervals)

    target = context.keep(("picked", layout, tuple(dims), shape), make)
    block = block_of(y)
    if not block.numel():
        return GlobalTensor._of(saving(zeros_on(block, target.local)), target)
    index = tuple(slice(None) if one is None else one for one in cells)
    return GlobalTensor._of(block[index].reshape(target.local), target)


def together(cells: Sequence[torch.Tensor | None]) -> torch.Size:
    """The shape of what index tensors pick.

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


def check_cells(x: GlobalTensor, dims: Sequence[int], cells: Sequence[Any]) -> None:
    """Check that index tensors do not reach beyond the tensor: a worker without cells would not see it."""
    if any(not n for dim, n in enumerate(x.shape) if dim not in dims):
        return  # (there is nothing to pick, and torch does not look)
    for dim in dims:
        n, one = x.shape[dim], cells[dim]
        if one.numel() and not one.is_meta and not (-n <= int(one.min()) and int(one.max()) < n):
            wrong = next(int(i) for i in one.ravel() if not -n <= i < n)
            raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {n}")


# -- pieces


@handles("select narrow", "torch Tensor")
@by_name
def select(func: Any, input: GlobalTensor, dim: int, *rest: Any, **more: Any) -> GlobalTensor:
    named = [more[name] for name in ("index", "start", "length") if name in more]  # (in the order of places)
    numbers = [operator.index(one) for one in (*rest, *named)]
    shape_of(func, input, (dim, *rest), more)  # (for torch's error)
    dim %= input.dim()
    first = numbers[0] % input.shape[dim] if numbers[0] < 0 else numbers[0]
    step = first if func.__name__ == "select" else slice(first, first + numbers[1])
    return part(input, [*[slice(None)] * dim, step])


@by_name
def sliced(func: Any, input: Any, dim: int = 0, *rest: Any, **more: Any) -> Any:
    """The places of a dim from one to another, by steps."""
    return part(input, [*[slice(None)] * (dim % input.dim()), _slice(*rest, **more)])


TABLE[torch.ops.aten.slice] = sliced  # (which torch's associative scan calls)


def _slice(start: Any = None, end: Any = None, step: int = 1) -> slice:
    return slice(start, end, step)


@handles(
    "split chunk tensor_split split_with_sizes hsplit vsplit dsplit unsafe_split unsafe_chunk unsafe_split_with_sizes",
    "torch Tensor",
)
def split(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces along a dim, each where it is."""
    x, *rest = args
    size = x.shape
    rest, kwargs = map_tensors((rest, kwargs), lambda one: one.tolist())
    if type(x) is not GlobalTensor:  # but where it is split
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

    kind, dim, pieces = x._context.keep(("split", func, size, frozen(rest), frozen(kwargs)), make)
    if func.__name__ in _OF_MANY_VIEWS:
        return kind(_pieces(x, dim, tuple(slice(*piece) for piece in pieces)))
    return kind(part(x, [*[slice(None)] * dim, slice(*piece)]) for piece in pieces)


_OF_MANY_VIEWS = ("split", "chunk", "split_with_sizes")


def _pieces(x: GlobalTensor, dim: int, steps: Sequence[slice | int]) -> list[GlobalTensor]:
    """Parts of a tensor that cover a dim, by one function: torch does not let such views be written with gradients."""
    layout = x._layout
    key = tuple(map(frozen, steps))

    def make() -> tuple[list[int], list[KnownLayout], list[View]]:
        """How many cells of each part this worker has, the layouts of the parts, and how each of them is taken."""
        sizes: list[int] = []
        targets, views = [], []
        first, last = layout.box[dim]
        for step, own in zip(steps, key, strict=True):
            index = (*[slice(None)] * dim, step)
            start, stop = (step.start, step.stop) if isinstance(step, slice) else (step, step + 1)
            sizes.append(max(min(last, stop) - max(first, start), 0) if layout.active else 0)
            targets.append(_plan_part(layout, index).target)
            views.append(View(("piece", dim, own), operator.itemgetter(index)))
        return sizes, targets, views

    sizes, targets, views = x._context.keep(("pieces", layout, dim, key), make)
    block = block_of(x)
    # (of vectors, torch.cat, which is its derivative, cuts the graph at zero volume)
    vector = block.dim() == 1 and 0 in sizes
    blocks: Sequence[torch.Tensor] = (block[None] if vector else block).split_with_sizes(sizes, dim + vector)
    if vector or (steps and not isinstance(steps[0], slice)):
        blocks = [block.view(target.local) for block, target in zip(blocks, targets, strict=True)]
    return [view_of(x, one, to, False, view) for one, to, view in zip(blocks, targets, views, strict=True)]


@handles("unbind", "torch Tensor")
def unbind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[GlobalTensor, ...]:
    x, *rest = args
    dim = kwargs.get("dim", rest[0] if rest else 0)
    n = x.shape[dim]
    return tuple(_pieces(x, dim % x.dim(), range(n)))
