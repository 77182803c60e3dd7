"""Diagonals of matrices, and their triangles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.functions.shapes import view_of
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.rules.meta_checks import check_dtype, result_shape
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.globals.views.aliasing import note_written
from distdl.globals.views.strides import View


@handles("tril triu", "torch Tensor")
@by_name
def triangle(func: Any, input: Any, diagonal: int = 0) -> GlobalTensor:
    """Keep one triangle of the last two dims, and put zeros elsewhere. Each worker keeps that of its block."""
    result_shape(func, input, (diagonal,), {})  # raises torch's error
    check_dtype(func, input)
    layout = input._layout
    (row, _), (column, _) = layout.box[-2:]
    return GlobalTensor._of(func(block_of(input), diagonal + row - column), layout)


@handles("diagonal", "torch Tensor linalg")
def diagonal(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The diagonal of two dims, as a view: each cell stays on its worker."""
    default = (-2, -1) if func is torch.linalg.diagonal else (0, 1)

    def run(input: Any, offset: int = 0, dim1: int = default[0], dim2: int = default[1]) -> GlobalTensor:
        result_shape(torch.diagonal, input, (offset, dim1, dim2), {})  # raises torch's error
        return _diagonal(input, offset, dim1 % input.dim(), dim2 % input.dim())

    if "A" in kwargs:
        kwargs = {"input" if name == "A" else name: value for name, value in kwargs.items()}
    return run(*args, **kwargs)


def _diagonal(x: GlobalTensor, offset: int, row: int, column: int) -> GlobalTensor:
    """The view of the cells whose places along two dims differ by an offset, ``column - row``. It is the last dim."""
    layout, context = x._layout, x._context
    rest = [dim for dim in range(x.dim()) if dim not in (row, column)]

    def make() -> KnownLayout:
        # sorted by row and then by column, the blocks that a diagonal crosses follow each other along it
        workers = layout.partition.workers.transpose([*rest, row, column])
        along, stop = [], 0
        for i, j in layout.intervals[row]:
            for k, m in layout.intervals[column]:
                first = max(i + min(offset, 0), k - max(offset, 0))
                last = min(j + min(offset, 0), m - max(offset, 0))
                start, stop = stop, last if last > first else stop
                along.append((start, stop))
        workers = workers.reshape((*workers.shape[:-2], -1))
        return context.layout(workers, [*(layout.intervals[dim] for dim in rest), tuple(along)])

    target = context.keep(("diagonal", layout, offset, row, column), make)
    own = offset + layout.box[row][0] - layout.box[column][0]
    view = View(("diagonal", offset, row, column), lambda whole: whole.diagonal(offset, row, column))
    return view_of(x, block_of(x).diagonal(own, row, column), target, False, view)


@handles("fill_diagonal_", "Tensor")
@by_name
def fill_diagonal(func: Any, self: Any, fill_value: Any, wrap: bool = False) -> Any:
    if wrap or self.dim() != 2:
        return NotImplemented
    _diagonal(self, 0, 0, 1).fill_(fill_value)
    note_written(self, func.__name__)
    return self


@handles("trace", "torch Tensor")
def trace(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (x,) = (*args, *kwargs.values())
    result_shape(func, x, (), {})  # raises torch's error
    dtype = func(block_of(x).new_zeros(1, 1)).dtype  # autocast may make it float32
    return _diagonal(x, 0, 0, 1).sum(dtype=dtype)


@handles("diag", "torch Tensor")
@by_name
def diag(func: Any, input: Any, diagonal: int = 0) -> Any:
    """The diagonal of a matrix, as a copy; or the matrix with a vector as its diagonal."""
    result_shape(func, input, (diagonal,), {})  # raises torch's error
    return _diagonal(input, diagonal, 0, 1).clone() if input.dim() == 2 else _embedded(input, diagonal)


@handles("diag_embed", "torch Tensor")
@by_name
def diag_embed(func: Any, input: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """Matrices with the last dim of the input as their diagonals. Each row is on the worker of its diagonal cell."""
    shape = result_shape(func, input, (offset, dim1, dim2), {})
    return _embedded(input, offset).movedim((-2, -1), (dim1 % len(shape), dim2 % len(shape)))


def _embedded(x: Any, offset: int) -> Any:
    """Matrices along two new last dims, with the last dim of x as their diagonals."""
    on_diagonal = torch.eye(x.shape[-1], dtype=torch.bool, device=x.device)
    y = torch.where(on_diagonal, x.unsqueeze(-1), torch.zeros((), dtype=x.dtype, device=x.device))
    behind, before = max(offset, 0), max(-offset, 0)
    return functional.pad(y, (behind, before, before, behind)) if offset else y
