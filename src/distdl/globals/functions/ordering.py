"""Elements of a global tensor in order along a dim, which is whole: sorting, and statistics of order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.globals.functions.order_statistics import levels_of, median, quantile
from distdl.globals.functions.reductions import dims_of, without_dims
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import judged
from distdl.globals.rules.whole_dims import along_whole
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import map_tensors
from distdl.globals.tensor.table import handles


@handles("sort argsort topk msort", "torch Tensor")
def sort(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cells in order along a dim, which is whole."""
    x, *rest = args
    if not x.dim():
        return fall_back(func, args, kwargs)
    judged(func, args, kwargs)
    behind = rest[1:] if func.__name__ == "topk" else rest  # where dim stands, or the flags of torch.sort
    dim = 0 if func.__name__ == "msort" else kwargs.get("dim", next((n for n in behind if type(n) is int), -1))
    return along_whole(lambda block: func(block, *rest, **kwargs), x, [dim % x.dim()], func.__name__)


@handles("median nanmedian mode kthvalue quantile nanquantile", "torch Tensor")
def order_statistic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along one dim, which is made whole, or of all elements, which stay where they are."""
    name = func.__name__
    first = 2 if name in ("kthvalue", "quantile", "nanquantile") else 1  # the place of dim among the arguments
    x = args[0]
    default = None if name in ("median", "nanmedian", "quantile", "nanquantile") else -1
    dim = args[first] if len(args) > first else kwargs.get("dim", default)
    level = args[1] if first == 2 and len(args) > 1 else kwargs.get("q")
    if type(x) is GlobalTensor and dim is None and default is None and x.numel():
        return quantile(func, *args, **kwargs) if name.endswith("quantile") else median(func, x)
    if type(x) is not GlobalTensor or dim is None or not x.dim() or type(level) is GlobalTensor:
        return fall_back(func, args, kwargs)
    if isinstance(level, torch.Tensor):
        if level.requires_grad or not level.numel():
            return fall_back(func, args, kwargs)
        known = levels_of(level)
        func(torch.zeros(1, dtype=x.dtype), known)  # for torch's error
        named = {key: value for key, value in kwargs.items() if key != "q"}
        found = [func(x, one, *args[2:], **named) for one in known.reshape(-1).tolist()]
        return torch.stack(found) if level.dim() else found[0]
    if name.endswith("quantile") and not x.numel():
        raise RuntimeError(f"{name}() input tensor must be non-empty")
    dims = dims_of(x, dim)
    keepdim = bool(kwargs.get("keepdim", args[first + 1] if len(args) > first + 1 else False))
    options = {key: value for key, value in kwargs.items() if key not in ("dim", "keepdim", "k", "q")}
    leading = [*args[1:first], *(kwargs[key] for key in ("k", "q") if key in kwargs)]
    y = along_whole(lambda block: func(block, *leading, dim=dims[0], keepdim=True, **options), x, dims, name)

    def without(one: Any) -> GlobalTensor:
        return without_dims(one, dims)

    return y if keepdim else map_tensors(y, without)
