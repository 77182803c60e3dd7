"""Variances and standard deviations of global tensors."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from distdl.globals.functions.reductions import (
    dims_of,
    gather_entries,
    reduced_layout,
    reduced_shape,
    split_along,
    sum_over,
    without_dims,
)
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.rules.meta_checks import check_dtype
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.tensors.connection import always_curved, local, zeros_on
from distdl.tensors.constants import Constant
from distdl.tensors.dtypes import HALVES


def moments(x: Any, dim: Any, keepdim: bool, unbiased: Any, correction: Any) -> tuple[Any, Any]:
    """Return variance and mean over dims, both global.

    The means and squared deviations of the blocks are merged; differences of large sums of squares would lose digits.

    Args:
        dim: the dims; None for all.
        unbiased, correction: as of ``torch.var``; correction goes first.
    Raises: RuntimeError, as torch does, for integers.
    """
    if not (x.is_floating_point() or x.is_complex()):
        torch.zeros(1, dtype=x.dtype).var()  # raises torch's error
    check_dtype(torch.var, x)
    dims, layout = dims_of(x, dim), x._layout
    less = (1 if unbiased is None else int(bool(unbiased))) if correction is None else correction
    count = prod(x.shape[one] for one in dims)
    if not count:
        nothing: Any = sum_over(x, dims, keepdim) * torch.nan
        return nothing.real if x.is_complex() else nothing, nothing
    target = reduced_layout(layout, dims)
    if not split_along(layout, dims):
        pair = _local_moments(x, dims, less, target)
    else:
        mean, squares = _merge_moments(x, dims, count, target)
        pair = (squares.real if x.is_complex() else squares) / max(count - less, 0), mean
    found = GlobalTensor._of(pair[0], target), GlobalTensor._of(pair[1], target)
    return found if keepdim else (without_dims(found[0], dims), without_dims(found[1], dims))


def _local_moments(
    x: GlobalTensor, dims: tuple[int, ...], less: Any, target: KnownLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """This worker's blocks of variance and mean over dims that are not split: torch's function of the block."""
    block, keepdim = block_of(x), bool(dims)
    if block.numel():
        return torch.var_mean(block, dims or None, correction=less, keepdim=keepdim)
    spread = local(
        lambda one: one.var(dims or None, correction=0, keepdim=keepdim), target.local, (block, (1,) * x.dim())
    )
    return spread, zeros_on(block, target.local)


def _merge_moments(
    x: GlobalTensor, dims: tuple[int, ...], count: int, target: KnownLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """This worker's blocks of the mean and of the sum of squared deviations, over dims that are split.

    Every worker measures both of its block; the results are gathered and merged where the target layout has cells.

    Args:
        count: how many elements are averaged.
    """
    layout = x._layout

    def measure(one: torch.Tensor) -> torch.Tensor:
        mean = one.mean(dims, keepdim=True)
        offset = one - mean
        return torch.stack([mean, (offset * offset.conj()).to(one.dtype).sum(dims, keepdim=True)])

    states = local(measure, (2, *reduced_shape(layout, dims)), (block_of(x), (1,) * x.dim()))
    cells = _cell_counts(layout, dims)
    states = gather_entries(states, layout, dims, "var", kinds=2)
    if target.active:
        mean, squares = states
        n = cells.on(states.device).to(states.dtype)
        merged = (mean * n).sum(dims, keepdim=True) / count
        away = mean - merged
        states = torch.stack([merged, (squares + n * away * away.conj()).sum(dims, keepdim=True)])
    else:
        states = always_curved(states.reshape((2, *target.local)), states)
    mean, squares = states
    return mean, squares


def _cell_counts(layout: Any, dims: tuple[int, ...]) -> Constant:
    """How many cells each nonempty block has along the dims, as a tensor that broadcasts to the gathered entries."""

    def make() -> Constant:
        counts = torch.ones((1,) * len(layout.rulers), dtype=torch.float64, device="cpu")
        for dim in dims:
            lengths = [stop - start for start, stop in layout.intervals[dim]]
            filled = [n for n in lengths if n] if len(lengths) > 1 else lengths
            along = torch.tensor(filled, dtype=torch.float64, device="cpu")
            counts = counts * along.reshape([-1 if one == dim else 1 for one in range(len(layout.rulers))])
        return Constant(counts)

    found: Constant = layout.context.keep(("counts", layout, dims), make)
    return found


@handles("var std var_mean std_mean", "torch Tensor")
@by_name
def variance(
    func: Any, input: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    half = input.dtype in HALVES  # computed in float32, as in torch: a variance may overflow where its root does not
    spread, mean = moments(input.float() if half else input, dim, keepdim, unbiased, correction)
    if func.__name__.startswith("std"):
        spread = _sqrt(spread)
    if half:
        spread, mean = spread.to(input.dtype), mean.to(input.dtype)
    return (spread, mean) if func.__name__.endswith("mean") else spread


def _sqrt(var: Any) -> Any:
    """The square root of a variance. Its derivative at zero is zero, as in torch."""
    if not (var.requires_grad and torch.is_grad_enabled()):
        return var.sqrt()
    constant = var.detach() == 0
    return var.masked_fill(constant, 1).sqrt().masked_fill(constant, 0)
