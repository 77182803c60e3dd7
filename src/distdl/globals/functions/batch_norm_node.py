"""Batch normalisation in training as one autograd node, whose backward is a closed formula: one message each way.

Each worker measures the mean and variance of each channel in its block, in float64. All workers gather these entries
and merge them in the same order, so all get the same statistics, and the same running statistics::

    x --- measure --> entries ==all-gather==> merge --> mean, variance --> y = (x - mean) / sqrt(variance + eps) * w + b

    dy --- sum --> db, dw ==all-sum==> S, G         dx = (w / s) (dy - S / n - (x - mean) / s * G / n),   s = sqrt(...)

For a derivative of the backward, the steps of ``distdl.ops.normalisation`` compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch

from distdl.exchange import Operator
from distdl.geometry.boxes import runs, shape
from distdl.globals.layouts.context import KnownLayout
from distdl.ops.recorded_rows import NEAR, gradient_of_channels, measure, merged, on_rows
from distdl.ops.rows import Rows
from distdl.plan.planning import all_sum
from distdl.tensors.constants import Constant
from distdl.tensors.derivatives import NONE, is_differentiated_forward
from distdl.tensors.function import Function, gradients_of
from distdl.transport import Label


def fits(block: torch.Tensor, *rows: torch.Tensor | None) -> bool:
    """Whether torch has CPU kernels for the node: of one dtype, float32 or float64, and no forward-mode derivative."""
    dtype = block.dtype
    return (
        (block.is_cpu or block.is_meta)
        and (dtype is torch.float32 or dtype is torch.float64)
        and all(row is None or row.dtype is dtype for row in rows)
        and not is_differentiated_forward()
    )


class BatchStatistics:
    """The operators that bring together the statistics of tensors of one layout and dtype.

    Attributes:
        rows: how the kernels see this worker's block.
        channels: the number of channels.
        count: the number of cells of a channel, over all workers.
        shares: of each worker with cells, in their number.
        shared: whether the node applies: channels are not split, their cells are on several workers, and there is more
            than one cell for each.
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
        self._gather: Operator = context.moving(owned, entries, torch.float64, NONE, "batch_norm")
        plan = all_sum(context.world, [0], dict.fromkeys(context.everyone, (2, channels)), context.me)
        shapes = [(2, channels)]
        # the label has the layout, because some transports abort if workers sum messages of different lengths
        label = Label("batch_norm", detail=layout)
        self._sum = Operator(plan, context.comm, context.everyone, label, dtype, NONE, shapes, shapes)
        self._own = owned.local
        counts = [cells[worker] for worker in context.everyone if cells.get(worker, 0)]
        self.count = sum(counts)
        own, space = layout.local, range(2, dims)
        rows = Rows.of(own, (1, channels, *[1] * len(space)), (0, *space), True, self.count)
        assert rows is not None  # it is None for split channels only
        self.rows = rows
        self.derive = self._gather.derive
        workers = layout.partition.workers
        self.shared = workers.shape[1] == 1 and workers.size > 1 and self.count > 1
        self.shares = Constant(torch.tensor(counts, dtype=torch.float64, device="cpu").div_(self.count))
        self.channels = channels

    @property
    def history(self) -> int:
        """The number that stands for all exchanges of these workers so far."""
        return self._gather.history

    @classmethod
    def of(cls, layout: KnownLayout, dtype: torch.dtype) -> BatchStatistics:
        """The one object for a layout and dtype."""
        found: BatchStatistics = layout.context.keep((cls, layout, dtype), lambda: cls(layout, dtype))
        return found

    def gathered(self, entries: torch.Tensor | None, beside: torch.Tensor) -> torch.Tensor:
        """Mean and variance of each channel in the blocks of all workers that have cells.

        Args:
            entries: those of this worker's block; None if it has no cells.
            beside: a tensor on the block's device.
        """
        if entries is None:
            entries = torch.zeros(self._own, dtype=torch.float64, device=beside.device)
        return self._gather.execute(entries.view(self._own))

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums of each channel, added up over all workers."""
        return self._sum.execute(sums)


class Options(NamedTuple):
    """Arguments of the node that are not differentiated.

    Attributes:
        running: the running mean and variance to update, if there are any.
        momentum: the weight of this batch in the running statistics.
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
    """Normalise this worker's block x by the statistics of all workers, and update the running statistics."""
    y: torch.Tensor = _BatchNorm.apply(x, weight, bias, options)
    return y


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, options: Options
    ) -> torch.Tensor:
        statistics, rows = options.statistics, options.statistics.rows
        block, entries, far = None, None, NEAR
        ctx.began = statistics.history
        if x.numel():
            block = rows.of_block(x)
            entries, far = measure(rows, block)
        gathered, shares = statistics.gathered(entries, x), statistics.shares.on(x.device)
        found, mean, variance, scale, ctx.centre = merged(gathered, shares, far, options.eps, weight, x.dtype)
        if options.running is not None:
            unbiased = options.momentum * statistics.count / (statistics.count - 1)
            for one, new, part in zip(options.running, found, (options.momentum, unbiased), strict=True):
                one.mul_(1 - options.momentum).add_(new, alpha=part)
        ctx.options = options
        ctx.save_for_backward(x, weight, bias, mean, variance, scale)
        if block is None:
            return torch.empty_like(x)
        by = mean, variance, options.eps
        y: torch.Tensor = on_rows(Rows.applied, rows, block, ctx.centre, (by, weight, bias, x.shape))
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # read before any message is sent, because a checkpoint recomputes its forward here
        x, weight, bias, mean, variance, scale = ctx.saved_tensors
        options: Options = ctx.options
        if ctx.needs_input_grad[0] or torch.is_grad_enabled():
            options.statistics.derive(ctx.began)
        if torch.is_grad_enabled():
            return *gradients_of(options.steps, (x, weight, bias), ctx.needs_input_grad[:3], dy), None
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        statistics, by = options.statistics, (mean, variance, options.eps)
        rows, dx = statistics.rows, None
        if x.numel():
            block = rows.of_block(x)
            rise = rows.beside(block, dy)
            sums = on_rows(Rows.sums, rows, block, ctx.centre, (rise, by))
        else:
            sums = x.new_zeros(2, statistics.channels)
        dw, db = sums
        if needs_x:
            total = statistics.total(sums)
            if x.numel():
                given = rise, by, scale, total
                dx = rows.to_block(on_rows(gradient_of_channels, rows, block, ctx.centre, given), x.shape)
            else:
                dx = torch.empty_like(x)
        return dx, dw if needs_weight else None, db if needs_bias else None, None
