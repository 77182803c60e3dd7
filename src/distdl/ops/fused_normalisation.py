r"""A normalisation as one autograd node: torch's kernels on the block, and one exchange of entries each way.

The forward measures the block, gathers the entries of all workers with the same means (see ``ops.moments``), and
applies mean, variance, weight and bias in one pass. The backward gathers entries again, by the same operator: for each
mean the sums S and G, which add up over the workers::

    x --- measure --> mean, M2 ==gather== merge --> mean, variance --> y = (x - mean) / s * w + b,  s = sqrt(var + eps)

    dy --- sum --> S = sum w dy, G = sum w dy (x - mean) / s ==gather== add --> their averages over the cells, S', G'

                                                        dx = (w dy - S' - (x - mean) / s * G') / s

The kernels take a tensor of three dims, *batch*, *rows* and *cells*, and one mean, variance, weight and bias for each
row. All normalisations are such::

    batch norm                       (samples, channels, space)
    instance norm, group norm        (1, samples * channels, space)         the rows of a group have the same mean
    layer norm, RMS norm             (1, all other dims, features)          weight and bias vary along the cells

Where the derivative is itself differentiated, the steps of ``ops.standardisation`` compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from distdl.exchange import Operator
from distdl.geometry.boxes import Shape
from distdl.ops.moments import Moments
from distdl.tensors.function import Function
from distdl.tensors.memory import empty

_KERNEL = torch.ops.aten.native_batch_norm.out
_SUMS = torch.ops.aten.native_batch_norm_backward.default
_FEATURES = torch.ops.aten.native_layer_norm_backward.default
_FAR = 1024.0  # times the variance: a square of a mean that costs digits


class Rows(NamedTuple):
    """How the kernels see a block.

    Attributes:
        extents: batch, rows and cells.
        leading: the dims of the block that the rows are.
        first: how many dims of the block come before them.
        inner: whether weight and bias vary along the cells, and not from row to row.
        measured: extents of the means along the dims of the rows.
        row: extents of weight and bias along those dims; of the cells if they vary along them.
    """

    extents: Shape
    leading: Shape
    first: int
    inner: bool
    measured: Shape
    row: Shape

    @classmethod
    def of(cls, cells: Shape, row: Shape, merged: Sequence[int]) -> Rows | None:
        """None if the kernels do not fit, which follows from the dims alone: it is the same on every worker.

        Args:
            cells: shape of the block.
            row: shape of weight and bias, of as many dims.
            merged: the dims along which there is one mean.
        """
        means = tuple(1 if dim in merged else n for dim, n in enumerate(cells))
        varying = [dim for dim, n in enumerate(row) if n > 1]
        if merged and merged[0] == 0 and 1 not in merged and varying in ([], [1]):
            batch, channels, *space = cells
            return cls((batch, channels, prod(space)), (channels,), 1, False, (channels,), (channels,))
        kept = min(merged, default=len(cells))
        if not merged or list(merged) != list(range(kept, len(cells))):
            return None
        inner = bool(varying) and varying[0] >= kept and row[kept:] == cells[kept:]
        last = kept if inner or not varying else max(kept, varying[-1] + 1)
        leading = cells[:last]
        extents = (1, prod(leading), prod(cells[last:]))
        return cls(extents, leading, 0, inner, means[:last], row[last:] if inner else row[:last])

    def spread(self, values: torch.Tensor, own: Shape) -> torch.Tensor:
        """One value for each row, of values that are the same along some of their dims."""
        if own != self.leading:
            values = values.reshape(own).expand(self.leading)
        return values.reshape(-1).contiguous()  # (the kernels heed no strides of it)

    def gathered(self, values: torch.Tensor, own: Shape) -> torch.Tensor:
        """The adjoint: the sums of the values of rows that have one in common; rows are the last dim."""
        if own == self.leading:
            return values
        values = values.reshape((*values.shape[:-1], *self.leading))
        dims = [dim - len(own) for dim, n in enumerate(own) if n == 1 and self.leading[dim] != 1]
        return values.sum(dims, keepdim=True) if dims else values


class Fused(NamedTuple):
    """A normalisation of one worker's block.

    Attributes:
        rows: how the kernels see the block.
        moments: what is measured.
        gather: brings the entries of all workers with the same means together.
        eps: what is added to a variance.
        steps: the same function of x and the weights in steps that can be differentiated any number of times.
        own: the shape of the result.
    """

    rows: Rows
    moments: Moments
    gather: Operator
    eps: float
    steps: Callable[..., torch.Tensor]
    own: Shape

    def __call__(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], note: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """The block of the result.

        Args:
            note: is given the means of all entries that this worker gathers.
        """
        anchor = None
        if self.gather.derivatives.gradient and not x.requires_grad:  # every member takes part in the backward
            anchor = torch.empty(0, device=x.device, requires_grad=True)
        y: torch.Tensor = _Normalise.apply(self, note, anchor, x, *weights)
        return y

    def measure(self, x: torch.Tensor) -> torch.Tensor:
        """The entries of the block."""
        if not x.numel():
            return x.new_zeros(self.moments.measured, dtype=torch.float64)
        mean, variance = _moments(x.reshape(self.rows.extents), self.rows.inner)
        cells = x.numel() // len(mean)
        own = self._entries
        shared = len(mean) // prod(own)  # rows with one mean
        if not self.moments.centred:
            return self.entries((variance + mean.square())[None] / shared)
        centre = self.rows.gathered(mean, own) / shared
        squares = variance if shared == 1 else variance + (mean - self.rows.spread(centre, own)).square()
        return self.entries(torch.stack([mean / shared, squares * cells]))

    def entries(self, values: torch.Tensor) -> torch.Tensor:
        """Entries that add up, of what each row adds to them."""
        return self.rows.gathered(values, self._entries).reshape(self.moments.measured)

    @property
    def _entries(self) -> Shape:
        """Extents of this worker's entries along the dims of the rows."""
        first = 1 + self.rows.first
        return self.moments.measured[first : first + len(self.rows.leading)]

    def statistics(self, means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance of each row, of the gathered means."""
        found = self.moments.of(means)
        mean, variance = torch.zeros_like(found[0]), found[0]
        if self.moments.centred:
            mean, variance = found[0], found[1] / max(self.moments.count, 1)
        return self.rows.spread(mean, self.rows.measured), self.rows.spread(variance, self.rows.measured)

    def averages(self, entries: torch.Tensor) -> list[torch.Tensor]:
        """For each row, the average over the cells of its mean, of entries that add up."""
        gathered = self.moments.total(self.gather.execute(entries)) / max(self.moments.count, 1)
        return [self.rows.spread(one, self.rows.measured) for one in self.moments.of(gathered)]


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: Fused,
        note: Callable[[torch.Tensor], None],
        anchor: torch.Tensor | None,
        x: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        means = fused.moments.merge(fused.gather.execute(fused.measure(x)))
        note(means)
        ctx.fused = fused
        y = empty(fused.own, x.dtype, x)
        if not x.numel():
            ctx.save_for_backward(x, x, x, *weights)
            return y
        mean, variance = fused.statistics(means)
        ctx.far = _is_far(x, mean, variance)
        inverse = (variance + fused.eps).rsqrt_()
        ctx.save_for_backward(x, mean, inverse, *weights)
        rows, (weight, bias) = fused.rows, [*weights, None, None][:2]
        given, mean = _near(x.reshape(rows.extents), mean, ctx.far)
        view = y.view(rows.extents)
        if not rows.inner:
            scale = inverse if weight is None else inverse * rows.spread(weight, rows.row)
            _apply(given, scale, None if bias is None else rows.spread(bias, rows.row), mean, view)
            return y
        _apply(given, inverse, None, mean, view)
        if bias is not None and weight is not None:
            torch.addcmul(bias.reshape(-1), view, weight.reshape(-1), out=view)
        elif weight is not None:
            view.mul_(weight.reshape(-1))
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, mean, inverse, *weights = ctx.saved_tensors  # (before any message: a checkpoint recomputes here)
        fused: Fused = ctx.fused
        anchored = torch.zeros(0, device=x.device) if ctx.needs_input_grad[2] else None
        if torch.is_grad_enabled():
            return None, None, anchored, *_differentiably(fused, x, weights, dy, ctx.needs_input_grad[3:])
        if not x.numel():
            if fused.gather.derivatives.gradient:
                fused.averages(x.new_zeros(fused.moments.measured, dtype=torch.float64))
            return None, None, anchored, torch.empty_like(x), *map(torch.zeros_like, weights)
        given, mean = _near(x.reshape(fused.rows.extents), mean, ctx.far)
        derivatives = _along_cells if fused.rows.inner else _along_rows
        dx, dweights = derivatives(fused, given, mean, inverse, weights, dy.reshape(fused.rows.extents))
        if dx is not None and dx.shape != x.shape:
            dx = dx.view(x.shape)
        return None, None, anchored, dx, *[one.reshape(w.shape) for one, w in zip(dweights, weights, strict=False)]


def _along_rows(
    fused: Fused,
    x: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    weights: Sequence[torch.Tensor],
    dy: torch.Tensor,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gradients of x and of weights that are the same in all cells of a row."""
    rows = fused.rows
    sums = _sums(x, mean, inverse, dy)
    dweights = [rows.gathered(one, rows.row).to(x.dtype) for one in (sums[1], sums[0])] if weights else []
    if not fused.gather.derivatives.gradient:
        return None, dweights
    if weights:
        weight = rows.spread(weights[0], rows.row)
        sums, scale = sums * weight, inverse * weight
    else:
        scale = inverse
    return _dx(fused, x, mean, inverse, sums, dy, scale), dweights


def _along_cells(
    fused: Fused,
    x: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    weights: Sequence[torch.Tensor],
    dy: torch.Tensor,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gradients of x and of weights that vary along the cells."""
    dweights: list[torch.Tensor] = []
    if weights:
        flat, places = [one.reshape(-1) for one in weights], (-1, 1)
        _, *dweights = _FEATURES(
            dy[0], x[0], [x.shape[2]], mean.view(places), inverse.to(x.dtype).view(places), flat[0],
            flat[1] if len(flat) > 1 else None, [False, True, len(flat) > 1],
        )  # fmt: skip
        dy = torch.mul(dy, flat[0], out=empty(dy.shape, x.dtype, x))
    if not fused.gather.derivatives.gradient:
        return None, dweights
    return _dx(fused, x, mean, inverse, _sums(x, mean, inverse, dy), dy, inverse), dweights


def _sums(x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Of each row, the sums of dy and of dy (x - mean) / s, in float64."""
    _, slopes, shifts = _SUMS(dy, x, None, mean, torch.ones_like(mean), None, None, False, 0.0, [False, True, True])
    sums = torch.stack([shifts, slopes]).double()
    sums[1] *= inverse
    return sums


def _dx(
    fused: Fused,
    x: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    sums: torch.Tensor,
    dy: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """The gradient of x, of the sums of w dy and w dy (x - mean) / s of its rows.

    Args:
        scale: w / s, or 1 / s if w is in dy.
    """
    kinds = fused.moments.measured[0]
    averages = fused.averages(fused.entries(sums[2 - kinds :]))
    slope = averages[-1] * inverse.square().neg_()
    shift = averages[0] * -inverse if kinds == 2 else None
    dx = empty(x.shape, x.dtype, x)
    _apply(x, slope, shift, mean, dx)
    return dx.addcmul_(dy, scale.to(x.dtype).view(1, -1, 1))


def _differentiably(
    fused: Fused, x: torch.Tensor, weights: Sequence[torch.Tensor], dy: torch.Tensor, needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The same derivatives, which can be differentiated; every member goes through the same exchanges."""
    moved = fused.gather.derivatives.gradient
    if moved and not x.requires_grad:
        x = x.detach().requires_grad_()
    inputs = [one for one, asked in zip((x, *weights), (moved, *needed[1:]), strict=True) if asked]
    found = iter(torch.autograd.grad(fused.steps(x, *weights), inputs, dy, create_graph=True))
    return [next(found) if asked else None for asked in (moved, *needed[1:])]


def _moments(x: torch.Tensor, many: bool, again: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of each row, in float64.

    Args:
        many: whether there are many short rows, which another kernel measures faster.
        again: whether x is what is left of a tensor whose mean is large.
    """
    if x.is_meta:
        return x.new_empty(x.shape[1], dtype=torch.float64), x.new_empty(x.shape[1], dtype=torch.float64)
    if many:
        _, mean, inverse = torch.native_layer_norm(x[0], [x.shape[2]], None, None, 0.0)
        variance = inverse.double().square_().reciprocal_()
    else:
        mean, variance = (one.double() for one in torch.batch_norm_update_stats(x, None, None, 0.0))
    mean, variance = mean.double().view(-1), variance.view(-1)
    if again or not _is_far(x, mean, variance):
        return mean, variance
    rest, _ = _near(x, mean, True)
    offset, variance = _moments(rest, many, again=True)  # (the kernels round the mean to the dtype of x)
    return mean + offset, variance


def _is_far(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> bool:
    """Whether a mean is large beside the deviation, and the kernels would lose digits."""
    return x.is_cpu and bool((mean.square() > _FAR * variance).any())


def _near(x: torch.Tensor, mean: torch.Tensor, far: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x and its mean; or both less the mean, if it is far: the kernels of the CPU multiply before they subtract.

    No digit is lost by it, as x and its mean are nearly the same.
    """
    centre = mean.to(x.dtype)
    if not far:
        return x, centre
    return torch.sub(x, centre.view(1, -1, 1), out=empty(x.shape, x.dtype, x)), (mean - centre).to(x.dtype)


def _apply(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, mean: torch.Tensor, y: torch.Tensor
) -> None:
    """``y = (x - mean) * scale + shift``, of rows."""
    unused = torch.empty(0, dtype=x.dtype, device=x.device)
    shift = None if shift is None else shift.to(x.dtype)
    one = torch.ones_like(mean)
    _KERNEL(x, scale.to(x.dtype), shift, mean, one, False, 0.0, 0.0, out=y, save_mean=unused, save_invstd=unused)
