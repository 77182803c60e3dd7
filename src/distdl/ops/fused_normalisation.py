r"""A normalisation as one autograd node: torch's kernels on the block, and one exchange of entries each way.

The forward measures the block, gathers the entries of all workers with the same means (see ``ops.moments``), and
applies mean, variance, weight and bias. The backward gathers entries again, by the same operator: for each
mean the sums S and G, which add up over the workers::

    x --- measure --> entries ==gather== merge --> mean, variance --> y = (x - mean) / s * w + b,  s = sqrt(var + eps)

    dy --- sum --> S = sum w dy, G = sum w dy (x - mean) / s ==gather== add --> their averages over the cells, S', G'

                                                        dx = (w dy - S' - (x - mean) / s * G') / s

The kernels take a tensor of three dims, *batch*, *rows* and *cells*, and one mean, variance, weight and bias for each
row (see ``ops.rows``). All normalisations are such::

    batch norm                       (samples, channels, space)
    instance norm, group norm        (1, samples * channels, space)         the rows of a group have the same mean
    layer norm, RMS norm             (1, all other dims, features)          weight and bias vary along the cells

Where the derivative is itself differentiated, the steps of ``ops.standardisation`` compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl.exchange import Operator
from distdl.geometry.boxes import Shape
from distdl.ops.moments import Moments
from distdl.ops.recorded_rows import centred, measure, on_rows
from distdl.ops.rows import Rows
from distdl.tensors.function import Function, gradients_of
from distdl.tensors.memory import empty
from distdl.tensors.recorders import Held

Note = Callable[[torch.Tensor], None] | None


class Fused:
    """A normalisation of one worker's block.

    Args:
        rows: how the kernels see the block.
        moments: what is measured.
        gather: brings the entries of all workers with the same means together.
        eps: what is added to a variance.
        steps: the same function of x and the weights in steps that can be differentiated any number of times.
        own: the shape of the result.
    """

    def __init__(
        self,
        rows: Rows,
        moments: Moments,
        gather: Operator,
        eps: float,
        steps: Callable[..., torch.Tensor],
        own: Shape,
    ) -> None:
        self.rows, self.gather, self.eps, self.steps, self.own = rows, gather, eps, steps, own
        self.moves = gather.derivatives.gradient
        self._moments, self._measured = moments, moments.measured
        self._per_cell = -1 / max(moments.count, 1)

    def __call__(self, x: torch.Tensor, weights: Sequence[torch.Tensor], note: Note) -> torch.Tensor:
        """The block of the result.

        Args:
            note: is given the means and variances that follow from all entries that this worker gathers.
        """
        anchor = None
        if self.moves and not x.requires_grad:  # every member takes part in the backward
            anchor = torch.empty(0, device=x.device, requires_grad=True)
        y: torch.Tensor = _Normalise.apply(self, note, anchor, x, *weights)
        return y

    def moments(self, entries: torch.Tensor | None, beside: torch.Tensor, note: Note) -> torch.Tensor:
        """Mean and variance, or the mean of the squares, of all cells, of what this block has of them if it has any."""
        merged = self._moments.merge(self.gather.execute(self._given(entries, beside)), differentiable=False)
        if note is not None:
            note(merged)
        return self._moments.of(merged)

    def averages(self, entries: torch.Tensor | None, beside: torch.Tensor) -> torch.Tensor:
        """Minus the averages over all cells, of what this block adds to their sums, if it has cells."""
        total = self._moments.total(self.gather.execute(self._given(entries, beside)))
        return self._moments.of(total) * self._per_cell

    def _given(self, entries: torch.Tensor | None, beside: torch.Tensor) -> torch.Tensor:
        if entries is None:
            return torch.zeros(self._measured, dtype=torch.float64, device=beside.device)
        return entries.view(self._measured)


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any, fused: Fused, note: Note, anchor: torch.Tensor | None, x: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        rows = fused.rows
        ctx.fused, ctx.began = fused, fused.gather.history
        if not x.numel():
            fused.moments(None, x, note)
            ctx.save_for_backward(x, None, None, *weights)
            return empty(fused.own, x.dtype, x)
        block = rows.of_block(x)
        entries, far = measure(rows, block)
        found = fused.moments(entries, x, note)
        *_, variance = means = rows.spread(found, rows.own, x.dtype)
        mean = means[0] if rows.centred else torch.zeros_like(variance)
        mean, ctx.centre = centred(rows, found, mean, far)
        ctx.save_for_backward(x, mean, variance, *weights)
        weight, bias = [*map(rows.of_weight, weights), None, None][:2]
        by = mean, variance, fused.eps
        y: torch.Tensor = on_rows(Rows.applied, rows, block, ctx.centre, (by, weight, bias, fused.own))
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        # before any message, as this is where a checkpoint recomputes its forward
        x, mean, variance, *weights = ctx.saved_tensors
        fused: Fused = ctx.fused
        anchored = torch.zeros(0, device=x.device) if ctx.needs_input_grad[2] else None
        if fused.moves or torch.is_grad_enabled():
            fused.gather.derive(ctx.began)
        if torch.is_grad_enabled():
            return None, None, anchored, *_differentiably(fused, x, weights, dy, ctx.needs_input_grad[3:])
        if not x.numel():
            if fused.moves:
                fused.averages(None, x)
            return None, None, anchored, torch.empty_like(x), *map(torch.zeros_like, weights)
        block = fused.rows.of_block(x)
        seen = fused.rows.beside(block, dy)
        dx, dweights = _derivatives(fused, block, ctx.centre, seen, mean, variance, weights)
        if dx is not None:
            dx = fused.rows.to_block(dx, x.shape)
        return None, None, anchored, dx, *[one.reshape(w.shape) for one, w in zip(dweights, weights, strict=False)]


def _derivatives(
    fused: Fused,
    x: torch.Tensor,
    centre: Held,
    dy: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weights: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gradients of x, if any worker needs its own, and of the weights.

    Args:
        mean, variance: of each row.
    """
    rows, eps = fused.rows, fused.eps
    scale = inverse = torch.add(variance, eps).rsqrt_()
    weight = rows.of_weight(weights[0]) if weights else None
    dweights: list[torch.Tensor] = []
    if rows.inner and weight is not None:
        sums, dweights = on_rows(Rows.weighted_sums, rows, x, centre, (dy, mean, inverse, weight))
    else:
        sums = on_rows(Rows.sums, rows, x, centre, (dy, (mean, variance, eps)))
        if weight is not None:
            dweights = [*rows.gathered(sums, rows.row, x.dtype).unbind()]
            sums, scale = sums * weight, inverse * weight
    if not fused.moves:
        return None, dweights
    if not rows.centred:
        sums = sums[:1]
    averages = fused.averages(rows.gathered(sums, rows.own, torch.float64), x)
    factors = [scale, *(one.mul_(inverse) for one in rows.spread(averages, rows.own, x.dtype))]
    if rows.inner and weight is not None:
        return on_rows(Rows.weighted_gradient, rows, x, centre, (dy, weight, mean, factors)), dweights
    return on_rows(Rows.gradient, rows, x, centre, (dy, (mean, variance, eps), factors)), dweights


def _differentiably(
    fused: Fused, x: torch.Tensor, weights: Sequence[torch.Tensor], dy: torch.Tensor, needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The same derivatives, which can be differentiated; every member goes through the same exchanges."""
    moved = fused.gather.derivatives.gradient
    if moved and not x.requires_grad:
        x = x.detach().requires_grad_()
    return gradients_of(fused.steps, (x, *weights), (moved, *needed[1:]), dy)
