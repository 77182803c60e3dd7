"""``as_strided``: a part of the memory of a global tensor, taken by strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch

from distdl.globals.functions.slicing import part
from distdl.globals.rules.fallback import fall_back
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import by_name, handles
from distdl.globals.views.strides import meta_tensor, offset_of, strides_of


class _Line(NamedTuple):
    """Cells of memory at equal distances, along which one or two dims of an ``as_strided`` result run.

    Attributes:
        stride: the distance of two cells.
        dim: the dim of the result that runs along the line; along its windows, if there are any.
        window: the dim that runs inside of a window, if the line is read in windows.
        step: the distance of two windows, in cells of the line.
    """

    stride: int
    dim: int
    window: int | None = None
    step: int = 1

    def needs(self, size: Sequence[int]) -> int:
        """How many cells of the line are read for a result of this size."""
        return (size[self.dim] - 1) * self.step + (1 if self.window is None else size[self.window])


def _lines(size: Sequence[int], stride: Sequence[int]) -> list[_Line] | None:
    """The lines along which the dims of a result run, the longest stride first. None if they are no lines.

    Two dims share a line, as windows that overlap, if the stride of one is less than the other's extent in memory.
    """
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
    """The dims of a tensor in the order of its memory; None if its memory has gaps, or elements share a place."""
    strides = strides_of(x)
    if not strides:
        return list(range(x.dim()))
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim] if x.shape[dim] > 1 else 0)
    return order if meta_tensor(x.shape, strides).permute(order).is_contiguous() else None


@handles("as_strided", "torch Tensor")
@by_name
def as_strided(func: Any, input: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """A tensor of given strides in the memory that the whole tensor would have in torch.

    Windows, slices and permutations of dims become such functions; Longformer and LED take windows so. Other strides
    fall back.

    Raises: RuntimeError for a tensor whose memory has gaps, and where cells before the tensor would be read.
    """
    size, stride = tuple(size), tuple(stride)
    offset = 0 if storage_offset is None else storage_offset - offset_of(input)
    order = _order(input)
    if (order is None or offset < 0) and 0 not in (*size, input.numel()):
        func(torch.empty(0, device="meta"), size, stride, storage_offset)  # raises torch's error
        _refuse("as_strided", input, size, stride, storage_offset)
    lines = _lines(size, stride) if len(size) == len(stride) and 0 not in (*size, input.numel()) else None
    found = None if lines is None else _index_lines(lines, input.numel(), offset, size)
    in_memory_order = input if order is None else input.permute(order)
    if found is None:
        return fall_back(func, (in_memory_order, size, stride, offset), {})
    extents, index = found
    y: Any = part(in_memory_order.reshape(extents), index)
    dims = [line.dim for line in lines or ()]  # the dims of the result, in the order of y's
    for place, line in enumerate(lines or ()):
        if line.window is not None:
            y = y.unfold(place, size[line.window], line.step)
            dims.append(line.window)
    return y.permute([dims.index(dim) for dim in sorted(dims)]).reshape(size)


@handles("as_strided_ as_strided_copy as_strided_scatter", "torch Tensor")
@wraps(fall_back)
def _strided_copy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fall back, which gathers the cells of x alone. Strides that need the memory around x are refused."""
    names = ["input", *["src"] * (func.__name__ == "as_strided_scatter"), "size", "stride", "storage_offset"]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    x, offset = named["input"], named.get("storage_offset")
    if type(x) is GlobalTensor and x.numel() and (strides_of(x) or (offset is not None and offset_of(x))):
        _refuse(func.__name__, x, named.get("size"), named.get("stride"), offset)
    return fall_back(func, args, kwargs)


def _refuse(name: str, x: GlobalTensor, size: Any, stride: Any, offset: int | None) -> NoReturn:
    """Raises: RuntimeError, which says what the memory of x would be, and what to take instead."""
    raise RuntimeError(
        f"{name} cannot read the memory of a global tensor of shape {tuple(x.shape)}, strides {x.stride()} and offset "
        f"{offset_of(x)} by size {size}, strides {stride} and offset {offset}: it may meet gaps, cells before the "
        "tensor, or another order of dims; take it of the tensor that this one is a view of, or of its "
        ".clone(memory_format=torch.contiguous_format)"
    )


def _index_lines(
    lines: Sequence[_Line], cells: int, offset: int, size: Sequence[int]
) -> tuple[list[int], list[Any]] | None:
    """How to read lines from contiguous memory: reshape it to these extents, and take a basic index of the result.

    Args:
        cells: how many cells the memory has.
        offset: of the first cell that is read.
        size: of the result.
    Returns: extents and index, with a dim for each line; None if the lines do not fit into such dims.
    """
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
