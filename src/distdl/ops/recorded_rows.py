"""Passes over rows that depend on values, as a recorded step calls them again.

Whether a mean is far from zero decides which operators run. A recorded step may not know it for the next call, so each
of these functions is one call of the step (see :mod:`distdl.tensors.recorders`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.ops.rows import Rows
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
def on_rows(method: Callable[..., Any], rows: Rows, block: torch.Tensor, centre: Held, given: tuple[Any, ...]) -> Any:
    """What a method of rows makes of a block less its centre."""
    return method(rows, block if centre.value is None else rows.less(block, centre.value), *given)
