"""Interpolation of global tensors: at the points of a finer or coarser grid, and at points that a tensor gives."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.rules.applying import apply, hashable, widened
from distdl.globals.rules.meta_checks import as_key, check_on_meta, rough_shape
from distdl.globals.rules.work import check_shapes, work_on
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import by_name, handles
from distdl.ops.interpolation import Interpolation
from distdl.ops.resampling import Mode
from distdl.tensors.modes import uncounted


@handles("interpolate", "functional")
@by_name
def interpolation(
    func: Any,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Interpolate over space. Each worker gets the cells beside its block that its outputs read.

    Antialiasing, uint8 by linear modes (which torch rounds after each dim) and sizes that torch refuses fall back.
    """
    options = (size, scale_factor, mode, align_corners, recompute_scale_factor)
    if mode == "area" and not antialias:
        _check_options(input, options)
        pool: Any = getattr(functional, f"adaptive_avg_pool{input.dim() - 2}d")
        return pool(input, _scaled_size(input, scale_factor) if size is None else size)
    x: Any = widened(input, ("cuda",))
    is_rounded = x.dtype is torch.uint8 and mode in ("bilinear", "bicubic")
    if antialias or (size is None) == (scale_factor is None) or is_rounded:
        return NotImplemented
    space, factors, check = x.dim() - 2, scale_factor, partial(_check_options, x, options)
    if size is not None:
        size = (size,) * space if isinstance(size, int) else tuple(map(int, size))
    elif recompute_scale_factor:
        check()
        size, factors = _scaled_size(x, factors), None

    def op() -> Interpolation:
        check()
        if min(_scaled_size(x, factors) if size is None else size, default=1) < 1:
            # raises torch's error for a result without cells, which needs a tensor with memory
            functional.interpolate(torch.zeros((), dtype=x.dtype).expand(x.shape), *options)
        chosen = Mode.of("interpolate", space, mode, align_corners, factors)
        return Interpolation(chosen, None if size is None else (*x.shape[:2], *size))

    key = (size, hashable(factors), mode, align_corners, recompute_scale_factor)
    return apply(op, (key, tuple(x.shape[:2])), x, "interpolate")


def _check_options(input: GlobalTensor, options: tuple[Any, ...]) -> None:
    """Let torch check the options of interpolate, once for all sizes that are alike. It does not see an empty result.

    Torch is asked about one sample at least: without any, mode nearest raises another error on tensors without memory.
    """
    with uncounted():
        shape = (*(max(n, 1) for n in input.shape[:1]), *input.shape[1:])
        blank = torch.empty(shape, dtype=input.dtype, device="meta")
    key = ("interpolate", rough_shape(input.shape), input.dtype, as_key(options))
    input._context.keep(key, lambda: check_on_meta(functional.interpolate, (blank, *options), {}))


def _scaled_size(input: GlobalTensor, factors: Any) -> tuple[int, ...]:
    """The size of the result for factors, one for each dim of space or one for all."""
    listed = factors if isinstance(factors, (list, tuple)) else [factors] * (input.dim() - 2)
    return tuple(int(n * f) for n, f in zip(input.shape[2:], listed, strict=True))


@handles("grid_sample", "functional")
@by_name
def grid_sample(func: Any, input: Any, grid: Any, *positional: Any, **options: Any) -> Any:
    """Interpolate images at the points of a grid. Workers get whole images; the result is split as the grid is."""
    check_shapes(_sample_corners, [input, grid])
    space = tuple(("point", dim) for dim in range(input.dim() - 2))
    image: list[Hashable] = ["sample", "channel", *(("cell", dim) for dim in range(input.dim() - 2))]
    labels, out = [image, ("sample", *space, "coordinate")], ("sample", "channel", *space)
    work = work_on([input, grid], labels, out, adds=False, lead=1 if type(grid) is GlobalTensor else 0)
    points = work.needs[1]
    points.least = (*points.least[:-1], len(space))  # a point has all its coordinates, also in a grid without cells
    return work(lambda x, at: func(x, at, *positional, **options), [input, grid], "grid_sample")


def _sample_corners(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return functional.grid_sample(x, grid, align_corners=True)
