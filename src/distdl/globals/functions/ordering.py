"""Elements of a global tensor in order along a dim, which is whole: sorting, and statistics of order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.globals.context import KnownLayout
from distdl.globals.fallback import fall_back
from distdl.globals.functions.judging import frozen
from distdl.globals.functions.ranks import levels_of, median, quantile
from distdl.globals.functions.reductions import dims_of, reduced_layout, without_dims
from distdl.globals.functions.scans import wrapped
from distdl.globals.functions.shapes import whole_along
from distdl.globals.functions.spreading import pencils
from distdl.globals.operands import block_of, moved
from distdl.globals.table import handles
from distdl.globals.tensor import GlobalTensor
from distdl.tensors.connection import local, refuses, saving, zeros_on


@handles("sort argsort topk msort", "torch Tensor")
def sort(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cells in order along a dim, which is whole."""
    x, *rest = args
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
        values, cells = saving(zeros_on(block, target.local)), block.new_zeros(target.local, dtype=torch.int64)
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
        func(torch.zeros(1, dtype=x.dtype), levels_of(level))  # (for torch's error)
        named = {key: value for key, value in kwargs.items() if key != "q"}
        found = [func(x, one, *args[2:], **named) for one in levels_of(level).reshape(-1).tolist()]
        return torch.stack(found) if level.dim() else found[0]
    if type(x) is GlobalTensor and dim is None and default is None and x.numel():
        return quantile(func, *args, **kwargs) if name.endswith("quantile") else median(func, x)
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
