"""Median and quantiles of all elements of a global tensor. The tensor is not gathered: workers count elements."""

from __future__ import annotations

from functools import cache, partial
from math import ceil
from typing import Any

import torch

from distdl.globals.functions.extremes import ValueOf
from distdl.globals.functions.shapes import reshaped
from distdl.globals.functions.slicing import part
from distdl.globals.moving.alignment import aligned
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.partition.sharing import gather_values, reduce_values


def levels_of(level: torch.Tensor) -> torch.Tensor:
    """The levels of quantiles on the CPU; zeros in a rehearsal, where tensors have no values."""
    return torch.zeros(level.shape, dtype=level.dtype) if level.is_meta else level.detach().cpu()


def _count_nan(x: Any) -> int:
    """How many elements are nan, which come last in order. Collective."""
    return 0 if x._context.comm.imagined or not x.is_floating_point() else int(x.detach().isnan().sum())


def _element_of_rank(x: Any, rank: int) -> GlobalTensor:
    """Return the element that has this rank among all elements in order, as a global tensor without dims. Collective.

    This is a radix select: each element has an integer key, and the search fixes one byte of the key of the wanted
    element after the other. For each byte the workers add up histograms of their elements that still match. When few
    elements are left, all workers gather them.
    """
    flat = reshaped(x, (x.numel(),))
    layout, context, call = flat._layout, flat._context, "the elements in order"
    if context.comm.imagined:
        return part(flat, [rank])
    keys = _order_keys(block_of(flat).detach())
    indices = torch.arange(len(keys), device=keys.device) + layout.box[0][0]
    left, shift = x.numel(), 56
    while left > _FEW and shift >= 0:
        digits = (keys >> shift) & 255
        counts = reduce_values(context.comm, context.everyone, call, torch.bincount(digits, minlength=256).cpu(), "sum")
        ends = counts.cumsum(0)
        digit = int(torch.searchsorted(ends, rank, right=True))
        left, shift = int(counts[digit]), shift - 8
        rank -= int(ends[digit]) - left
        matches = digits == digit
        keys, indices = keys[matches], indices[matches]
    if left > _FEW:  # all that are left are equal
        keys, indices, rank = keys[:1], indices[:1], 0
    gathered = gather_values(context.comm, context.everyone, call, (keys.cpu(), indices.cpu()))
    keys, indices = (torch.cat(one) for one in zip(*gathered, strict=True))
    return part(flat, [int(indices[(keys ^ _SIGN).argsort()[rank]])])


def _order_keys(x: torch.Tensor) -> torch.Tensor:
    """Integers whose unsigned bytes sort as the elements do; nan comes last, and both zeros are equal."""
    if not x.is_floating_point():
        return x.long() ^ _SIGN
    bits = (x.double() + 0.0).masked_fill(x.isnan(), torch.nan).view(torch.int64)
    return torch.where(bits < 0, ~bits, bits ^ _SIGN)


_SIGN, _FEW = -(2**63), 1000


def _with_shared_gradient(x: GlobalTensor, value: Any) -> GlobalTensor:
    """A value of x whose gradient goes, in equal shares, to all elements of x that equal it."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return GlobalTensor._of(block_of(value).clone(), value._layout)
    known: Any = x.detach()
    ties = (known == value) | (known.isnan() & value.isnan())
    y: Any = (x * (ties.to(x.dtype) / ties.sum())).sum()
    target, (block, other) = aligned(x._context, (y, value), 0, "median")
    return GlobalTensor._of(ValueOf.apply(block, other), target)


def median(func: Any, x: GlobalTensor) -> GlobalTensor:
    """The lower median of all elements; ``nanmedian`` leaves out those that are nan. Collective."""
    func(torch.zeros(1, dtype=x.dtype))  # raises torch's error
    nans = _count_nan(x)
    if func.__name__ == "median":
        rank = x.numel() - 1 if nans else (x.numel() - 1) // 2
    else:
        rank = (max(x.numel() - nans, 1) - 1) // 2
    known: Any = x.detach()
    return _with_shared_gradient(x, _element_of_rank(known, rank))


def quantile(func: Any, input: Any, q: Any, keepdim: bool, interpolation: str) -> Any:
    """Quantiles of all elements, each interpolated between its two neighbours in order. Collective.

    Args:
        q: levels between 0 and 1: a number, or a tensor that is the same on every worker.
        keepdim: whether the result has a dim of extent 1 for each dim of the input, behind those of q.
    """
    q = levels_of(q) if isinstance(q, torch.Tensor) else q
    wide = func(torch.zeros(1, dtype=input.dtype), q, interpolation=interpolation).dtype  # may raise torch's error
    input = input.to(wide)  # as autocast casts
    exact = input.dtype if input.numel() < 2**24 else torch.float64  # ranks have to be exact
    levels, nans, last = torch.as_tensor(q, dtype=exact), _count_nan(input), input.numel() - 1
    if func.__name__ == "nanquantile":
        ranks = (levels * (last - nans)).clamp_min(0)
    else:
        ranks = torch.full_like(levels, last) if nans else levels * last
    rounded = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}.get(interpolation)
    found, element = [], cache(partial(_element_of_rank, input))
    for rank in (ranks if rounded is None else rounded(ranks)).reshape(-1).tolist():
        value: Any = element(int(rank))
        if rounded is None:
            value = value.lerp(element(ceil(rank)), rank - int(rank) if interpolation == "linear" else 0.5)
        found.append(value)
    y = torch.stack(found) if levels.dim() else found[0].clone()  # the element may be a view of the input
    return y.reshape(*levels.shape, *[1] * input.dim()) if keepdim else y
