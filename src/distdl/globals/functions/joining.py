"""Tensors side by side, repeated, rolled, turned round, or made anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from distdl.geometry.boxes import Intervals, Shape, balanced
from distdl.globals.functions.slicing import part
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import entire, moved_blocks, part_of
from distdl.globals.moving.writes_into_plain import split_beside
from distdl.globals.rules.applying import one_by_one
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import judge, judge_dtype, judged, shape_of
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import TABLE, by_name, handles
from distdl.partition.groups import IntArray
from distdl.tensors.connection import zeros_on

# -- joining


def joined(tensors: Sequence[Any], dim: int, along: Intervals | None = None, name: str = "cat") -> GlobalTensor:
    """Concatenate tensors along a dim. The result is split as the largest global one, and evenly along the dim.

    But tensors that lie on different workers, with the same split of the other dims, are joined without messages: each
    cell stays on its worker.

    Args:
        tensors: global or plain ones, at least one of them global.
        along: how the result is split along the dim, if not evenly. All cells then move there.
    """
    lead = max((one for one in tensors if type(one) is GlobalTensor), key=lambda one: one.numel())
    context, layout = lead._context, lead._layout
    shapes = tuple(tuple(one.shape) for one in tensors)
    if along is None and all(type(one) is GlobalTensor for one in tensors):
        layouts = tuple([one._layout for one in tensors])
        if any(one is not layout for one in layouts):
            still = context.keep(("joined in place", layouts, dim), lambda: _joined_in_place(layouts, dim))
            if still is not None:
                return GlobalTensor._of(_joined_blocks([block_of(one) for one in tensors], dim, still.local), still)

    def make() -> tuple[KnownLayout, list[KnownLayout]]:
        total = sum(shape[dim] for shape in shapes)
        intervals: list[Intervals] = list(layout.intervals)
        intervals[dim] = balanced(total, len(intervals[dim])) if along is None else along
        target = context.layout(layout.partition.workers, intervals)
        needs, start = [], 0
        for shape in shapes:
            n = shape[dim]
            intervals[dim] = tuple(
                (min(max(i - start, 0), n), min(max(j - start, 0), n)) for i, j in target.intervals[dim]
            )
            needs.append(context.layout(layout.partition.workers, intervals))
            start += n
        return target, needs

    target, needs = context.keep(("joined", layout, dim, along, shapes), make)
    return GlobalTensor._of(_joined_blocks(_local_blocks(tensors, needs, name), dim, target.local), target)


def _local_blocks(tensors: Sequence[Any], needs: Sequence[KnownLayout], name: str) -> list[torch.Tensor]:
    """This worker's block of each tensor, in the layouts that are needed. Messages of all tensors run at once."""
    split = [place for place, one in enumerate(tensors) if type(one) is GlobalTensor]
    blocks = moved_blocks([(block_of(tensors[at]), tensors[at]._layout, needs[at]) for at in split], name)
    found = dict(zip(split, blocks, strict=True))
    return [found[at] if at in found else part_of(tensors[at], need, name) for at, need in enumerate(needs)]


def _joined_in_place(layouts: Sequence[KnownLayout], dim: int) -> KnownLayout | None:
    """The layout of joined tensors of which no cell has moved.

    Args:
        layouts: those of the tensors.
    Returns: None if their other dims are split differently, if a worker would have two pieces that are no neighbours,
        or if all cells along the dim are on the same workers.
    """
    slabs: list[IntArray] = []
    extents: list[int] = []
    others = [one for one in range(len(layouts[0].intervals)) if one != dim]
    for layout in layouts:
        if any(layout.intervals[one] != layouts[0].intervals[one] for one in others):
            return None
        for place, (start, stop) in enumerate(layout.intervals[dim]):
            if start == stop:
                continue
            slab = layout.partition.workers.take([place], dim)
            if slabs and np.array_equal(slab, slabs[-1]):
                extents[-1] += stop - start
            else:
                slabs.append(slab)
                extents.append(stop - start)
    if len(slabs) < 2:
        return None
    workers = np.concatenate(slabs, dim)
    if len(np.unique(workers)) < workers.size:
        return None
    intervals = list(layouts[0].intervals)
    intervals[dim] = tuple(pairwise(accumulate(extents, initial=0)))
    return layouts[0].context.layout(workers, intervals)


def _joined_blocks(blocks: list[torch.Tensor], dim: int, shape: Shape) -> torch.Tensor:
    """Concatenate blocks of one worker, and promote their dtypes.

    The result depends on blocks without cells, too, which torch.cat would cut off the graph.

    Args:
        shape: of the result, if no block has cells.
    """
    filled = [one for one in blocks if one.numel()]
    empty = [one for one in blocks if not one.numel() and one.requires_grad]
    dtype = blocks[0].dtype
    for one in blocks[1:]:
        dtype = torch.promote_types(dtype, one.dtype)
    zero: Any = sum(zeros_on(one, ()).to(dtype) for one in empty)
    if not filled:
        y = blocks[0].new_zeros(shape, dtype=dtype)
        return y + zero if empty else y
    if empty:  # connect them to the smallest block; the blocks with cells may all require no gradient
        least = min(range(len(filled)), key=lambda place: filled[place].numel())
        filled[least] = filled[least].to(dtype) + zero
    return filled[0].to(dtype, copy=True) if len(filled) == 1 else torch.cat(filled, dim).to(dtype)


@handles("cat concat concatenate", "torch")
@by_name
def cat(func: Any, tensors: Any, dim: int = 0) -> Any:
    """Concatenate. As in torch, tensors of shape (0,) count only for the dtype of the result."""
    known = next(one for one in tensors if type(one) is GlobalTensor)
    ignored = [one for one in tensors if tuple(one.shape) == (0,)]
    tensors = [one for one in tensors if tuple(one.shape) != (0,)]
    if not tensors:
        tensors, ignored = ignored, []
    if not any(type(one) is GlobalTensor for one in tensors):
        tensors[0] = split_beside(tensors[0], (known,))
    shapes = tuple(one.shape for one in tensors)
    known._context.keep(("cat", shapes, dim), lambda: judge(func, (tensors, dim), {}))
    y: Any = joined(tensors, dim % tensors[0].dim())
    for one in ignored:
        y = y.to(torch.promote_types(y.dtype, one.dtype))
        y = y + one.sum().to(y.dtype) if one.requires_grad else y  # so its gradient is zero instead of None
    return y


@handles("stack", "torch")
@by_name
def stack(func: Any, tensors: Any, dim: int = 0) -> torch.Tensor:
    tensors = list(tensors)
    if len({one.shape for one in tensors}) > 1:
        judge(func, (tensors, dim), {})
    return torch.cat([one.unsqueeze(dim) for one in tensors], dim)


@handles("hstack vstack row_stack dstack", "torch")
def stack_along(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    (tensors,) = (*args, *kwargs.values())
    lift: Any = {"hstack": torch.atleast_1d, "dstack": torch.atleast_3d}.get(func.__name__, torch.atleast_2d)
    lifted: list[Any] = [lift(one) for one in tensors]
    dim = {"hstack": min(1, lifted[0].dim() - 1), "dstack": 2}.get(func.__name__, 0)
    return torch.cat(lifted, dim)


@by_name
def pad_sequence(
    func: Any,
    sequences: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> torch.Tensor:
    """Stack tensors of different lengths, each padded to the longest of them."""
    judged(func, (sequences, batch_first, padding_value, padding_side), {})
    longest = max(one.shape[0] for one in sequences)
    padded = []
    for one in sequences:
        missing = longest - one.shape[0]
        widths = (missing, 0) if padding_side == "left" else (0, missing)
        padded.append(functional.pad(one, (*[0, 0] * (one.dim() - 1), *widths), value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


TABLE[getattr(torch._C._nn, "pad_sequence")] = pad_sequence  # noqa: B009  # the stubs lack it


# -- repeating


@handles("repeat", "Tensor")
def repeat(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies along dims: joined where a dim is split; where it is not, each worker repeats its block."""
    x, *sizes = (*args, *kwargs.values())
    shape_of(func, x, sizes, {})  # raises torch's error
    times = [int(n) for n in one_by_one(sizes)]
    for _ in range(len(times) - x.dim()):
        x = x.unsqueeze(0)
    for dim, n in enumerate(times):
        if n == 0:
            x = part(x, [*[slice(None)] * dim, slice(0, 0)])
        elif n > 1 and len(x._layout.intervals[dim]) > 1:
            x = joined([x] * n, dim, name="repeat")
            times[dim] = 1
    layout: KnownLayout = x._layout

    def make() -> KnownLayout:
        intervals = [
            ((0, along[0][1] * n),) if n > 1 else along for along, n in zip(layout.intervals, times, strict=True)
        ]
        return layout.context.layout(layout.partition.workers, intervals)

    target = layout.context.keep(("repeat", layout, tuple(times)), make)
    block = block_of(x)
    if layout.active and times:
        block = block.repeat([max(n, 1) for n in times])
    return GlobalTensor._of(block.clone() if block is x._block else block, target)


@handles("tile", "torch Tensor")
def tile(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *sizes = (*args, *kwargs.values())
    sizes = one_by_one(sizes)
    return x.repeat([1] * (x.dim() - len(sizes)) + sizes)


@handles("repeat_interleave", "torch Tensor")
@by_name
def repeat_interleave(
    func: Any, input: Any = None, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """Repeat each slice along a dim: in its block for one number of repeats, and by index_select for several.

    With the repeats alone, in place of the input, the result is a plain tensor: each place as often as it is repeated.
    """
    if input is None or repeats is None:
        return func((repeats if input is None else input).full_tensor(), output_size=output_size)
    if type(input) is not GlobalTensor:
        return func(input, repeats.full_tensor(), dim, output_size=output_size)
    if dim is None:
        input, dim = input.reshape(-1), 0
    dim %= input.dim()
    if isinstance(repeats, torch.Tensor):
        repeats = entire(repeats)
        if repeats.numel() > 1 or repeats.dtype not in (torch.int64, torch.int32):  # torch refuses other dtypes
            places = torch.arange(input.shape[dim], device=repeats.device)
            return input.index_select(dim, torch.repeat_interleave(places, repeats, output_size=output_size))
        repeats = int(repeats)
    shape_of(torch.repeat_interleave, input, (repeats, dim), {"output_size": output_size})  # raises torch's error
    layout: KnownLayout = input._layout

    def make() -> KnownLayout:
        intervals = list(layout.intervals)
        intervals[dim] = tuple((i * repeats, j * repeats) for i, j in intervals[dim])
        return layout.context.layout(layout.partition.workers, intervals)

    target = layout.context.keep(("repeat_interleave", layout, dim, repeats), make)
    return GlobalTensor._of(block_of(input).repeat_interleave(repeats, dim), target)


# -- rolling and flipping


@handles("roll", "torch Tensor")
@by_name
def roll(func: Any, input: Any, shifts: Any, dims: Any = ()) -> Any:
    """Move cells along dims; those that leave at one end enter at the other. Along a split dim, they change workers."""
    shape_of(func, input, (shifts, dims), {})  # raises torch's error
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    shifts = (shifts,) if not isinstance(shifts, (tuple, list)) else tuple(shifts)
    if not dims:
        return input.reshape(-1).roll(shifts, 0).reshape(input.shape)
    x = input
    unsplit: dict[int, int] = {}
    for by, dim in zip(shifts, dims, strict=True):
        dim, n = dim % x.dim(), x.shape[dim]
        by = by % n if n else 0
        if len(x._layout.intervals[dim]) == 1:
            unsplit[dim] = unsplit.get(dim, 0) + by
        elif by:
            pieces = [part(x, [*[slice(None)] * dim, slice(*one)]) for one in ((n - by, n), (0, n - by))]
            x = joined(pieces, dim, x._layout.intervals[dim], "roll")
    if unsplit and any(unsplit.values()):
        return GlobalTensor._of(block_of(x).roll(tuple(unsplit.values()), tuple(unsplit)), x._layout)
    return GlobalTensor._of(block_of(x).clone(), x._layout) if x is input else x


@handles("flip fliplr flipud", "torch Tensor")
def flip(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """Reverse dims: each worker flips its block, and the order of the workers along these dims is reversed."""
    x, *rest = (*args, *kwargs.values())
    shape_of(func, x, rest, {})  # raises torch's error
    given = one_by_one({"fliplr": [1], "flipud": [0]}.get(func.__name__, rest))
    dims = tuple(dim % x.dim() for dim in given) if x.dim() else ()
    judge_dtype(lambda one: one.flip(dims), x)
    layout: KnownLayout = x._layout

    def make() -> KnownLayout:
        workers, intervals = layout.partition.workers, list(layout.intervals)
        for dim in dims:
            n = intervals[dim][-1][1]
            intervals[dim] = tuple((n - j, n - i) for i, j in reversed(intervals[dim]))
        reversed_workers = np.flip(workers, dims)
        return layout.context.layout(reversed_workers, intervals)

    return GlobalTensor._of(block_of(x).flip(dims), layout.context.keep(("flip", layout, dims), make))


# -- creating


@handles("new_zeros new_ones new_full new_empty", "Tensor")
def new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A new tensor of x's dtype: split like x if it has as many dims, and plain otherwise."""
    x, *rest = args
    size, more = (kwargs["size"], rest) if "size" in kwargs else (rest[0], rest[1:]) if rest else ((), [])
    if not isinstance(size, (tuple, list)):
        size, more = [one for one in rest if isinstance(one, int)], []
    size = tuple(int(n) for n in size)
    named = {name: value for name, value in kwargs.items() if name != "size"}
    if not size or len(size) != x.dim():
        plain: torch.Tensor = func(x._block.detach(), size, *more, **named)
        return plain
    layout = x._context.keep(("like", x._layout, size), lambda: x._layout.resized(size))
    return GlobalTensor._of(func(x._block.detach(), layout.local, *more, **named), layout)


@handles("new_tensor", "Tensor")
def new_tensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    x, *rest = args
    if type(x) is not GlobalTensor or any(type(one) is GlobalTensor for one in (*rest, *kwargs.values())):
        plain: torch.Tensor = fall_back(func, args, kwargs)
        return plain
    made: torch.Tensor = x._block.detach().new_tensor(*rest, **kwargs)
    return made


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
    block = block_of(tensor)
    return GlobalTensor._of(func(block, num_classes).reshape(target.local), target)
