"""What normalisations compute on a block, in few passes over it and in recycled memory.

*Rows* are tensors that broadcast to the block. Each function is differentiable in both modes and twice: where a
derivative is itself differentiated, it is computed by torch's operators, and otherwise in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from distdl.tensors.function import Function
from distdl.tensors.memory import empty, is_channels_last


def affine(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None, shape: Sequence[int] | None = None
) -> torch.Tensor:
    """``x * scale + shift``; scale and shift are rows of the dtype of x.

    Args:
        shape: of the result, which is contiguous then; that of x if not given. It is no view of anything, as it would
            be after a reshape.
    """
    given = None if shape is None or tuple(shape) == tuple(x.shape) else tuple(shape)
    y: torch.Tensor = _Affine.apply(x, scale, shift, given)
    return y


def less(x: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
    """``x - constant``, the constant being rows of which no derivative is asked."""
    y: torch.Tensor = _Less.apply(x, constant)
    return y


class _Affine(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, shape: tuple[int, ...] | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        ctx.save_for_forward(x, scale)
        ctx.shift, ctx.shape = None if shift is None else shift.shape, shape
        if shape is None:
            return combine(x, scale, shift)
        y = empty(shape, x.dtype, x)
        combine(x, scale, shift, y.view(x.shape))
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        dy = dy if ctx.shape is None else dy.reshape(x.shape)
        needs_x, needs_scale, needs_shift, _ = ctx.needs_input_grad
        times = torch.mul if is_differentiated() else combine
        dx = times(dy, scale) if needs_x else None
        dscale = times(dy, x).sum_to_size(scale.shape) if needs_scale else None
        return dx, dscale, dy.sum_to_size(ctx.shift) if needs_shift else None, None

    @staticmethod
    def jvp(ctx: Any, dx: Any, dscale: Any, dshift: Any, _: None) -> torch.Tensor:
        x, scale = ctx.saved_tensors
        parts = [dx * scale if dx is not None else None, x * dscale if dscale is not None else None, dshift]
        dy = sum((part for part in parts if part is not None), torch.zeros_like(x))
        return dy if ctx.shape is None else dy.reshape(ctx.shape)


class _Less(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
        return torch.sub(x, constant, out=_like(x))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, _: None) -> torch.Tensor:
        return dx.clone()


def combine(
    x: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x * factor + shift``, of which no derivative is asked; in a tensor of the shape of x, if one is given."""
    y = torch.mul(x, factor, out=_like(x) if out is None else out)
    return y if shift is None else y.add_(shift)  # torch.addcmul takes twice as long where rows broadcast


def _like(x: torch.Tensor) -> torch.Tensor:
    return empty(x.shape, x.dtype, x, is_channels_last(x))


def is_differentiated() -> bool:
    """Whether derivatives are computed of what is computed now."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0
