"""How often values occur in a global tensor: each worker counts in its block, and the counts add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.globals.context import KnownLayout
from distdl.globals.fallback import fall_back
from distdl.globals.operands import block_of
from distdl.globals.table import handles
from distdl.globals.tensor import GlobalTensor


@handles("bincount")
def bincount(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How often each whole number occurs."""

    def run(input: Any, weights: Any = None, minlength: int = 0) -> Any:
        block = input._block if type(input) is GlobalTensor else None
        if block is None or weights is not None or input.dim() != 1 or not input.numel() or minlength < 0:
            return fall_back(func, args, kwargs)
        if block.is_floating_point() or block.is_complex() or int(input.min()) < 0:
            return fall_back(func, args, kwargs)  # (for torch's error)
        count = max(int(input.max()) + 1, minlength)
        return _added(input, torch.bincount(block_of(input).reshape(-1), minlength=count))

    return run(*args, **kwargs)


@handles("histc")
def histc(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How many elements lie in each of so many intervals of equal length."""

    def run(input: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
        low, high = float(min), float(max)
        if not input.numel() or not input.is_floating_point() or bins < 1 or low > high:
            return fall_back(func, args, kwargs)
        if low == high:
            low, high = float(input.min()), float(input.max())
        if low == high:
            low, high = low - 1, high + 1
        if not (torch.isfinite(torch.tensor([low, high])).all()):
            return fall_back(func, args, kwargs)
        return _added(input, torch.histc(block_of(input).detach(), bins, low, high))

    return run(*args, **kwargs)


def _added(x: GlobalTensor, counts: torch.Tensor) -> Any:
    """The sum over workers of what each has counted in its block of a tensor."""
    context, workers, count = x._context, x._layout.partition.workers, counts.numel()

    def make() -> KnownLayout:
        grid = context.array(workers.reshape(-1, 1))
        return context.layout(grid, [tuple((n, n + 1) for n in range(workers.size)), ((0, count),)])

    layout = context.keep(("counted", x._layout, count), make)
    total: Any = GlobalTensor._of(counts.reshape(1, -1)[: layout.local[0]], layout).sum(0)
    return total
