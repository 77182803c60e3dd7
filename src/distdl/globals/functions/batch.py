r"""Batch normalisation in training as one autograd node: its derivative in closed form, one message each way.

Each worker measures its block by torch's kernel. The entries (mean and M2 of each channel) of all workers meet on every
worker, in the same order, so all merge them alike and keep the same running statistics::

    x --- measure --> entries ==all-gather==> merge --> mean, variance --> y = (x - mean) / sqrt(variance + eps) * w + b

    dy --- sum --> db, dw ==all-sum==> S, G         dx = (w / s) (dy - S / n - (x - mean) / s * G / n),   s = sqrt(...)

Where this derivative is itself differentiated, the steps of ``distdl.ops.normalisation`` compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch

from distdl.exchange import Operator
from distdl.geometry.boxes import runs, shape
from distdl.globals.context import KnownLayout
from distdl.globals.functions.applying import autocast_dtype
from distdl.ops.rows import Rows, Standard
from distdl.plan.planning import all_sum
from distdl.tensors.constants import Constant
from distdl.tensors.derivatives import NONE, is_differentiated_forward
from distdl.tensors.dtypes import without_autocast
from distdl.tensors.function import Function, gradients_of
from distdl.tensors.memory import is_channels_last
from distdl.transport import Label

_KERNEL = torch.ops.aten.native_batch_norm.default


def fits(block: torch.Tensor, *rows: torch.Tensor | None) -> bool:
    """Whether torch's kernels of the CPU can compute what the node does."""
    dtype = block.dtype
    return (
        (block.is_cpu or block.is_meta)
        and (dtype is torch.float32 or dtype is torch.float64)
        and all(row is None or row.dtype is dtype for row in rows)
        and not is_differentiated_forward()
    )


class BatchStatistics:
    """How mean and variance of each channel come together, of tensors of one layout and dtype.

    Attributes:
        count: the cells behind each mean.
        shared: whether several workers have cells of a channel, no worker has only some channels, and there are as many
            cells as a variance needs.
    """

    def __init__(self, layout: KnownLayout, dtype: torch.dtype) -> None:
        context = layout.context
        channels, dims = layout.extents[1], len(layout.extents)
        cells = {
            int(worker): prod(n for dim, n in enumerate(shape(layout[int(worker)])) if dim != 1)
            for worker in layout.partition.workers.ravel()
        }
        filled = [cells.get(worker, 0) > 0 for worker in context.everyone]
        everyone = context.world.workers.reshape(-1, 1, 1)
        owned = context.layout(everyone, [runs(filled), ((0, 2),), ((0, channels),)])
        entries = context.everywhere(owned.extents)
        self._gather: Operator = context.moving(owned, entries, dtype, NONE, "batch_norm")
        plan = all_sum(context.world, [0], dict.fromkeys(context.everyone, (2 * channels,)), context.me)
        shapes = [(2 * channels,)]
        # (with its length: some transports end the process where messages of two lengths meet)
        label = Label("batch_norm", detail=layout)
        self._sum = Operator(plan, context.comm, context.everyone, label, dtype, NONE, shapes, shapes)
        self._own = owned.local
        own, space = layout.local, range(2, dims)
        rows = Rows.of(own, (1, channels, *[1] * len(space)), (0, *space), True, max(prod(own), 1))
        assert rows is not None  # (they fit all channels)
        self._rows = rows
        self.derive = self._gather.derive
        counts = [cells[worker] for worker in context.everyone if cells.get(worker, 0)]
        self.count = sum(counts)
        workers = layout.partition.workers
        self.shared = workers.shape[1] == 1 and workers.size > 1 and self.count > 1
        self._shares = Constant(torch.tensor(counts, dtype=torch.float64, device="cpu").div_(self.count).to(dtype))
        self.row = (1, channels, *[1] * (dims - 2))
        self._channels = channels

    @property
    def history(self) -> int:
        """What the workers have exchanged so far, as a number."""
        return self._gather.history

    @classmethod
    def of(cls, layout: KnownLayout, dtype: torch.dtype) -> BatchStatistics:
        found: BatchStatistics = layout.context.keep((cls, layout, dtype), lambda: cls(layout, dtype))
        return found

    def merged(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance of each channel of the whole tensor, on every worker."""
        if x.numel():
            if x.is_contiguous() or x.is_meta or is_channels_last(x):
                entries = self._rows.measured(self._rows.of_block(x), x.dtype)
            else:
                entries = torch.stack(torch.batch_norm_update_stats(x, None, None, 0.0))
        else:
            entries = x.new_zeros(self._own)
        means, variances = self._gather.execute(entries.view(self._own)).unbind(1)
        if autocast_dtype(x) is None:
            return self._merge(means, variances)
        with without_autocast(x.device):  # (which would round the products)
            return self._merge(means, variances)

    def _merge(self, means: torch.Tensor, variances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = self._shares.on(means.device)
        away = means - means[0]  # (of large means, what they have in common would round off what tells them apart)
        shift = shares @ away
        away -= shift
        return means[0] + shift, shares @ variances.addcmul(away, away)

    def sums(self, x: torch.Tensor, dy: torch.Tensor, by: Standard) -> torch.Tensor:
        """What this block has of the gradients of weight and bias."""
        if not x.numel():
            return x.new_zeros(2, self._channels)
        seen = self._rows.of_block(x)
        return self._rows.sums(seen, self._rows.beside(seen, dy), by)

    def averages(self, sums: torch.Tensor) -> torch.Tensor:
        """Minus their sums over all workers, per cell."""
        total: torch.Tensor = self._sum.execute(sums.view(-1))
        return total.div_(-self.count).view(2, self._channels)


class Options(NamedTuple):
    """What the node is told beside its tensors.

    Attributes:
        running: the running statistics, if there are any; momentum is the weight of the new batch in them.
        steps: the same function of x, weight and bias in steps that are differentiable any number of times.
    """

    statistics: BatchStatistics
    eps: float
    running: tuple[torch.Tensor, torch.Tensor] | None
    momentum: float
    steps: Callable[..., torch.Tensor]


def normalised(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """This worker's block of the result."""
    y: torch.Tensor = _BatchNorm.apply(x, weight, bias, options)
    return y


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, options: Options
    ) -> torch.Tensor:
        statistics = options.statistics
        ctx.began = statistics.history
        mean, variance = statistics.merged(x)
        if options.running is not None:
            unbiased = options.momentum * statistics.count / (statistics.count - 1)
            for one, new, part in zip(options.running, (mean, variance), (options.momentum, unbiased), strict=True):
                one.mul_(1 - options.momentum).add_(new, alpha=part)
        ctx.options = options
        ctx.save_for_backward(x, weight, bias, mean, variance)
        if not x.numel():
            return torch.empty_like(x)
        y: torch.Tensor = _KERNEL(x, weight, bias, mean, variance, False, 0.0, options.eps)[0]
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, variance = ctx.saved_tensors  # (before any message: a checkpoint recomputes here)
        options: Options = ctx.options
        if ctx.needs_input_grad[0] or torch.is_grad_enabled():
            options.statistics.derive(ctx.began)
        if torch.is_grad_enabled():
            return *gradients_of(options.steps, (x, weight, bias), ctx.needs_input_grad[:3], dy), None
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        statistics, eps = options.statistics, options.eps
        sums = statistics.sums(x, dy, (mean, variance, eps))
        dx, (dw, db) = None, sums
        if needs_x:
            averages = statistics.averages(sums)
            if x.numel():
                scale = (variance + eps).rsqrt_()
                if weight is not None:
                    scale.mul_(weight)
                slope, shift = averages.mul_(scale).unbind()
                dx = _KERNEL(x, slope, shift, mean, variance, False, 0.0, eps)[0]
                dx.addcmul_(dy, scale.view(statistics.row))
            else:
                dx = torch.empty_like(x)
        return dx, dw if needs_weight else None, db if needs_bias else None, None
