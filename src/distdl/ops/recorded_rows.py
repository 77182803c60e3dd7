"""What normalisations do with rows and with small vectors, as a recorded step calls it again.

Whether a mean is far from zero decides which operators run. A recorded step may not know it for the next call, and it
does not see what NumPy does. So each of these functions is one call of the step (see :mod:`distdl.tensors.recorders`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from distdl.ops.arrays import as_array, as_tensor
from distdl.ops.rows import Rows, Standard
from distdl.tensors.recorders import Held, as_one_call

NEAR = Held(False)  # what a block without cells says of its means: one object, so that each recording has the same


@as_one_call
def measure(rows: Rows, block: torch.Tensor) -> tuple[torch.Tensor, Held]:
    """What this block has of each mean and variance, and whether a mean is far (see :meth:`Rows.measure`)."""
    found, far = rows.measure(block)
    return found, Held(far)


@as_one_call
def centred(rows: Rows, found: torch.Tensor, mean: torch.Tensor, far: Held) -> tuple[torch.Tensor, Held]:
    """The mean of each row less its centre, and that. The centre is None where no mean is far.

    Args:
        found: means and variances of all cells, in float64.
        mean: of each row.
    """
    if not far.value:
        return mean, Held(None)
    (rest,) = rows.spread(found[0] - found[0].to(mean.dtype), rows.own, mean.dtype)
    return rest, Held(mean)


@as_one_call
@np.errstate(all="ignore")
def merged(
    entries: torch.Tensor, shares: torch.Tensor, dtype: torch.dtype, far: Held
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Held]:
    """Mean and variance of each channel, in float64 and in a dtype, the latter mean less its centre; and the centre.

    Args:
        entries: means and variances that several workers measured, of (workers, 2, channels).
        shares: of the workers in all cells, of (workers, 1).
        far: whether a mean is far on this worker.
    """
    states, parts = as_array(entries), as_array(shares)
    means = states[:, 0]
    away = means - means[0]  # averaging large means themselves would round off their differences
    shift = (parts * away).sum(0)
    away -= shift
    mean = as_tensor(means[0] + shift)
    variance = as_tensor((parts * (states[:, 1] + away * away)).sum(0))
    centre = mean.to(dtype, copy=True)
    if not far.value:
        return mean, variance, centre, variance.to(dtype, copy=True), Held(None)
    return mean, variance, (mean - centre).to(dtype), variance.to(dtype, copy=True), Held(centre)


@as_one_call
@np.errstate(all="ignore")
def gradient(
    rows: Rows,
    block: torch.Tensor,
    centre: Held,
    dy: torch.Tensor,
    by: Standard,
    weight: torch.Tensor | None,
    sums: torch.Tensor,
    share: float,
) -> torch.Tensor:
    """The gradient of a block whose rows are channels.

    Args:
        sums: of all cells of each channel, as :meth:`Rows.sums` gives them.
        share: what makes of them minus their averages.
    """
    _, variance, eps = by
    scale = (as_array(variance) + eps) ** -0.5
    if weight is not None:
        scale *= as_array(weight)
    slope, shift = as_array(sums) * (scale * share)
    factors = [as_tensor(one) for one in (scale, slope, shift)]
    found: torch.Tensor = on_rows(Rows.gradient, rows, block, centre, (dy, by, factors))
    return found


@as_one_call
def on_rows(method: Callable[..., Any], rows: Rows, block: torch.Tensor, centre: Held, given: tuple[Any, ...]) -> Any:
    """What a method of rows makes of a block less its centre."""
    return method(rows, block if centre.value is None else rows.less(block, centre.value), *given)
