"""For losses of one's own: a loss of zero volume as a number."""

from __future__ import annotations

from typing import Any

import torch

from distdl.tensors.connection import zeros_on


class ZeroVolumeCorrectorFunction(torch.autograd.Function):
    r"""Make a number of a loss of zero volume, such that ``backward()`` may be called on it on every worker.

    Forward: a tensor with elements is copied; one without becomes a 0-d tensor of value 0. Adjoint: the gradient is
    copied; where there were no elements it becomes zeros of zero volume, in the shape of the input.

    A published name, for losses of one's own: the losses here have it built in. Called by ``apply(loss)``.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"ZeroVolumeCorrectorFunction.apply needs a loss, a tensor; got {x!r}")
        ctx.shape = x.shape
        return x.clone() if x.numel() else x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy.clone() if 0 not in ctx.shape else zeros_on(dy, ctx.shape)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.clone() if 0 not in ctx.shape else tangent.new_zeros(())
