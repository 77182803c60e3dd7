"""Windows of a global tensor: unfold and fold."""

from __future__ import annotations

from typing import Any

from distdl.globals.functions.shapes import view_of, with_whole_dims
from distdl.globals.functions.slicing import part
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.rules.meta_checks import result_shape
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.globals.views.strides import View
from distdl.tensors.connection import refuses, zeros_on


@handles("unfold", "Tensor")
@by_name
def windows(func: Any, self: Any, dimension: int, size: int, step: int) -> Any:
    """Windows along a dim, as a new last dim. If they are not side by side, the dim becomes whole."""
    shape = result_shape(func, self, (dimension, size, step), {})
    if not self.dim():
        return NotImplemented
    dim = dimension % self.dim()
    count = shape[dim]
    if size == step and len(self._layout.intervals[dim]) > 1:
        kept: Any = part(self, [*[slice(None)] * dim, slice(0, count * size)])
        return kept.unflatten(dim, (count, size)).movedim(dim + 1, -1)
    x = with_whole_dims(self, [dim], "unfold")
    layout, context = x._layout, x._context

    def make() -> KnownLayout:
        intervals = [*layout.intervals, ((0, size),)]
        intervals[dim] = ((0, count),)
        return context.layout(layout.partition.workers[..., None], intervals)

    target = context.keep(("windows", layout, dim, size, step), make)
    block = block_of(x)
    block = block.unfold(dim, size, step) if layout.active else block.reshape(target.local)
    view = View(("unfold", dim, size, step), lambda whole: whole.unfold(dim, size, step))
    return view_of(self, block, target, x is not self, view)


def _pair(value: Any) -> tuple[int, int]:
    """A size along both dims of space, given as one number or two."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


@handles("unfold", "functional")
@by_name
def im2col(func: Any, input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    """Windows of space as columns. Windows side by side are a reshape; else the dims of space become whole."""
    shape = result_shape(func, input, (kernel_size, dilation, padding, stride), {})
    if input.dim() == 3:
        return func(input.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)
    kernel, dilated, padded, strides = map(_pair, (kernel_size, dilation, padding, stride))
    b, c, h, w = input.shape
    if kernel == strides and dilated == (1, 1) and padded == (0, 0):
        (k, m), i, j = kernel, h // kernel[0], w // kernel[1]
        kept = part(input, [slice(None), slice(None), slice(0, i * k), slice(0, j * m)])
        columns = kept.reshape(b, c, i, k, j, m).permute(0, 1, 3, 5, 2, 4)
        moves = (i > 1 and k * m > 1) or (j > 1 and m > 1)
        return (columns if moves else columns.clone()).reshape(shape)  # in torch never a view
    x = with_whole_dims(input, [2, 3], "unfold")
    layout, context = x._layout, x._context
    cells = kernel[0] * kernel[1]

    def make() -> KnownLayout:
        along = tuple((i * cells, j * cells) for i, j in layout.intervals[1])
        grid = layout.partition.workers[..., 0]
        return context.layout(grid, [layout.intervals[0], along, ((0, shape[2]),)])

    target = context.keep(("im2col", layout, shape, cells), make)
    block = block_of(x)
    refuses(lambda one: func(one, kernel, dilated, padded, strides), block, (1, 1, h, w))
    if block.numel():
        return GlobalTensor._of(func(block, kernel, dilated, padded, strides), target)
    return GlobalTensor._of(zeros_on(block, target.local), target)


@handles("fold", "functional")
@by_name
def col2im(
    func: Any,
    input: Any,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Any:
    """Put columns back as windows of space, and add up where these overlap. The dims of space become whole."""
    shape = result_shape(func, input, (output_size, kernel_size, dilation, padding, stride), {})
    if input.dim() == 2:
        return func(input.unsqueeze(0), output_size, kernel_size, dilation, padding, stride).squeeze(0)
    kernel = _pair(kernel_size)
    cells = kernel[0] * kernel[1]
    b, _, count = input.shape
    x: GlobalTensor = with_whole_dims(input.reshape(b, shape[1], cells, count), [2, 3], "fold")
    layout, context = x._layout, x._context

    def make() -> KnownLayout:
        return context.layout(layout.partition.workers, [*layout.intervals[:2], ((0, shape[2]),), ((0, shape[3]),)])

    target = context.keep(("col2im", layout, shape), make)
    block = block_of(x)
    refuses(lambda one: func(one, output_size, kernel_size, dilation, padding, stride), block, (1, cells, count))
    if not block.numel():
        return GlobalTensor._of(zeros_on(block, target.local), target)
    block = block.reshape(block.shape[0], -1, count)
    return GlobalTensor._of(func(block, output_size, kernel_size, dilation, padding, stride), target)
