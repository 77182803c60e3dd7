"""Windows of a tensor, the cells around it, and cells that go between channels and space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from numbers import Complex, Real
from typing import Any, NamedTuple, NoReturn

import torch

from distdl.geometry.borders import Border
from distdl.globals.functions.shapes import view_of, whole_along
from distdl.globals.functions.slicing import part
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.rules.applying import apply, widened
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import shape_of
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.globals.views.strides import View, blank, offset_of, strides_of
from distdl.ops.padding import Padding
from distdl.tensors.connection import refuses, zeros_on


@handles("pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle", "torch functional")
def shuffle(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cells of channels become cells of space, the other way round, or change their order: by reshapes."""
    x, n = (*args, *kwargs.values())
    name = func.__name__
    if name.endswith("channel_shuffle"):
        b, c, *space = x.shape
        if c % n:
            raise RuntimeError(f"Number of channels must be divisible by groups. Got {c} channels and {n} groups.")
        return x.reshape(b, n, c // n, *space).transpose(1, 2).reshape(x.shape)
    shape = shape_of(func, x, (n,), {})
    if n == 1:
        return x.clone(memory_format=torch.contiguous_format)
    *batch, c, h, w = x.shape
    k = len(batch)
    if name == "pixel_shuffle":
        y = x.reshape(*batch, c // n**2, n, n, h, w).permute(*range(k + 1), k + 3, k + 1, k + 4, k + 2)
    else:
        y = x.reshape(*batch, c, h // n, n, w // n, n).permute(*range(k + 1), k + 2, k + 4, k + 1, k + 3)
    return y.reshape(shape)


@handles("unfold", "Tensor")
@by_name
def windows(func: Any, self: Any, dimension: int, size: int, step: int) -> Any:
    """Windows along a dim. Where they overlap, the dim is whole."""
    shape = shape_of(func, self, (dimension, size, step), {})
    if not self.dim():
        return NotImplemented
    dim = dimension % self.dim()
    count = shape[dim]
    if size == step and len(self._layout.intervals[dim]) > 1:
        kept: Any = part(self, [*[slice(None)] * dim, slice(0, count * size)])
        return kept.unflatten(dim, (count, size)).movedim(dim + 1, -1)
    x = whole_along(self, [dim], "unfold")
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


class _Line(NamedTuple):
    """Cells of memory at equal distances, as an ``as_strided`` reads them.

    Attributes:
        stride: the distance.
        dim: of the result, which runs along the line.
        window: that which runs along a window of it, if there is one; dim then tells windows apart.
        step: from window to window, in cells of the line.
    """

    stride: int
    dim: int
    window: int | None = None
    step: int = 1

    def needs(self, size: Sequence[int]) -> int:
        """How many of its cells are read."""
        return (size[self.dim] - 1) * self.step + (1 if self.window is None else size[self.window])


def _lines(size: Sequence[int], stride: Sequence[int]) -> list[_Line] | None:
    """The lines along which dims of these sizes and strides run, the longest stride first. None if they do not."""
    dims = sorted((dim for dim, n in enumerate(size) if n != 1), key=lambda dim: -stride[dim])
    found: list[_Line] = []
    while dims:
        dim, *dims = dims
        if stride[dim] < 1:
            return None
        if dims and stride[dim] < size[dims[0]] * stride[dims[0]]:
            window, *dims = dims
            if stride[window] < 1 or stride[dim] % stride[window]:
                return None
            found.append(_Line(stride[window], dim, window, stride[dim] // stride[window]))
        else:
            found.append(_Line(stride[dim], dim))
    return found


def _order(x: GlobalTensor) -> list[int] | None:
    """The dims of a tensor in the order of its memory; None if that has gaps, or several elements in one place."""
    strides = strides_of(x)
    if not strides:
        return list(range(x.dim()))
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim] if x.shape[dim] > 1 else 0)
    return order if blank(x.shape, strides).permute(order).is_contiguous() else None


@handles("as_strided", "torch Tensor")
@by_name
def as_strided(func: Any, input: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Windows, slices and other orders of dims, as strides of the memory that the whole tensor would have.

    Longformer and LED take windows of their chunks so, whose dims are in another order.

    Raises: RuntimeError for a tensor whose memory has gaps, and where cells before the tensor would be read.
    """
    size, stride = tuple(size), tuple(stride)
    offset = 0 if storage_offset is None else storage_offset - offset_of(input)
    order = _order(input)
    if (order is None or offset < 0) and 0 not in (*size, input.numel()):
        func(torch.empty(0, device="meta"), size, stride, storage_offset)  # (for torch's error)
        _refuse("as_strided", input, size, stride, storage_offset)
    lines = _lines(size, stride) if len(size) == len(stride) and 0 not in (*size, input.numel()) else None
    found = None if lines is None else _placed(lines, input.numel(), offset, size)
    inside = input if order is None else input.permute(order)
    if found is None:
        return fall_back(func, (inside, size, stride, offset), {})
    extents, cells = found
    y: Any = part(inside.reshape(extents), cells)
    places = [line.dim for line in lines or ()]
    for place, line in enumerate(lines or ()):
        if line.window is not None:
            y = y.unfold(place, size[line.window], line.step)
            places.append(line.window)
    return y.permute([places.index(dim) for dim in sorted(places)]).reshape(size)


@handles("as_strided_ as_strided_copy as_strided_scatter", "torch Tensor")
@wraps(fall_back)
def _strided_apart(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ["input", *["src"] * (func.__name__ == "as_strided_scatter"), "size", "stride", "storage_offset"]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, offset = given["input"], given.get("storage_offset")
    # (one worker will have the cells of x alone)
    if type(x) is GlobalTensor and x.numel() and (strides_of(x) or (offset is not None and offset_of(x))):
        _refuse(func.__name__, x, given.get("size"), given.get("stride"), offset)
    return fall_back(func, args, kwargs)


def _refuse(name: str, x: GlobalTensor, size: Any, stride: Any, offset: int | None) -> NoReturn:
    raise RuntimeError(
        f"{name} cannot read the memory of a global tensor of shape {tuple(x.shape)}, strides {x.stride()} and offset "
        f"{offset_of(x)} by size {size}, strides {stride} and offset {offset}: it may meet gaps, cells before the "
        "tensor, or another order of dims; take it of the tensor that this one is a view of, or of its "
        ".clone(memory_format=torch.contiguous_format)"
    )


def _placed(lines: Sequence[_Line], cells: int, offset: int, size: Sequence[int]) -> tuple[list[int], list[Any]] | None:
    """Where lines lie in so many cells: extents of which each line has a dim, and an index. None if they do not."""
    strides = [cells, *(line.stride for line in lines), 1]
    if any(n % m for n, m in pairwise(strides)):
        return None
    extents: list[int] = []
    index: list[Any] = []
    for (n, m), line in zip(pairwise(strides), [*lines, None], strict=True):
        start, offset = divmod(offset, m)
        count = 1 if line is None else line.needs(size)
        if start + count > n // m:
            return None
        extents.append(n // m)
        index.append(start if line is None else slice(start, start + count))
    return extents, index


def _pair(value: Any) -> tuple[int, int]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


@handles("unfold", "functional")
@by_name
def im2col(func: Any, input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    """Windows as columns. Where they fit side by side, by reshapes; else the space is whole."""
    shape = shape_of(func, input, (kernel_size, dilation, padding, stride), {})
    if input.dim() == 3:
        return func(input.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)
    kernel, dilated, padded, strides = map(_pair, (kernel_size, dilation, padding, stride))
    b, c, h, w = input.shape
    if kernel == strides and dilated == (1, 1) and padded == (0, 0):
        (k, m), i, j = kernel, h // kernel[0], w // kernel[1]
        kept = part(input, [slice(None), slice(None), slice(0, i * k), slice(0, j * m)])
        columns = kept.reshape(b, c, i, k, j, m).permute(0, 1, 3, 5, 2, 4)
        moves = (i > 1 and k * m > 1) or (j > 1 and m > 1)
        return (columns if moves else columns.clone()).reshape(shape)  # (torch's are never a view)
    x = whole_along(input, [2, 3], "unfold")
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
    """Columns as windows, which add up where they overlap."""
    shape = shape_of(func, input, (output_size, kernel_size, dilation, padding, stride), {})
    if input.dim() == 2:
        return func(input.unsqueeze(0), output_size, kernel_size, dilation, padding, stride).squeeze(0)
    kernel = _pair(kernel_size)
    cells = kernel[0] * kernel[1]
    b, _, count = input.shape
    x: GlobalTensor = whole_along(input.reshape(b, shape[1], cells, count), [2, 3], "fold")
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


@handles("pad", "functional")
def pad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """Cells around a tensor, or some less of it."""

    def run(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
        if isinstance(value, torch.Tensor) and not (value.dim() or value.requires_grad):
            value = value.item()
        if not (value is None or isinstance(value, Complex if input.is_complex() else Real)):
            raise TypeError(f"pad() needs value to be a number; got {value!r}, a {type(value).__name__}")
        widths = tuple(int(n) for n in pad)
        if mode == "replicate" or (mode == "reflect" and len(widths) < 6):  # (those that torch's autocast has)
            input = widened(input, ("cpu",))
        shape = shape_of(func, input, (widths, mode, None if mode == "constant" else value), {})  # (for torch's error)
        pairs = [(0, 0)] * input.dim()
        for place in range(len(widths) // 2):
            pairs[-1 - place] = (widths[2 * place], widths[2 * place + 1])
        if mode == "constant" and all(n <= 0 for n in widths):
            cut = [slice(-before, n + behind) for (before, behind), n in zip(pairs, input.shape, strict=True)]
            return part(input, cut).clone()
        if not input.numel() and torch.Size(shape).numel():
            return input.new_full(shape, value or 0)  # (there is no cell to start from)
        padded = tuple(dim for dim, pair in enumerate(pairs) if pair != (0, 0))
        border = Border(mode, tuple(pairs))
        fill = 0.0 if value is None else value
        return apply(lambda: Padding(border, fill, padded), (border, fill, padded), input, "pad")

    y: GlobalTensor = run(*args, **kwargs)
    return y
