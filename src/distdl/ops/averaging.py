"""Averages of the cells of windows, by torch's operators, of which nothing is saved for backward.

An average is linear: its adjoint needs the gradient of the result, and of the cells nothing but their shape. torch
saves the cells themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from distdl.geometry.boxes import Shape
from distdl.ops.affine import is_differentiated
from distdl.ops.keeping import WORTH
from distdl.tensors.function import Function
from distdl.tensors.memory import empty, is_channels_last

_ATEN: Any = torch.ops.aten


class SlidingMean(NamedTuple):
    r"""Sums of windows that slide, over a divisor.

    Forward: :math:`y_o = \frac{1}{d} \sum_{c \in o} x_c`. Adjoint: :math:`\partial x_c = \frac{1}{d} \sum_{o \ni c}
    \partial y_o`.

    Attributes:
        kernel, stride, padding: in two or three dims of space.
    """

    kernel: Shape
    stride: Shape
    padding: Shape
    divisor: int

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        pool = functional.avg_pool2d if len(self.kernel) == 2 else functional.avg_pool3d
        return pool(x, self.kernel, self.stride, self.padding, divisor_override=self.divisor)

    def spread(self, dy: torch.Tensor, dx: torch.Tensor) -> None:
        """Write the adjoint of dy into dx."""
        adjoint = _ATEN.avg_pool2d_backward if len(self.kernel) == 2 else _ATEN.avg_pool3d_backward
        # the second argument stands for the input, which is not read, so no memory is allocated for it
        adjoint.grad_input(dy, dx, self.kernel, self.stride, self.padding, False, True, self.divisor, grad_input=dx)


class AdaptiveMean(NamedTuple):
    """The means of so many windows of about equal length.

    Attributes:
        outputs: how many, in two or three dims of space.
    """

    outputs: Shape

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        pool: Any = functional.adaptive_avg_pool2d if len(self.outputs) == 2 else functional.adaptive_avg_pool3d
        y: torch.Tensor = pool(x, self.outputs)
        return y

    def spread(self, dy: torch.Tensor, dx: torch.Tensor) -> None:
        """Write the adjoint of dy into dx."""
        if len(self.outputs) == 2:
            _ATEN._adaptive_avg_pool2d_backward.out(dy, dx, out=dx)
        else:
            _ATEN.adaptive_avg_pool3d_backward.grad_input(dy, dx, grad_input=dx)


def average(x: torch.Tensor, how: SlidingMean | AdaptiveMean) -> torch.Tensor:
    """The averages of the cells of a block. They are no view."""
    if x.is_cuda and x.dim() == 4 and isinstance(how, SlidingMean) and any(how.padding) and is_channels_last(x):
        # for such blocks, the gradient of CUDA's kernel is wrong: seen in torch 2.11
        return average(x.contiguous(), how).contiguous(memory_format=torch.channels_last)
    if x.nbytes < WORTH and isinstance(how, SlidingMean):
        # not for adaptive means: torch connects their second derivatives to x, but not those of empty blocks
        return how.pool(x)
    y: torch.Tensor = _Average.apply(x, how)
    return y


class _Average(Function):
    """An average, and its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: SlidingMean | AdaptiveMean) -> torch.Tensor:
        ctx.how, ctx.shape, ctx.dtype = how, x.shape, x.dtype
        # torch's kernels in 3-d write contiguous tensors
        ctx.channels_last = x.dim() == 4 and is_channels_last(x)
        return how.pool(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        spread: Callable[..., torch.Tensor] = _Spread.apply if is_differentiated() else _spread
        return spread(dy, ctx.how, ctx.shape, ctx.channels_last).to(ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, _: None) -> torch.Tensor:
        return ctx.how.pool(dx)  # type: ignore[no-any-return]  # ctx is untyped


def _spread(
    dy: torch.Tensor, how: SlidingMean | AdaptiveMean, shape: Sequence[int], channels_last: bool
) -> torch.Tensor:
    dx = empty(shape, dy.dtype, dy, channels_last)
    if not dx.is_meta:  # torch has not all of these operators for meta tensors
        how.spread(dy, dx)
    return dx


class _Spread(Function):
    """The adjoint, and of that the adjoint."""

    @staticmethod
    def forward(
        ctx: Any, dy: torch.Tensor, how: SlidingMean | AdaptiveMean, shape: Sequence[int], channels_last: bool
    ) -> torch.Tensor:
        ctx.how, ctx.shape, ctx.channels_last = how, shape, channels_last
        return _spread(dy, how, shape, channels_last)

    @staticmethod
    def backward(ctx: Any, ddx: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return average(ddx, ctx.how), None, None, None

    @staticmethod
    def jvp(ctx: Any, ddy: torch.Tensor, *_: None) -> torch.Tensor:
        spread: torch.Tensor = _Spread.apply(ddy, ctx.how, ctx.shape, ctx.channels_last)
        return spread
