"""Ranks: of all elements of a global tensor in order, those at some places. They are counted where they are."""

from __future__ import annotations

from functools import cache, partial
from math import ceil
from typing import Any

import torch

from distdl.globals.functions.extremes import ValueOf
from distdl.globals.functions.shapes import reshaped
from distdl.globals.functions.slicing import part
from distdl.globals.moving.alignment import aligned
from distdl.globals.rules.fallback import fall_back
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.partition.sharing import gather_values, reduce_values


def levels_of(level: torch.Tensor) -> torch.Tensor:
    """Parts of the way through all elements. Without memory, as in a rehearsal, they are somewhere."""
    return torch.zeros(level.shape, dtype=level.dtype) if level.is_meta else level.detach().cpu()


def _missing(x: Any) -> int:
    """How many elements are nan. They are the last in order."""
    return 0 if x._context.comm.imagined or not x.is_floating_point() else int(x.detach().isnan().sum())


def _at_rank(x: Any, rank: int) -> GlobalTensor:
    """Of all elements in order, the one at a place.

    It is found by the digits of its key, the highest first: of each digit, the workers count those of their elements
    whose keys begin as its key does. When few are left, these come to all workers.
    """
    flat = reshaped(x, (x.numel(),))
    layout, context, call = flat._layout, flat._context, "the elements in order"
    if context.comm.imagined:
        return part(flat, [rank])
    keys = _keys(block_of(flat).detach())
    places = torch.arange(len(keys), device=keys.device) + layout.box[0][0]
    left, shift = x.numel(), 56
    while left > _FEW and shift >= 0:
        digits = (keys >> shift) & 255
        counts = reduce_values(context.comm, context.everyone, call, torch.bincount(digits, minlength=256).cpu(), "sum")
        ends = counts.cumsum(0)
        digit = int(torch.searchsorted(ends, rank, right=True))
        left, shift = int(counts[digit]), shift - 8
        rank -= int(ends[digit]) - left
        chosen = digits == digit
        keys, places = keys[chosen], places[chosen]
    if left > _FEW:  # (all that are left are equal)
        keys, places, rank = keys[:1], places[:1], 0
    told = gather_values(context.comm, context.everyone, call, (keys.cpu(), places.cpu()))
    keys, places = (torch.cat(one) for one in zip(*told, strict=True))
    return part(flat, [int(places[(keys ^ _SIGN).argsort()[rank]])])


def _keys(x: torch.Tensor) -> torch.Tensor:
    """Integers whose digits have the order of elements; nan are the last, and both zeros are equal."""
    if not x.is_floating_point():
        return x.long() ^ _SIGN
    bits = (x.double() + 0.0).masked_fill(x.isnan(), torch.nan).view(torch.int64)
    return torch.where(bits < 0, ~bits, bits ^ _SIGN)


_SIGN, _FEW = -(2**63), 1000


def _shared(x: GlobalTensor, value: Any) -> GlobalTensor:
    """A value whose gradient goes to all elements that are equal to it, in equal shares."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return GlobalTensor._of(block_of(value).clone(), value._layout)
    known: Any = x.detach()
    ties = (known == value) | (known.isnan() & value.isnan())
    y: Any = (x * (ties.to(x.dtype) / ties.sum())).sum()
    target, (block, other) = aligned(x._context, (y, value), 0, "median")
    return GlobalTensor._of(ValueOf.apply(block, other), target)


def median(func: Any, x: GlobalTensor) -> GlobalTensor:
    """The lower one of the elements in the middle; of ``nanmedian``, of those that are not nan."""
    func(torch.zeros(1, dtype=x.dtype))  # (for torch's error)
    missing = _missing(x)
    if func.__name__ == "median":
        rank = x.numel() - 1 if missing else (x.numel() - 1) // 2
    else:
        rank = (max(x.numel() - missing, 1) - 1) // 2
    known: Any = x.detach()
    return _shared(x, _at_rank(known, rank))


def quantile(
    func: Any, input: Any, q: Any, dim: None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Any:
    """Between the two elements at the places around a part of the way through all of them."""
    if type(q) is GlobalTensor or (isinstance(q, torch.Tensor) and (q.requires_grad or not q.numel())):
        return fall_back(func, (input, q), {"keepdim": keepdim, "interpolation": interpolation})
    q = levels_of(q) if isinstance(q, torch.Tensor) else q
    wide = func(torch.zeros(1, dtype=input.dtype), q, interpolation=interpolation).dtype  # (or torch's error)
    input = input.to(wide)  # (as autocast casts)
    exact = input.dtype if input.numel() < 2**24 else torch.float64  # (of places; torch takes no more elements)
    levels, missing, last = torch.as_tensor(q, dtype=exact), _missing(input), input.numel() - 1
    if func.__name__ == "nanquantile":
        ranks = (levels * (last - missing)).clamp_min(0)
    else:
        ranks = torch.full_like(levels, last) if missing else levels * last
    rounded = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}.get(interpolation)
    found, at_rank = [], cache(partial(_at_rank, input))
    for rank in (ranks if rounded is None else rounded(ranks)).reshape(-1).tolist():
        value: Any = at_rank(int(rank))
        if rounded is None:
            value = value.lerp(at_rank(ceil(rank)), rank - int(rank) if interpolation == "linear" else 0.5)
        found.append(value)
    y = torch.stack(found) if levels.dim() else found[0].clone()  # (which may be a view of the element)
    return y.reshape(*levels.shape, *[1] * input.dim()) if keepdim else y
