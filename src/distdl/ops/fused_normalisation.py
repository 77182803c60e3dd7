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
from distdl.ops.recorded_rows import measure, on_rows
from distdl.ops.rows import Rows, Standard
from distdl.tensors.function import Function, gradients_of
from distdl.tensors.memory import empty
from distdl.tensors.recorders import Held, as_one_call

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

    def gathered(self, entries: torch.Tensor | None, beside: torch.Tensor) -> torch.Tensor:
        """The entries of all workers with the same means, of those of this block if it has any."""
        if entries is None:
            return self.gather.execute(torch.zeros(self._measured, dtype=torch.float64, device=beside.device))
        return self.gather.execute(entries.view(self._measured))

    @as_one_call
    def merged(self, gathered: torch.Tensor) -> torch.Tensor:
        """Mean and variance, or the mean of the squares, of all cells."""
        return self._moments.merge(gathered, differentiable=False)

    @as_one_call
    def standard(
        self, gathered: torch.Tensor, dtype: torch.dtype, far: Held
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Held]:
        """What :meth:`merged` gives; mean and variance of each row, the mean less its centre; and the centre."""
        merged = self._moments.merge(gathered, differentiable=False)
        mean, variance = self._of_rows(merged, dtype)
        if not far.value:
            return merged, mean, variance, Held(None)
        exact, _ = self._of_rows(merged, torch.float64)
        return merged, (exact - mean).to(dtype), variance, Held(mean)

    def _of_rows(self, merged: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        *means, variance = self.rows.spread(self._moments.of(merged), self.rows.own, dtype)
        return means[0] if means else torch.zeros_like(variance), variance

    def averages(self, gathered: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Minus the averages over all cells, of each row, of what gathered entries add up to."""
        total = self._moments.of(self._moments.total(gathered))
        return self.rows.spread(total * self.rows.per_cell, self.rows.own, dtype)


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any, fused: Fused, note: Note, anchor: torch.Tensor | None, x: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        rows = fused.rows
        ctx.fused, ctx.began = fused, fused.gather.history
        if not x.numel():
            gathered = fused.gathered(None, x)
            if note is not None:
                note(fused.merged(gathered))
            ctx.save_for_backward(x, None, None, *weights)
            return empty(fused.own, x.dtype, x)
        block = rows.of_block(x)
        entries, far = measure(rows, block)
        merged, mean, variance, ctx.centre = fused.standard(fused.gathered(entries, x), x.dtype, far)
        if note is not None:
            note(merged)
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
                fused.gathered(None, x)
            return None, None, anchored, torch.empty_like(x), *map(torch.zeros_like, weights)
        block = fused.rows.of_block(x)
        seen = fused.rows.beside(block, dy)
        weight = fused.rows.of_weight(weights[0]) if weights else None
        by, dx = (mean, variance, fused.eps), None
        entries, *dweights = on_rows(_sums, fused.rows, block, ctx.centre, (seen, by, weight))
        if fused.moves:
            given = fused, seen, by, weight, fused.gathered(entries, x)
            dx = fused.rows.to_block(on_rows(_gradient, fused.rows, block, ctx.centre, given), x.shape)
        return None, None, anchored, dx, *[one.reshape(w.shape) for one, w in zip(dweights, weights, strict=False)]


def _sums(
    rows: Rows, x: torch.Tensor, dy: torch.Tensor, by: Standard, weight: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The entries of the backward, and the gradients of the weights."""
    mean, variance, eps = by
    dweights: Sequence[torch.Tensor] = ()
    if rows.inner and weight is not None:
        sums, dweights = rows.weighted_sums(x, dy, mean, torch.add(variance, eps).rsqrt_(), weight)
    else:
        sums = rows.sums(x, dy, by)
        if weight is not None:
            dweights = rows.gathered(sums, rows.row, x.dtype).unbind()
            sums = sums * weight
    return rows.gathered(sums if rows.centred else sums[:1], rows.own, torch.float64), *dweights


def _gradient(
    rows: Rows,
    x: torch.Tensor,
    fused: Fused,
    dy: torch.Tensor,
    by: Standard,
    weight: torch.Tensor | None,
    gathered: torch.Tensor,
) -> torch.Tensor:
    """The gradient of a block, of gathered entries of the backward."""
    mean, variance, eps = by
    inverse = torch.add(variance, eps).rsqrt_()
    slopes = [one.mul_(inverse) for one in fused.averages(gathered, x.dtype)]
    if rows.inner and weight is not None:
        return rows.weighted_gradient(x, dy, weight, mean, [inverse, *slopes])
    return rows.gradient(x, dy, by, [inverse if weight is None else inverse * weight, *slopes])


def _differentiably(
    fused: Fused, x: torch.Tensor, weights: Sequence[torch.Tensor], dy: torch.Tensor, needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The same derivatives, which can be differentiated; every member goes through the same exchanges."""
    moved = fused.gather.derivatives.gradient
    if moved and not x.requires_grad:
        x = x.detach().requires_grad_()
    return gradients_of(fused.steps, (x, *weights), (moved, *needed[1:]), dy)
