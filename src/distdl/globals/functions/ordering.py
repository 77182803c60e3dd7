"""Elements of a global tensor in order along a dim, which is whole: sorting, and statistics of order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import ceil
from typing import Any

import torch

from distdl.globals.context import KnownLayout
from distdl.globals.fallback import fall_back
from distdl.globals.functions.extremes import Instead
from distdl.globals.functions.indexing import part
from distdl.globals.functions.judging import frozen
from distdl.globals.functions.reductions import dims_of, reduced_layout, without_dims
from distdl.globals.functions.scans import wrapped
from distdl.globals.functions.shapes import reshaped, whole_along
from distdl.globals.functions.spreading import pencils
from distdl.globals.operands import aligned, block_of, moved
from distdl.globals.table import handles
from distdl.globals.tensor import GlobalTensor
from distdl.partition.sharing import gather_values, reduce_values
from distdl.tensors.connection import local, refuses, zeros_on


@handles("sort argsort topk msort", "torch Tensor")
def sort(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cells in order along a dim, which is whole."""
    x, rest = (args[0], args[1:]) if args else (kwargs["input"], ())
    kwargs = {name: value for name, value in kwargs.items() if name != "input"}
    if not x.dim():
        return fall_back(func, args, kwargs)

    def describe() -> tuple[int, int, Any]:
        name = func.__name__
        y = func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *rest, **kwargs)
        at = 1 if name == "topk" else 0
        dim = 0 if name == "msort" else kwargs.get("dim", next((n for n in rest[at:] if type(n) is int), -1))
        first = y if isinstance(y, torch.Tensor) else y[0]
        return dim % x.dim(), first.shape[dim], None if isinstance(y, torch.Tensor) else type(y)

    key = ("sort", func, x.shape, x.dtype, frozen(rest), frozen(kwargs))
    dim, count, kind = x._context.keep(key, describe)
    z: GlobalTensor = whole_along(x, [dim], func.__name__)
    layout, context = z._layout, z._context

    def make() -> KnownLayout:
        intervals = list(layout.intervals)
        intervals[dim] = ((0, count),)
        return context.layout(layout.partition.workers, intervals)

    target = context.keep(("sorted", layout, dim, count), make)
    block = block_of(z)
    refuses(lambda one: func(one, *rest, **kwargs), block, [x.shape[dim] if at == dim else 1 for at in range(x.dim())])
    found: Any
    if not block.numel():
        values, cells = zeros_on(block, target.local), block.new_zeros(target.local, dtype=torch.int64)
        found = (values, cells) if kind is not None else cells if func.__name__ == "argsort" else values
    else:
        found = func(block, *rest, **kwargs)
    if kind is None:
        return GlobalTensor._of(found, target)
    return kind(GlobalTensor._of(one, target) for one in found)


@handles("median nanmedian mode kthvalue quantile nanquantile", "torch Tensor")
def order_statistic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along one dim, which is made whole, or of all elements, which stay where they are."""
    name = func.__name__
    first = 2 if name in ("kthvalue", "quantile", "nanquantile") else 1  # the place of dim among the arguments
    x = args[0]
    default = None if name in ("median", "nanmedian", "quantile", "nanquantile") else -1
    dim = args[first] if len(args) > first else kwargs.get("dim", default)
    level = args[1] if first == 2 and len(args) > 1 else kwargs.get("q")
    if type(level) is torch.Tensor and type(x) is GlobalTensor and dim is not None:
        if level.requires_grad or not level.numel():
            return fall_back(func, args, kwargs)
        func(torch.zeros(1, dtype=x.dtype), _levels(level))  # (for torch's error)
        named = {key: value for key, value in kwargs.items() if key != "q"}
        found = [func(x, one, *args[2:], **named) for one in _levels(level).reshape(-1).tolist()]
        return torch.stack(found) if level.dim() else found[0]
    if type(x) is GlobalTensor and dim is None and default is None and x.numel():
        if name.endswith("quantile"):
            return _quantile(func, *args, **kwargs)
        func(torch.zeros(1, dtype=x.dtype))  # (for torch's error)
        missing, known = _missing(x), x.detach()
        last = x.numel() - 1 if name == "median" else max(x.numel() - missing, 1) - 1
        return _shared(x, _at_rank(known, last if missing and name == "median" else last // 2))
    if type(x) is not GlobalTensor or dim is None or not x.dim() or isinstance(level, torch.Tensor):
        return fall_back(func, args, kwargs)
    if name.endswith("quantile") and not x.numel():
        raise RuntimeError(f"{name}() input tensor must be non-empty")
    dims = dims_of(x, dim)
    layout = pencils(x._layout, dims)
    keepdim = bool(kwargs.get("keepdim", args[first + 1] if len(args) > first + 1 else False))
    options = {key: value for key, value in kwargs.items() if key not in ("dim", "keepdim", "k", "q")}
    leading = [*args[1:first], *(kwargs[key] for key in ("k", "q") if key in kwargs)]

    def over(block: torch.Tensor) -> Any:
        return func(block, *leading, dim=dims[0], keepdim=True, **options)

    block, target = moved(x, layout, name), reduced_layout(layout, dims)
    if block.numel():
        y = over(block)
    else:
        least = [1] * x.dim()
        least[dims[0]] = x.shape[dims[0]]
        least_shape = tuple(least)
        probe = over(block.detach().new_zeros(least_shape))
        if isinstance(probe, torch.Tensor):
            y = local(over, target.local, (block, least_shape))
        else:
            values = local(lambda one: over(one)[0], target.local, (block, least_shape))
            y = type(probe)((values, torch.zeros(target.local, dtype=torch.int64, device=block.device)))
    found = wrapped(y, target)
    if keepdim:
        return found
    if isinstance(found, GlobalTensor):
        return without_dims(found, dims)
    return type(found)(tuple(without_dims(one, dims) for one in found))


def _levels(level: torch.Tensor) -> torch.Tensor:
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
    return GlobalTensor._of(Instead.apply(block, other), target)


def _quantile(
    func: Any, input: Any, q: Any, dim: None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Any:
    """Between the two elements at the places around a part of the way through all of them."""
    if type(q) is GlobalTensor or (isinstance(q, torch.Tensor) and (q.requires_grad or not q.numel())):
        return fall_back(func, (input, q), {"keepdim": keepdim, "interpolation": interpolation})
    q = _levels(q) if isinstance(q, torch.Tensor) else q
    func(torch.zeros(1, dtype=input.dtype), q, interpolation=interpolation)  # (for torch's error)
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
