"""Interpolation of global tensors: at the points of a finer or coarser grid, and at points that a tensor gives."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.rules.applying import apply, hashable, widened
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import frozen, judge, rough
from distdl.globals.rules.work import checked, work_on
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import handles
from distdl.ops.interpolation import Interpolation
from distdl.ops.resampling import Mode
from distdl.tensors.modes import uncounted


@handles("interpolate", "functional")
def interpolation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each worker completes its block by the cells that its outputs read."""

    def run(
        input: Any,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        antialias: bool = False,
    ) -> Any:
        options = (size, scale_factor, mode, align_corners, recompute_scale_factor)

        def check() -> None:
            """Let torch check the options. Whether the result has cells is checked below."""
            # without samples and without memory, torch raises another error for mode nearest: it is asked about one
            with uncounted():
                shape = (*(max(n, 1) for n in input.shape[:1]), *input.shape[1:])
                one = torch.empty(shape, dtype=input.dtype, device="meta")
            key = ("interpolate", rough(input.shape), input.dtype, frozen(options))
            input._context.keep(key, lambda: judge(functional.interpolate, (one, *options), {}))

        if mode == "area" and not antialias:
            check()
            return _area(input, size, scale_factor)
        input = widened(input, ("cuda",))
        is_rounded = input.dtype is torch.uint8 and mode in ("bilinear", "bicubic")  # (after each dim, by integers)
        if antialias or (size is None) == (scale_factor is None) or is_rounded:
            return fall_back(func, args, kwargs)
        space, factors = input.dim() - 2, scale_factor
        if size is not None:
            size = (size,) * space if isinstance(size, int) else tuple(map(int, size))
        elif recompute_scale_factor:
            check()
            size, factors = _scaled(input, factors), None

        def op() -> Interpolation:
            check()
            if min(_scaled(input, factors) if size is None else size, default=1) < 1:
                # torch raises its error for tensors with memory alone
                functional.interpolate(torch.zeros((), dtype=input.dtype).expand(input.shape), *options)
            chosen = Mode.of("interpolate", space, mode, align_corners, factors)
            return Interpolation(chosen, None if size is None else (*input.shape[:2], *size))

        key = (size, hashable(factors), mode, align_corners, recompute_scale_factor)
        return apply(op, (key, tuple(input.shape[:2])), input, "interpolate")

    return run(*args, **kwargs)


def _area(input: GlobalTensor, size: Any, scale_factor: Any) -> Any:
    pool: Any = getattr(functional, f"adaptive_avg_pool{input.dim() - 2}d")
    return pool(input, _scaled(input, scale_factor) if size is None else size)


def _scaled(input: GlobalTensor, factors: Any) -> tuple[int, ...]:
    """The sizes of an input times factors: one for each dim of space, or for all."""
    listed = factors if isinstance(factors, (list, tuple)) else [factors] * (input.dim() - 2)
    return tuple(int(n * f) for n, f in zip(input.shape[2:], listed, strict=True))


def _sampled(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return functional.grid_sample(x, at, align_corners=True)


@handles("grid_sample", "functional")
def grid_sample(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole image comes to where its points are read; the result is split as the points are."""

    def run(input: Any, grid: Any, **options: Any) -> Any:
        checked(_sampled, [input, grid])
        space = tuple(("p", dim) for dim in range(input.dim() - 2))
        image: list[Hashable] = ["n", "c", *(("x", dim) for dim in range(input.dim() - 2))]
        work = work_on(
            [input, grid], [image, ("n", *space, "d")], ("n", "c", *space), adds=False,
            lead=1 if type(grid) is GlobalTensor else 0,
        )  # fmt: skip
        points = work.needs[1]
        points.least = (*points.least[:-1], len(space))
        return work(lambda x, at: func(x, at, **options), [input, grid], "grid_sample")

    names = ("input", "grid", "mode", "padding_mode", "align_corners")
    return run(**dict(zip(names, args, strict=False)), **kwargs)
