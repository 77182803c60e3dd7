"""Functions that repeat, roll, flip or rotate the cells of a global tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from distdl.globals.functions.joining import joined
from distdl.globals.functions.slicing import part
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import gather_global
from distdl.globals.rules.applying import as_list
from distdl.globals.rules.meta_checks import check_dtype, check_once, result_shape
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles


@handles("repeat", "Tensor")
def repeat(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copies along dims: joined where a dim is split; where it is not, each worker repeats its block."""
    x, *sizes = (*args, *kwargs.values())
    result_shape(func, x, sizes, {})  # raises torch's error
    times = [int(n) for n in as_list(sizes)]
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
    sizes = as_list(sizes)
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
        repeats = gather_global(repeats)
        if repeats.numel() > 1 or repeats.dtype not in (torch.int64, torch.int32):  # torch refuses other dtypes
            places = torch.arange(input.shape[dim], device=repeats.device)
            return input.index_select(dim, torch.repeat_interleave(places, repeats, output_size=output_size))
        repeats = int(repeats)
    result_shape(torch.repeat_interleave, input, (repeats, dim), {"output_size": output_size})  # raises torch's error
    layout: KnownLayout = input._layout

    def make() -> KnownLayout:
        intervals = list(layout.intervals)
        intervals[dim] = tuple((i * repeats, j * repeats) for i, j in intervals[dim])
        return layout.context.layout(layout.partition.workers, intervals)

    target = layout.context.keep(("repeat_interleave", layout, dim, repeats), make)
    return GlobalTensor._of(block_of(input).repeat_interleave(repeats, dim), target)


@handles("roll", "torch Tensor")
@by_name
def roll(func: Any, input: Any, shifts: Any, dims: Any = ()) -> Any:
    """Move cells along dims; those that leave at one end enter at the other. Along a split dim, they change workers."""
    result_shape(func, input, (shifts, dims), {})  # raises torch's error
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
    result_shape(func, x, rest, {})  # raises torch's error
    given = as_list({"fliplr": [1], "flipud": [0]}.get(func.__name__, rest))
    dims = tuple(dim % x.dim() for dim in given) if x.dim() else ()
    check_dtype(lambda one: one.flip(dims), x)
    layout: KnownLayout = x._layout

    def make() -> KnownLayout:
        workers, intervals = layout.partition.workers, list(layout.intervals)
        for dim in dims:
            n = intervals[dim][-1][1]
            intervals[dim] = tuple((n - j, n - i) for i, j in reversed(intervals[dim]))
        reversed_workers = np.flip(workers, dims)
        return layout.context.layout(reversed_workers, intervals)

    return GlobalTensor._of(block_of(x).flip(dims), layout.context.keep(("flip", layout, dims), make))


@handles("rot90")
@by_name
def rot90(func: Any, input: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """Rotate by right angles in the plane of two dims. The result is a copy."""
    check_once(func, (input, k, dims), {})
    check_dtype(lambda one: func(one, k, dims), input)
    first, second = dims
    rotated = {
        0: lambda: input.clone(),
        1: lambda: input.transpose(first, second).flip(first),
        2: lambda: input.flip((first, second)),
        3: lambda: input.transpose(first, second).flip(second),
    }
    return rotated[k % 4]()
