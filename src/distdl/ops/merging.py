"""The two steps of moments, with their derivatives in closed form: measuring a block, and merging what was measured.

Where derivatives are themselves differentiated, torch's operators compute them.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch

from distdl.ops.affine import combine, is_differentiated
from distdl.tensors.function import Function
from distdl.tensors.modes import unobserved


class Measure(Function):
    """The entries of a block, over some dims: mean and variance, or the mean of the squares if there is no centre.

    Args:
        x: the cells, less the centre.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, centre: torch.Tensor | None, dims: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        ctx.centred, ctx.dims, ctx.cells = centre is not None, dims, prod(x.shape[dim] for dim in dims)
        squares = combine(x, x).mean(dims, keepdim=True).double()
        if centre is None:
            return squares[None]
        ctx.offset = x.mean(dims, keepdim=True).double()
        return torch.stack([ctx.offset + centre, (squares - ctx.offset.square()).clamp_min_(0)])

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        again, shift = is_differentiated(), None
        factor = (d[-1] * (2 / ctx.cells)).to(x.dtype)
        if ctx.centred:
            offset = x.mean(ctx.dims, keepdim=True).double() if again else ctx.offset
            shift = ((d[0] - 2 * d[1] * offset) / ctx.cells).to(x.dtype)
        if again:
            return x * factor if shift is None else x * factor + shift, None, None
        return combine(x, factor, shift), None, None

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, *_: None) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        squares: torch.Tensor = 2 * (x * dx).mean(ctx.dims, keepdim=True).double()
        if not ctx.centred:
            return squares[None]
        offset, along = (one.mean(ctx.dims, keepdim=True).double() for one in (x, dx))
        return torch.stack([along, squares - 2 * offset * along])


class Merge(Function):
    r"""One state of several, the entries with their kinds in dim 1, by a balanced tree.

    With a share :math:`s_i` of the cells behind entry i, :math:`d\mu = \sum s_i\, d\mu_i` and
    :math:`dv = \sum s_i (dv_i + 2 (\mu_i - \mu)\, d\mu_i)`.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(states)
        ctx.save_for_forward(states)
        n = torch.tensor(counts, dtype=torch.float64, device=states.device)
        ctx.share = (n / n.sum()).view(-1, *[1] * (states.dim() - 2))
        return merged(states, counts).clone()

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, None]:
        share, pull = Merge._derivative(ctx)
        if pull is None:
            return (share * d[0])[:, None], None
        return torch.stack([share * d[0] + pull * d[1], share * d[1]], 1), None

    @staticmethod
    def jvp(ctx: Any, d: torch.Tensor, _: None) -> torch.Tensor:
        share, pull = Merge._derivative(ctx)
        mean = (share * d[:, 0]).sum(0)
        return mean[None] if pull is None else torch.stack([mean, (share * d[:, 1] + pull * d[:, 0]).sum(0)])

    @staticmethod
    def _derivative(ctx: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the mean by each mean, and of the variance by each mean."""
        (states,) = ctx.saved_tensors
        if states.shape[1] == 1:
            return ctx.share, None
        means = states[:, 0]
        return ctx.share, 2 * ctx.share * (means - (ctx.share * means).sum(0))


def merged(states: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """The state of several entries, with their kinds in dim 1; no derivative is asked of it.

    By plain sums and products alone, so that a mean has the same bits wherever it stands in a tensor; and without a
    difference of squares or variances, which would be nan of two that overflow.
    """
    for keep, share, weight in _levels(counts, states.dim(), states.device):
        half, odd = share.shape[0], states.shape[0] % 2
        a, b = states[:half], states[half : 2 * half]
        found = (a * keep).add_(b * share)
        if states.shape[1] == 2:
            delta = b[:, :1] - a[:, :1]
            found[:, 1:].add_((delta * delta).mul_(weight))
        states = torch.cat([found, states[-1:]]) if odd else found
    return states[0]


@lru_cache(maxsize=256)
def _levels(counts: tuple[int, ...], dims: int, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """For each level of the tree, and each pair on it, the shares of both in the cells, and their product.

    Args:
        dims: how many dims they get; pairs are the first.
    """
    levels, ones = [], [1] * (dims - 1)
    with (
        torch.inference_mode(False),
        unobserved(),
    ):  # autograd does not take what is made in that mode, and these are kept
        n = torch.tensor(counts, dtype=torch.float64, device="cpu")
        while len(n) > 1:
            half = len(n) // 2
            a, b, odd = n.split([half, half, len(n) - 2 * half])
            keep, share = a / (a + b), b / (a + b)
            levels.append(tuple(one.view(-1, *ones).to(device) for one in (keep, share, keep * share)))
            n = torch.cat([a + b, odd])
    return levels
