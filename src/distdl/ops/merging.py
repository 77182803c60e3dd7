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


class Measure(Function):
    """The entries of a block, over some dims: mean and M2, or the mean of the squares if there is no centre.

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
        return torch.stack([ctx.offset + centre, ctx.cells * (squares - ctx.offset.square()).clamp_min(0)])

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        again, shift = is_differentiated(), None
        factor = (2 * d[1] if ctx.centred else d[0] * (2 / ctx.cells)).to(x.dtype)
        if ctx.centred:
            offset = x.mean(ctx.dims, keepdim=True).double() if again else ctx.offset
            shift = (d[0] / ctx.cells - 2 * d[1] * offset).to(x.dtype)
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
        return torch.stack([along, ctx.cells * (squares - 2 * offset * along)])


class Merge(Function):
    r"""One state of several, the entries with their kinds in dim 1, by a balanced tree.

    With :math:`n_i` cells behind entry i, :math:`d\mu = \sum n_i / n\, d\mu_i` and
    :math:`dM_2 = \sum dM_{2,i} + 2 n_i (\mu_i - \mu)\, d\mu_i`.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(states)
        ctx.save_for_forward(states)
        n = torch.tensor(counts, dtype=torch.float64, device=states.device)
        ctx.counts = n.view(-1, *[1] * (states.dim() - 2))
        for share, weight in _levels(counts):
            states = _merge_halves(states, share.to(states.device), weight.to(states.device))
        return states[0].clone()

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, None]:
        share, pull = Merge._derivative(ctx)
        if pull is None:
            return (share * d[0])[:, None], None
        return torch.stack([share * d[0] + pull * d[1], d[1].expand_as(pull)], 1), None

    @staticmethod
    def jvp(ctx: Any, d: torch.Tensor, _: None) -> torch.Tensor:
        share, pull = Merge._derivative(ctx)
        mean = (share * d[:, 0]).sum(0)
        return mean[None] if pull is None else torch.stack([mean, (d[:, 1] + pull * d[:, 0]).sum(0)])

    @staticmethod
    def _derivative(ctx: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the mean by each mean, and of M2 by each mean."""
        (states,) = ctx.saved_tensors
        share = ctx.counts / ctx.counts.sum()
        if states.shape[1] == 1:
            return share, None
        means = states[:, 0]
        return share, 2 * ctx.counts * (means - (share * means).sum(0))


def _merge_halves(states: torch.Tensor, share: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Merge the first half of the entries with the second, one by one; an odd one is left over, at the end."""
    half, ones = len(share), [1] * (states.dim() - 2)
    a, b, odd = states.split([half, half, len(states) - 2 * half])
    delta = b[:, 0] - a[:, 0]
    merged = [a[:, 0] + delta * share.view(-1, *ones)]
    if states.shape[1] == 2:
        merged.append(a[:, 1] + b[:, 1] + delta.square() * weight.view(-1, *ones))
    both = torch.stack(merged, 1)
    return torch.cat([both, odd]) if len(odd) else both


@lru_cache(maxsize=256)
def _levels(counts: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each level of the tree, and each pair on it: n_b / n and n_a n_b / n."""
    levels = []
    with torch.inference_mode(False):  # autograd does not take what is made in that mode, and these are kept
        n = torch.tensor(counts, dtype=torch.float64, device="cpu")
        while len(n) > 1:
            half = len(n) // 2
            a, b, odd = n.split([half, half, len(n) - 2 * half])
            levels.append((b / (a + b), a * b / (a + b)))
            n = torch.cat([a + b, odd])
    return levels
