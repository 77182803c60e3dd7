"""Pooling over windows that slide: the largest cell, the mean, or the power mean of each.

x, split in any way       | 0  1  2 | 3  4 | 5  6  7 |
                               copy                            cells that windows share go to several workers
what each worker pools    ( 0  1  2  3 ) ( 3  4  5 ) ( 5  6  7 )
                               torch's operator
y, as even as possible        | 0 1 |      | 2 |        | 3 |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isinf, isnan, prod
from typing import Any, ClassVar

import torch
from torch.nn import functional

from distdl.exchange import Together
from distdl.geometry.boxes import Box, Shape, shape
from distdl.geometry.windows import PoolSliding
from distdl.ops.averaging import SlidingMean, average
from distdl.ops.setup import Setup, Site, same
from distdl.partition import Layout, Signature
from distdl.plan.planning import copy
from distdl.tensors.connection import local
from distdl.tensors.constants import Constant
from distdl.tensors.dtypes import HALVES
from distdl.tensors.function import Function
from distdl.tensors.memory import empty, is_channels_last

Reduce = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Cells:
    """The cells of the tensor that a worker pools, and what becomes of them.

    Attributes:
        first: where they begin in the tensor, for each dim of space.
        extents: global extents of the tensor in space.
        outputs: the places of the outputs in space.
        result: shape of this worker's result.
        before: cells of padding in front of them, for each dim of space, which torch's operator adds.
        behind: cells that are appended to them, as ``F.pad`` takes them.
    """

    first: Shape
    extents: Shape
    outputs: Box
    result: Shape
    before: Shape
    behind: Shape

    @classmethod
    def of(cls, sliding: PoolSliding, window: Box, inside: Box, computed: Box, extents: Shape) -> Cells:
        """For a window, that part of it which is inside the tensor, and what is computed; boxes with all dims.

        Padding by torch's operator is no cell: where nothing in a window exceeds minus infinity, a cell is chosen. With
        what is behind there are at least as many cells as the kernel spans: torch's 3-d average refuses fewer, and of a
        window that falls between the cells (of a dilation larger than the tensor) its maximum chooses a place behind.
        """
        first, result = tuple(start for start, _ in inside[2:]), shape(computed)
        if 0 in result:
            return cls(first, extents, computed[2:], result, (0,) * len(extents), ())
        before = tuple(place - start for (start, _), place in zip(window[2:], first, strict=True))
        behind = [
            max(stop - last - width, least - (last - start), 0)
            for (_, stop), (start, last), width, least in zip(
                window[2:], inside[2:], before, sliding.spans, strict=True
            )
        ]
        flat = tuple(number for width in reversed(behind) for number in (0, width))
        return cls(first, extents, computed[2:], result, before, flat if any(flat) else ())


@dataclass(frozen=True)
class Maximum:
    """The largest cell of each window.

    Attributes:
        indices: whether to return also where it stands: its number in the flattened global space.
    """

    indices: bool = False

    def check(self, name: str, sliding: PoolSliding) -> None:
        """Check the options.

        Raises: ValueError that names the layer.
        """

    def sample(self, x: torch.Tensor, sliding: PoolSliding) -> torch.Tensor:
        """torch's operator, on a tensor of one window."""
        y: torch.Tensor = self._pool(x, sliding, (0,) * len(sliding.kernel), False)
        return y

    def over(self, sliding: PoolSliding, cells: Cells, result: torch.dtype | None) -> Reduce:
        """How a worker reduces its cells."""

        def largest(x: torch.Tensor) -> Any:
            x = lowest(x, cells.behind)
            known = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # torch has no autocast for meta tensors
            if known and not self.indices:  # torch's function then chooses the dtype
                return cut(self._pool(x, sliding, cells.before, False), cells.result)
            y, numbers = largest_cells(
                x, lambda x: self._pool(x, sliding, cells.before, True), max(len(sliding.kernel), 2)
            )
            if not self.indices:
                return cut(y, cells.result)
            return cut(y, cells.result), in_space(cut(numbers, cells.result), x.shape[2:], cells.first, cells.extents)

        return largest

    def _pool(self, x: torch.Tensor, sliding: PoolSliding, padding: Shape, indices: bool) -> Any:
        kernel, stride, padding, dilation = planar(sliding.kernel, sliding.stride, padding, sliding.dilation)
        pool: Any = functional.max_pool2d if len(kernel) == 2 else functional.max_pool3d
        return pool(x, kernel, stride, padding, dilation, return_indices=indices)


def largest_cells(
    x: torch.Tensor, pool: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], space: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest cells of windows, and where they stand in the last dims, flattened: those of space.

    A backward of torch's own that is differentiated goes on to x, though it reads no number of it. Where a block is
    empty, nothing would, and a movement in front of it would wait for that worker.
    """
    y, places = _Largest.apply(x, pool, space)
    return y, places


class _Largest(Function):
    r"""The largest cells, of which it saves the places. (torch saves x, too.)

    Forward: :math:`y_o = x_{i(o)}`. Adjoint: :math:`\partial x_c = \sum_{o: i(o) = c} \partial y_o`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, pool: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], space: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, places = pool(x)
        ctx.shape, ctx.dim, ctx.channels_last = x.shape, x.dim() - space, is_channels_last(x)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.save_for_forward(places)
        return y, places

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        dx = empty(ctx.shape, dy.dtype, dy, ctx.channels_last).zero_()
        dx.flatten(ctx.dim).scatter_add_(ctx.dim, places.flatten(ctx.dim), dy.flatten(ctx.dim))
        return dx, None, None

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, *_: None) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        return dx.flatten(ctx.dim).gather(ctx.dim, places.flatten(ctx.dim)).view(places.shape), None


@dataclass(frozen=True)
class Average:
    """The mean of each window. Cells outside the tensor are zeros.

    Attributes:
        padded: whether cells of the padding count. What a window has beyond it (``ceil_mode``) never does.
        divisor: divides the sums, whatever counts; None for the count.
    """

    padded: bool = True
    divisor: int | None = None
    indices: ClassVar[bool] = False

    def check(self, name: str, sliding: PoolSliding) -> None:
        if self.divisor is not None and (not isinstance(self.divisor, int) or self.divisor == 0):
            raise ValueError(
                f"{name} needs divisor_override to be a whole number other than 0, or None; got {self.divisor!r}"
            )

    def sample(self, x: torch.Tensor, sliding: PoolSliding) -> torch.Tensor:
        return _average(x, sliding, (0,) * len(sliding.kernel), 1)

    def over(self, sliding: PoolSliding, cells: Cells, result: torch.dtype | None) -> Reduce:
        divisor = self._divisor(sliding, cells)

        def mean(x: torch.Tensor) -> torch.Tensor:
            x = functional.pad(x, cells.behind) if cells.behind else x
            if isinstance(divisor, int):
                return cut(_average(x, sliding, cells.before, divisor), cells.result)
            # where a tensor has half of float32's width, torch adds up and divides in float32, and rounds once
            wide = x.float() if x.dtype in HALVES else x
            sums = cut(_average(wide, sliding, cells.before, 1), cells.result)
            rounding = None if sums.dtype.is_floating_point else "trunc"
            means = torch.div(sums, divisor.on(sums.device), rounding_mode=rounding)
            return means if wide is x else means.to(result or x.dtype)

        return mean

    def _divisor(self, sliding: PoolSliding, cells: Cells) -> int | Constant:
        """What the sum of each output is divided by: one number where they are all alike."""
        if self.divisor is not None or 0 in cells.result:
            return self.divisor or 1
        counts = [
            sliding.counts(dim, cells.extents[dim], along, self.padded) for dim, along in enumerate(cells.outputs)
        ]
        if all(min(along) == max(along) for along in counts):
            return prod(along[0] for along in counts)
        lines = [torch.tensor(along, device="cpu") for along in counts]
        return Constant(torch.stack(torch.meshgrid(*lines, indexing="ij")).prod(dim=0))


@dataclass(frozen=True)
class Power:
    r"""The power mean times the size of the kernel, as torch has it: :math:`y = (k \cdot \text{mean}(x^p))^{1/p}`.

    Where p is infinite, y is the largest absolute value; where it is minus infinite, the smallest.

    Attributes:
        exponent: p.
    """

    exponent: float
    indices: ClassVar[bool] = False

    def check(self, name: str, sliding: PoolSliding) -> None:
        p = self.exponent
        if not isinstance(p, (int, float)) or isnan(p) or p == 0:
            raise ValueError(f"{name} needs norm_type to be a number other than 0; got {p!r}")

    def sample(self, x: torch.Tensor, sliding: PoolSliding) -> torch.Tensor:
        space = len(sliding.kernel)
        kernel = sliding.kernel if space > 1 else sliding.kernel[0]
        y: torch.Tensor = getattr(functional, f"lp_pool{space}d")(x, self.exponent, kernel)
        return y

    def over(self, sliding: PoolSliding, cells: Cells, result: torch.dtype | None) -> Reduce:
        mean, largest = Average().over(sliding, cells, result), Maximum().over(sliding, cells, result)
        size, sign = prod(sliding.kernel), 1 if self.exponent > 0 else -1

        def extreme(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = sign * largest(sign * x.abs())
            return y

        def power_mean(x: torch.Tensor) -> torch.Tensor:
            means = mean(x.pow(self.exponent))
            return (torch.sign(means) * functional.relu(torch.abs(means))).mul(size).pow(1.0 / self.exponent)

        return extreme if isinf(self.exponent) else power_mean


@dataclass(frozen=True)
class Pooling:
    """Pool over windows of space, each worker completing its block by the cells around it.

    Forward: sequentially the same as torch's function. Adjoint: the transpose, gradients of cells that several workers
    read adding up on the workers that own them.

    Attributes:
        reduction: what becomes of a window.
        sliding: its geometry.
        result: the dtype of y, where that is known to be another than that of x (under autocast).
    """

    reduction: Maximum | Average | Power
    sliding: PoolSliding
    result: torch.dtype | None = None

    @property
    def indices(self) -> bool:
        """Whether there are two results: cells, and where they stand."""
        return self.reduction.indices

    def check(self, name: str) -> None:
        """Check the options.

        Raises: ValueError that names the layer.
        """
        kernel, padding = self.sliding.kernel, self.sliding.padding
        if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
            raise ValueError(f"{name} needs padding of at most half the kernel; got {padding} and kernel {kernel}")
        self.reduction.check(name, self.sliding)

    @property
    def least(self) -> Shape:
        """Shape of the smallest tensor that torch's operator accepts."""
        return (1, 1, *self.sliding.spans)

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        """torch's operator, on a tensor of the least shape."""
        return self.reduction.sample(x, self.sliding)

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        (x,) = signatures
        owned, P, me = x.layout, x.layout.partition, site.me
        extents = owned.extents[2:]
        windows, outputs = self.sliding.windows(site.label.kind, extents, P.workers.shape[2:])
        inside = [
            [(max(start, 0), min(stop, extent)) for start, stop in along]
            for along, extent in zip(windows, extents, strict=True)
        ]
        needed = Layout.along(P, [*owned.intervals[:2], *inside])
        computed = Layout.along(P, [*owned.intervals[:2], *outputs])
        if needed.intervals == owned.intervals:
            fetch = site.identity(x.dtype, x.derivatives, x.local)
        else:
            plan = copy(owned, needed, me)
            fetch = site.operator(plan, x.dtype, x.derivatives, [x.local], keeps_format=True, lends=True)
        window = Layout.along(P, [*owned.intervals[:2], *windows]).box_of(me)
        cells = Cells.of(self.sliding, window, needed.box_of(me), computed.box_of(me), extents)
        reduce = self.reduction.over(self.sliding, cells, self.result)

        def pool(block: torch.Tensor) -> Any:
            block = block.to(x.dtype)
            if self.indices:
                return choose(reduce, cells.result, block, self.least)
            return local(reduce, cells.result, (block, self.least))

        return Setup(Together(fetch), pool, same, (computed,) * (1 + self.indices))


def choose(
    operator: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    result: Shape,
    x: torch.Tensor,
    least: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What an operator makes of this worker's block, and what it chooses; also where there is nothing to choose."""
    chosen = torch.zeros(result if 0 in result else (), dtype=torch.int64, device=x.device)

    def operate(block: torch.Tensor) -> torch.Tensor:
        nonlocal chosen
        y, places = operator(block)
        chosen = chosen if 0 in result else places
        return y

    return local(operate, result, (x, least)), chosen


def lowest(x: torch.Tensor, behind: Shape) -> torch.Tensor:
    """The cells, and behind them such as are never the largest."""
    if not behind:
        return x
    value = float("-inf") if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    return functional.pad(x, behind, value=value)


def cut(y: torch.Tensor, result: Shape) -> torch.Tensor:
    """The first outputs in space, in memory of their own; padding behind may have made more."""
    return y[(slice(None), slice(None), *(slice(extent) for extent in result[2:]))].clone() if y.shape != result else y


def in_space(indices: torch.Tensor, window: Sequence[int], first: Shape, extents: Shape) -> torch.Tensor:
    """Numbers of cells in flattened space, from their numbers in a flattened window of it.

    Args:
        window: its extents.
        first: where it begins.
        extents: those of all space.
    """
    found, step = torch.zeros_like(indices), 1
    for extent, start, whole in zip(reversed(window), reversed(first), reversed(extents), strict=True):
        found += (indices % extent + start) * step
        indices = indices // extent
        step *= whole
    return found


def planar(kernel: Shape, stride: Shape, padding: Shape, dilation: Shape = (1,)) -> tuple[Shape, Shape, Shape, Shape]:
    """The same geometry, in one dim as of a plane whose rows are pooled each by itself.

    So torch's operator takes ``(batch, channels, cells)`` as it is. (Its own in one dim returns a view of a plane.)
    """
    if len(kernel) > 1:
        return kernel, stride, padding, dilation
    return (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)


def _average(x: torch.Tensor, sliding: PoolSliding, padding: Shape, divisor: int) -> torch.Tensor:
    kernel, stride, padding, _ = planar(sliding.kernel, sliding.stride, padding)
    return average(x, SlidingMean(kernel, stride, padding, divisor))
