"""Gather, scatter and their kin: each along a dim, which is whole meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from distdl.globals.functions.shapes import expanded, whole_along
from distdl.globals.functions.slicing import picked
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import entire, moved, moved_blocks, taken
from distdl.globals.moving.writes_into_plain import split_beside, write
from distdl.globals.rules.meta_checks import check_range, judge_dtype, judged, shape_of
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import Handler, by_name, handles, writes
from distdl.globals.views.aliasing import note_written, write_back
from distdl.tensors.connection import refuses, zeros_on


def of_global(handler: Callable[..., Any]) -> Handler:
    """A handler that gets the function and its arguments one by one, the first of which is global.

    A plain one becomes global beside the others: under all of its names, where the function writes into it.
    """

    @by_name
    @wraps(handler)
    def run(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if type(input) is not GlobalTensor:
            if writes(func, kwargs):
                return write(func, (input, *args), kwargs, input, (args, kwargs))
            input = split_beside(input, (args, kwargs))
        return handler(func, input, *args, **kwargs)

    return run


@handles("index_select", "torch Tensor")
@by_name
def index_select(func: Any, input: Any, dim: int, index: Any) -> Any:
    if type(input) is not GlobalTensor:
        return input.index_select(dim, index.full_tensor())
    if not input.dim():
        return NotImplemented
    plain = entire(index)
    shape_of(torch.select, input, (dim, 0), {}) if input.shape[dim] else None
    check_range(plain, 0, input.shape[dim], lambda wrong: _line(input, dim).index_select(dim, wrong))
    cells: list[Any] = [None] * input.dim()
    cells[dim] = plain.reshape(-1)
    return picked(input, cells)


def _along(layout: KnownLayout, dim: int, shape: Sequence[int]) -> KnownLayout:
    """Where the lines of a tensor have to be beside those of another, which is whole along the dim.

    Along the dim it may have any extent; along others, it may have fewer cells: the first ones.
    """
    context, shape = layout.context, tuple(shape)

    def make() -> KnownLayout:
        intervals = [
            ((0, n),) if one == dim else tuple((min(i, n), min(j, n)) for i, j in layout.intervals[one])
            for one, n in enumerate(shape)
        ]
        return context.layout(layout.partition.workers, intervals)

    return context.keep(("along", layout, dim, shape), make)


def brought(value: Any, needed: KnownLayout, name: str) -> torch.Tensor:
    """This worker's box of a tensor, split or the same everywhere."""
    if type(value) is GlobalTensor:
        return moved(value, needed, name)
    if not needed.active:
        return zeros_on(entered(value, needed.context), needed.local)
    return taken(value, needed)


def brought_together(values: Sequence[Any], needs: Sequence[KnownLayout], name: str) -> list[torch.Tensor]:
    """The same of several tensors of one dim or more. What moves is under way at the same time."""
    split = [place for place, one in enumerate(values) if type(one) is GlobalTensor]
    blocks = moved_blocks([(block_of(values[at]), values[at]._layout, needs[at]) for at in split], name)
    found = dict(zip(split, blocks, strict=True))
    return [found[at] if at in found else brought(values[at], need, name) for at, need in enumerate(needs)]


def _first_cells(x: Any, shape: Sequence[int]) -> Any:
    """The first cells along each dim, as many as a shape says."""
    if tuple(x.shape) == tuple(shape):
        return x
    return x[tuple(slice(0, n) for n in shape)]


@handles("gather", "torch Tensor")
@by_name
def gather(func: Any, input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if input.dim() and not index.dim():
        one: GlobalTensor = func(input, dim, index.reshape(1)).reshape(())
        return one
    if index.dim() and not input.dim():
        input = input.reshape(1)
    known = input if type(input) is GlobalTensor else index
    if input.dim():
        judged(func, (input, dim, index), {})
    if not known.dim() or (not index.numel() and index.dim() != input.dim()):
        return NotImplemented
    dim %= known.dim()
    judge_dtype(lambda one: one.gather(dim, torch.zeros(one.shape, dtype=torch.int64, device=one.device)), input)
    shape = [n if one != dim else input.shape[dim] for one, n in enumerate(index.shape)]
    input = _first_cells(input, shape)
    if type(input) is GlobalTensor:
        input = whole_along(input, [dim], "gather")
        needed = _along(input._layout, dim, index.shape)
        return GlobalTensor._of(block_of(input).gather(dim, brought(index, needed, "gather")), needed)
    index = whole_along(index, [dim], "gather")
    lines = brought(input, _along(index._layout, dim, shape), "gather")
    return GlobalTensor._of(lines.gather(dim, block_of(index)), index._layout)


def _line(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor of the host of which torch says the same as of another, if an index is beyond that along a dim."""
    return torch.empty([x.shape[dim] if one == dim % x.dim() else 1 for one in range(x.dim())], device="cpu")


@handles("take_along_dim", "torch Tensor")
@by_name
def take_along_dim(func: Any, input: Any, indices: Any, dim: int | None = None) -> Any:
    judged(torch.take_along_dim, (input, indices, dim), {})
    if dim is None:
        return torch.gather(input.reshape(-1), 0, indices.reshape(-1))
    dim %= input.dim()
    if not input.shape[dim] and indices.numel():
        _line(input, dim).take_along_dim(torch.zeros([1] * input.dim(), dtype=torch.int64, device="cpu"), dim)
    indices = indices.remainder(input.shape[dim])  # (so torch lets them count from the end, and any number be one)
    shape = list(torch.broadcast_shapes(*((*t.shape[:dim], 1, *t.shape[dim + 1 :]) for t in (input, indices))))
    full = [expanded(t, (*shape[:dim], t.shape[dim], *shape[dim + 1 :])) for t in (input, indices)]
    return torch.gather(full[0], dim, full[1])


@handles("scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_", "torch Tensor")
@of_global
def scatter(
    func: Any, input: Any, dim: int, index: Any, src: Any = None, *rest: Any, value: Any = None, **more: Any
) -> Any:
    """Write along a dim, which is whole meanwhile."""
    if src is None:
        src = value.item() if isinstance(value, torch.Tensor) else value
    if not input.dim():
        return NotImplemented
    name = func.__name__.removesuffix("_")
    judged(getattr(torch.Tensor, name), (input, dim, index, src, *rest), more)
    if isinstance(src, torch.Tensor):
        src = src.reshape(src.shape or (1,))  # (one number for one place)
    y = whole_along(input, [dim % input.dim()], name)
    lines = _along(y._layout, dim % input.dim(), index.shape)
    there = brought(index, lines, name)
    given = brought(_first_cells(src, index.shape), lines, name) if isinstance(src, torch.Tensor) else src
    in_place = func.__name__ != name
    block = block_of(y)
    refuses(lambda cell: _scattered(name, cell, dim, given, *rest, **more), block, [1] * input.dim())
    if in_place and y is input:
        getattr(block, func.__name__)(dim, there, given, *rest, **more)
        note_written(input, func.__name__)
        return input
    block = getattr(torch.Tensor, name)(block, dim, there, given, *rest, **more)
    z = GlobalTensor._of(block, y._layout)
    return write_back(input, z, func.__name__) if in_place else z


def _scattered(name: str, cell: torch.Tensor, dim: int, given: Any, *rest: Any, **more: Any) -> torch.Tensor:
    """A tensor of one cell, into which another of the dtype of what is given is scattered."""
    source = torch.zeros_like(cell, dtype=given.dtype) if isinstance(given, torch.Tensor) else given
    y: torch.Tensor = getattr(torch.Tensor, name)(
        cell, dim, torch.zeros_like(cell, dtype=torch.int64), source, *rest, **more
    )
    return y


@handles(
    "index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_reduce index_reduce_", "torch Tensor"
)
@of_global
def index_add(
    func: Any, input: Any, dim: int, index: Any, source: Any = None, *reduce: Any, value: Any = None, **more: Any
) -> Any:
    """Write slices across a dim, which is whole meanwhile."""
    if not input.dim():
        return NotImplemented
    source = value if source is None else source
    if not func.__name__.startswith("index_fill"):
        judged(func, (input, dim, index, source, *reduce), more)
        if func.__name__.startswith("index_copy") and input.dim() == 1 and not source.dim():
            source = source.reshape(1)
        _check_slices(input, dim, source)
    index, dim = entire(index), dim % input.dim()
    if func.__name__.startswith("index_fill"):
        return _filled(func, input, dim, index, source)
    name = func.__name__.removesuffix("_")
    y = whole_along(input, [dim], name)
    source = brought(source, _along(y._layout, dim, source.shape), name)
    block = block_of(y)

    def added(cell: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(torch.Tensor, name)(cell, dim, index, source, *reduce, **more)
        return found

    if func.__name__ == "index_reduce_" and torch.is_grad_enabled():  # (whose derivative needs the old values)
        block = block.clone()
    if block.numel():
        block = added(block, index, source)
    else:  # on one cell, so that a wrong dtype is an error here, too
        first = torch.zeros(1, dtype=torch.int64, device=block.device)
        least = [1] * input.dim()
        block = zeros_on(added(zeros_on(block, least), first, zeros_on(source, least)), block.shape)
    z = GlobalTensor._of(block, y._layout)
    return z if func.__name__ == name else write_back(input, z, func.__name__)


def _check_slices(x: Any, dim: int, source: Any) -> None:
    """Check that slices have the shape of those across a dim of a tensor. (Without memory, torch does not see it.)"""
    shapes = [[n for one, n in enumerate(y.shape) if one != dim % x.dim()] for y in (x, source)]
    if not source.dim() or shapes[0] != shapes[1]:
        raise RuntimeError(
            "source tensor shape must match self tensor shape, excluding the specified dimension. Got self.shape = "
            f"{list(x.shape)} source.shape = {list(source.shape)}"
        )


def _filled(func: Callable[..., Any], x: GlobalTensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    """One value for slices across a dim, which stay where they are."""
    n = x.shape[dim]
    mask = torch.zeros(n, dtype=torch.bool, device=x.device)
    mask[index] = True
    fill = x.masked_fill_ if func.__name__.endswith("_") else x.masked_fill
    return fill(mask.reshape([n if one == dim else 1 for one in range(x.dim())]), value)
