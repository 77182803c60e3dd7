"""Passes over rows that depend on values, as a recorded step calls them again.

Whether a mean is far from zero decides which operators run. A recorded step may not know it for the next call, so each
of these functions is one call of the step (see :mod:`distdl.tensors.recorders`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.ops.rows import Rows, Standard
from distdl.tensors.recorders import Held, as_one_call

NEAR = Held(False)  # what a block without cells says of its means: one object, so that each recording has the same


@as_one_call
def measure(rows: Rows, block: torch.Tensor) -> tuple[torch.Tensor, Held]:
    """What this block has of each mean and variance, and whether a mean is far (see :meth:`Rows.measure`)."""
    found, far = rows.measure(block)
    return found, Held(far)


@as_one_call
def merged(
    entries: torch.Tensor, shares: torch.Tensor, far: Held, eps: float, weight: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Held]:
    """Mean and variance of each channel, of those that several workers measured.

    Args:
        entries: what they measured, of (workers, 2, channels).
        shares: of the workers in all cells.
        far: whether a mean is far on this worker.
    Returns: both in float64; in a dtype the mean less its centre, the variance, and ``weight / sqrt(variance + eps)``;
        and the centre, which is None where no mean is far.
    """
    found = (shares @ entries.view(len(shares), -1)).view(2, -1)
    mean, variance = found.unbind()
    away = entries[:, 0] - mean  # beside the mean its error is tiny, and in the variance it counts squared
    variance.add_(shares @ away.mul_(away))
    rest, low = found.to(dtype, copy=True).unbind()
    scale = torch.add(low, eps).rsqrt_()
    if weight is not None:
        scale.mul_(weight)
    if not far.value:
        return found, rest, low, scale, Held(None)
    return found, (mean - rest).to(dtype), low, scale, Held(rest)


@as_one_call
def on_rows(method: Callable[..., Any], rows: Rows, block: torch.Tensor, centre: Held, given: tuple[Any, ...]) -> Any:
    """What a method of rows makes of a block less its centre."""
    return method(rows, block if centre.value is None else rows.less(block, centre.value), *given)


def gradient_of_channels(
    rows: Rows, x: torch.Tensor, dy: torch.Tensor, by: Standard, scale: torch.Tensor, sums: torch.Tensor
) -> torch.Tensor:
    """The gradient of a block whose rows are channels, of the sums that :meth:`Rows.sums` gives, over all cells."""
    return rows.gradient(x, dy, by, [scale, *(sums * scale).mul_(rows.per_cell).unbind()])
