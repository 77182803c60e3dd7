"""Sorting and order statistics of a global tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.globals.functions.order_statistics import levels_of, median, quantile
from distdl.globals.functions.reductions import dims_of, without_dims
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import check_once
from distdl.globals.rules.whole_dims import along_whole
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import map_tensors
from distdl.globals.tensor.table import by_name, handles


@handles("sort argsort topk msort", "torch Tensor")
def sort(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sort along one dim, which becomes whole, or take its largest elements."""
    x, *rest = args
    if not x.dim():
        return fall_back(func, args, kwargs)
    check_once(func, args, kwargs)
    behind = rest[1:] if func.__name__ == "topk" else rest  # the dim among flags, without the k of topk
    dim = 0 if func.__name__ == "msort" else kwargs.get("dim", next((n for n in behind if type(n) is int), -1))
    return along_whole(lambda block: func(block, *rest, **kwargs), x, [dim % x.dim()], func.__name__)


@handles("median nanmedian mode", "torch Tensor")
@by_name
def median_or_mode(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Along one dim, which becomes whole; or the median of all elements, which are not gathered."""
    if dim is not None or func.__name__ == "mode":
        return _along_dim(func, input, (), -1 if dim is None else dim, keepdim)
    return median(func, input) if input.numel() else NotImplemented


@handles("kthvalue", "torch Tensor")
@by_name
def kth_value(func: Any, input: Any, k: Any, dim: Any = -1, keepdim: bool = False) -> Any:
    """Along one dim, which becomes whole."""
    return _along_dim(func, input, (k,), dim, keepdim)


@handles("quantile nanquantile", "torch Tensor")
@by_name
def quantiles(
    func: Any, input: Any, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Any:
    """Along one dim, which becomes whole, one level after the other; or of all elements, which are not gathered.

    Levels that are a global tensor, require a gradient or have no elements fall back.
    """
    known = not isinstance(q, torch.Tensor) or not (type(q) is GlobalTensor or q.requires_grad or not q.numel())
    if type(input) is not GlobalTensor or not known or not (input.dim() if dim is not None else input.numel()):
        return NotImplemented
    if dim is None:
        return quantile(func, input, q, keepdim, interpolation)
    if isinstance(q, torch.Tensor):
        levels = levels_of(q)
        func(torch.zeros(1, dtype=input.dtype), levels)  # raises torch's error
        found = [func(input, one, dim, keepdim, interpolation=interpolation) for one in levels.reshape(-1).tolist()]
        return torch.stack(found) if q.dim() else found[0]
    if not input.numel():
        raise RuntimeError(f"{func.__name__}() input tensor must be non-empty")
    return _along_dim(func, input, (q,), dim, keepdim, interpolation=interpolation)


def _along_dim(func: Any, x: Any, level: tuple[Any, ...], dim: Any, keepdim: bool, **options: Any) -> Any:
    """Apply an order statistic along one dim, which becomes whole; NotImplemented for a tensor without dims."""
    if type(x) is not GlobalTensor or not x.dim():
        return NotImplemented
    dims = dims_of(x, dim)
    y = along_whole(lambda block: func(block, *level, dim=dims[0], keepdim=True, **options), x, dims, func.__name__)

    def without(one: Any) -> GlobalTensor:
        return without_dims(one, dims)

    return y if keepdim else map_tensors(y, without)
