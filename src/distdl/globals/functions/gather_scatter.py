"""Functions that read or write at indices along a dim: gather, scatter, index_select, index_add. The dim is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from distdl.globals.functions.shapes import expanded, with_whole_dims
from distdl.globals.functions.slicing import index_by_tensors
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import gather_global, local_block
from distdl.globals.moving.writes_into_plain import split_beside, write_into_plain
from distdl.globals.rules.meta_checks import check_dtype, check_once, check_range, result_shape
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import Handler, by_name, handles, writes
from distdl.globals.views.aliasing import note_written, write_back
from distdl.tensors.connection import refuses, zeros_on


def with_global_input(handler: Callable[..., Any]) -> Handler:
    """Make a handler of one that takes the function and its arguments by name, with a global tensor first.

    If the first argument is plain, it is split beside the others; if the function writes into it, it becomes global
    itself.
    """

    @by_name
    @wraps(handler)
    def run(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if type(input) is not GlobalTensor:
            if writes(func, kwargs):
                return write_into_plain(func, (input, *args), kwargs, input, (args, kwargs))
            input = split_beside(input, (args, kwargs))
        return handler(func, input, *args, **kwargs)

    return run


@handles("index_select", "torch Tensor")
@by_name
def index_select(func: Any, input: Any, dim: int, index: Any) -> Any:
    """Pick slices along a dim, which is whole. The index is gathered on every worker; a plain input stays plain."""
    if type(input) is not GlobalTensor:
        return input.index_select(dim, index.full_tensor())
    if not input.dim():
        return NotImplemented
    plain = gather_global(index)
    result_shape(torch.select, input, (dim, 0), {}) if input.shape[dim] else None
    check_range(plain, 0, input.shape[dim], lambda wrong: _line(input, dim).index_select(dim, wrong))
    cells: list[Any] = [None] * input.dim()
    cells[dim] = plain.reshape(-1)
    return index_by_tensors(input, cells)


def _lines_beside(layout: KnownLayout, dim: int, shape: Sequence[int]) -> KnownLayout:
    """The layout of a tensor of a shape whose lines along a dim lie beside those of another tensor, in a layout.

    Along the dim, which is whole, it may have any extent; along the others, at most that of the other tensor.
    """
    context, shape = layout.context, tuple(shape)

    def make() -> KnownLayout:
        intervals = [
            ((0, n),) if one == dim else tuple((min(i, n), min(j, n)) for i, j in layout.intervals[one])
            for one, n in enumerate(shape)
        ]
        return context.layout(layout.partition.workers, intervals)

    return context.keep(("along", layout, dim, shape), make)


def _first_cells(x: Any, shape: Sequence[int]) -> Any:
    """The corner of x that has the given shape."""
    if tuple(x.shape) == tuple(shape):
        return x
    return x[tuple(slice(0, n) for n in shape)]


@handles("gather", "torch Tensor")
@by_name
def gather(func: Any, input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """Read single cells at indices along a dim, which is whole. The index comes to the lines of a global input.

    The result lies as the index then does. To a plain input each worker applies its part of the index.
    """
    if input.dim() and not index.dim():
        return func(input, dim, index.reshape(1)).reshape(())
    if index.dim() and not input.dim():
        input = input.reshape(1)
    known = input if type(input) is GlobalTensor else index
    if input.dim():
        check_once(func, (input, dim, index), {})
    if not known.dim() or (not index.numel() and index.dim() != input.dim()):
        return NotImplemented
    dim %= known.dim()
    check_dtype(lambda one: one.gather(dim, torch.zeros(one.shape, dtype=torch.int64, device=one.device)), input)
    shape = [n if one != dim else input.shape[dim] for one, n in enumerate(index.shape)]
    input = _first_cells(input, shape)
    if type(input) is GlobalTensor:
        input = with_whole_dims(input, [dim], "gather")
        needed = _lines_beside(input._layout, dim, index.shape)
        return GlobalTensor._of(block_of(input).gather(dim, local_block(index, needed, "gather")), needed)
    index = with_whole_dims(index, [dim], "gather")
    lines = local_block(input, _lines_beside(index._layout, dim, shape), "gather")
    return GlobalTensor._of(lines.gather(dim, block_of(index)), index._layout)


def _line(x: torch.Tensor, dim: int) -> torch.Tensor:
    """One line of x along a dim, on the host, without its values: torch refuses the same indices for it."""
    return torch.empty([x.shape[dim] if one == dim % x.dim() else 1 for one in range(x.dim())], device="cpu")


@handles("take_along_dim", "torch Tensor")
@by_name
def take_along_dim(func: Any, input: Any, indices: Any, dim: int | None = None) -> Any:
    """``gather`` with negative indices, and with operands that broadcast along the other dims."""
    check_once(torch.take_along_dim, (input, indices, dim), {})
    if dim is None:
        return torch.gather(input.reshape(-1), 0, indices.reshape(-1))
    dim %= input.dim()
    if not input.shape[dim] and indices.numel():
        _line(input, dim).take_along_dim(torch.zeros([1] * input.dim(), dtype=torch.int64, device="cpu"), dim)
    indices = indices.remainder(input.shape[dim])  # torch takes any number here; negative ones count from the end
    shape = list(torch.broadcast_shapes(*((*t.shape[:dim], 1, *t.shape[dim + 1 :]) for t in (input, indices))))
    full = [expanded(t, (*shape[:dim], t.shape[dim], *shape[dim + 1 :])) for t in (input, indices)]
    return torch.gather(full[0], dim, full[1])


@handles("scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_", "torch Tensor")
@with_global_input
def scatter(
    func: Any, input: Any, dim: int, index: Any, src: Any = None, *rest: Any, value: Any = None, **more: Any
) -> Any:
    """Write, add or reduce single cells at indices along a dim. Index and source come to the lines of the input."""
    if src is None:
        src = value.item() if isinstance(value, torch.Tensor) else value
    if not input.dim():
        return NotImplemented
    name = func.__name__.removesuffix("_")
    check_once(getattr(torch.Tensor, name), (input, dim, index, src, *rest), more)
    if isinstance(src, torch.Tensor):
        src = src.reshape(src.shape or (1,))  # torch takes a number for one index
    y = with_whole_dims(input, [dim % input.dim()], name)
    shape = index.shape
    needed = _lines_beside(y._layout, dim % input.dim(), shape)
    index = local_block(index, needed, name)
    source = local_block(_first_cells(src, shape), needed, name) if isinstance(src, torch.Tensor) else src
    in_place = func.__name__ != name
    block = block_of(y)

    def to_one_cell(cell: torch.Tensor) -> Any:
        value = torch.zeros_like(cell, dtype=source.dtype) if isinstance(source, torch.Tensor) else source
        return getattr(cell, name)(dim, torch.zeros_like(cell, dtype=torch.int64), value, *rest, **more)

    refuses(to_one_cell, block, [1] * input.dim())
    if in_place and y is input:
        getattr(block, func.__name__)(dim, index, source, *rest, **more)
        note_written(input, func.__name__)
        return input
    z = GlobalTensor._of(getattr(block, name)(dim, index, source, *rest, **more), y._layout)
    return write_back(input, z, func.__name__) if in_place else z


@handles(
    "index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_reduce index_reduce_", "torch Tensor"
)
@with_global_input
def index_add(
    func: Any, input: Any, dim: int, index: Any, source: Any = None, *reduce: Any, value: Any = None, **more: Any
) -> Any:
    """Add, copy, fill or reduce slices at indices along a dim. The index is gathered; the source comes to the input."""
    if not input.dim():
        return NotImplemented
    source = value if source is None else source
    if not func.__name__.startswith("index_fill"):
        check_once(func, (input, dim, index, source, *reduce), more)
        if func.__name__.startswith("index_copy") and input.dim() == 1 and not source.dim():
            source = source.reshape(1)
        _check_slices(input, dim, source)
    index, dim = gather_global(index), dim % input.dim()
    if func.__name__.startswith("index_fill"):
        return _fill_slices(func, input, dim, index, source)
    name = func.__name__.removesuffix("_")
    y = with_whole_dims(input, [dim], name)
    source = local_block(source, _lines_beside(y._layout, dim, source.shape), name)
    block = block_of(y)

    def add(block: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> Any:
        return getattr(block, name)(dim, index, source, *reduce, **more)

    if func.__name__ == "index_reduce_" and torch.is_grad_enabled():
        block = block.clone()  # the derivative needs the old values
    if block.numel():
        block = add(block, index, source)
    else:  # compute with one cell, so that this worker raises the same error for a wrong dtype
        first = torch.zeros(1, dtype=torch.int64, device=block.device)
        least = [1] * input.dim()
        block = zeros_on(add(zeros_on(block, least), first, zeros_on(source, least)), block.shape)
    z = GlobalTensor._of(block, y._layout)
    return z if func.__name__ == name else write_back(input, z, func.__name__)


def _check_slices(x: Any, dim: int, source: Any) -> None:
    """Check that source and x have the same shape but for the dim, which torch does not check on meta tensors.

    Raises: RuntimeError, with torch's text.
    """
    shapes = [[n for one, n in enumerate(y.shape) if one != dim % x.dim()] for y in (x, source)]
    if not source.dim() or shapes[0] != shapes[1]:
        raise RuntimeError(
            "source tensor shape must match self tensor shape, excluding the specified dimension. Got self.shape = "
            f"{list(x.shape)} source.shape = {list(source.shape)}"
        )


def _fill_slices(func: Callable[..., Any], x: GlobalTensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    """Put one value into the slices at an index along a dim. Nothing moves."""
    n = x.shape[dim]
    mask = torch.zeros(n, dtype=torch.bool, device=x.device)
    mask[index] = True
    fill = x.masked_fill_ if func.__name__.endswith("_") else x.masked_fill
    return fill(mask.reshape([n if one == dim else 1 for one in range(x.dim())]), value)
