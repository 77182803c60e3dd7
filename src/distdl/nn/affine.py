"""What normalisations compute on a block, in few passes over it and in recycled memory.

*Rows* are tensors that broadcast to the block. Each function is differentiable in both modes and twice: where a
derivative is itself differentiated, it is computed by torch's operators, and otherwise in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from distdl.tensors.memory import empty, is_channels_last


def affine(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
    """``x * scale + shift``; scale and shift are rows of the dtype of x."""
    y: torch.Tensor = _Affine.apply(x, scale, shift)  # type: ignore[no-untyped-call]
    return y


def less(x: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
    """``x - constant``, the constant being rows of which no derivative is asked."""
    y: torch.Tensor = _Less.apply(x, constant)  # type: ignore[no-untyped-call]
    return y


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        ctx.save_for_forward(x, scale)
        ctx.shift = None if shift is None else shift.shape
        return combine(x, scale, shift)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        needs_x, needs_scale, needs_shift = ctx.needs_input_grad
        times = torch.mul if is_differentiated() else combine
        dx = times(dy, scale) if needs_x else None
        dscale = times(dy, x).sum_to_size(scale.shape) if needs_scale else None
        return dx, dscale, dy.sum_to_size(ctx.shift) if needs_shift else None

    @staticmethod
    def jvp(ctx: Any, dx: Any, dscale: Any, dshift: Any) -> torch.Tensor:
        x, scale = ctx.saved_tensors
        parts = [dx * scale if dx is not None else None, x * dscale if dscale is not None else None, dshift]
        y = torch.zeros_like(x)
        return sum((part for part in parts if part is not None), y)


class _Less(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
        return torch.sub(x, constant, out=_like(x))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, _: None) -> torch.Tensor:
        return dx.clone()


def combine(x: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
    """``x * factor + shift``, of which no derivative is asked."""
    y = torch.mul(x, factor, out=_like(x))
    return y if shift is None else y.add_(shift)  # (torch.addcmul takes twice as long where rows broadcast)


def _like(x: torch.Tensor) -> torch.Tensor:
    return empty(x.shape, x.dtype, x, is_channels_last(x))


def is_differentiated() -> bool:
    """Whether derivatives are computed of what is computed now."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0
