"""Which values occur in a global tensor, and how often: each worker counts in its block, and the counts add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.geometry.boxes import slices
from distdl.globals.functions.shapes import reshaped
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import aligned
from distdl.globals.rules.fallback import fall_back, split_like
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.partition.sharing import gather_values
from distdl.tensors.connection import refuses
from distdl.tensors.function import Function

_FRACTIONS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@handles("bincount")
@by_name
def bincount(func: Any, input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """How often each whole number occurs."""
    if input.dim() != 1 or not input.numel() or minlength < 0 or input.dtype.to_real() in _FRACTIONS:
        return NotImplemented
    if int(input.min()) < 0 or (weights is not None and weights.shape != input.shape):
        return NotImplemented  # (for torch's error)
    count = max(int(input.max()) + 1, minlength)
    context = next(one for one in (input, weights) if type(one) is GlobalTensor)._context
    layout, (cells, sizes) = aligned(context, (input, weights), None, "bincount")
    own = None if sizes is None else sizes.detach().reshape(-1)
    found = torch.bincount(cells.detach().reshape(-1), own, count)
    # (of no cells, torch gives whole numbers, whatever the weights)
    wanted = torch.int64 if own is None else own.dtype if own.dtype is torch.float32 else torch.float64
    return added_up(layout, _without_derivative(found.to(wanted), "bincount", sizes))


@handles("histc")
@by_name
def histc(func: Any, input: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """How many elements lie in each of so many intervals of equal length."""
    low, high = float(min), float(max)
    if not input.numel() or not input.is_floating_point() or bins < 1 or low > high:
        return NotImplemented
    if low == high:
        low, high = float(input.min()), float(input.max())
    if low == high:
        low, high = low - 1, high + 1
    if not (torch.isfinite(torch.tensor([low, high])).all()):
        return NotImplemented
    return added_up(input._layout, torch.histc(block_of(input).detach(), bins, low, high))


def added_up(layout: KnownLayout, counts: torch.Tensor) -> Any:
    """The sum over workers of what each has counted in its block of a tensor that lies so."""
    context, workers, count = layout.context, layout.partition.workers, counts.numel()

    def make() -> KnownLayout:
        return context.layout(workers.reshape(-1, 1), [tuple((n, n + 1) for n in range(workers.size)), ((0, count),)])

    counted = context.keep(("counted", layout, count), make)
    total: Any = GlobalTensor._of(counts.reshape(1, -1)[: counted.local[0]], counted).sum(0)
    return total


def _without_derivative(y: torch.Tensor, name: str, *inputs: torch.Tensor | None) -> torch.Tensor:
    """y, of which torch has no derivative by what it was computed from. To ask for one is an error on every worker."""
    found: torch.Tensor = _WithoutDerivative.apply(y, name, *inputs)
    return found


class _WithoutDerivative(Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, name: str, *inputs: torch.Tensor | None) -> torch.Tensor:
        ctx.name = name
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        raise RuntimeError(f"the derivative for {ctx.name} is not implemented")


@handles("unique unique_consecutive", "torch Tensor")
def unique(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The values that occur: each worker finds those of its block, and they come to all workers, which merge them.

    The result is split evenly; where each value has gone is split as the tensor is.
    """
    runs = func.__name__ == "unique_consecutive"

    def run(input: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None) -> Any:
        context = input._context
        if dim is not None or context.comm.imagined:
            return fall_back(func, args, kwargs)
        known: Any = input.detach()
        x = reshaped(known, (input.numel(),)) if runs else known
        find = torch.unique_consecutive if runs else torch.unique
        refuses(find, block_of(x), (1,))
        values, places, counts = find(block_of(x).reshape(-1), return_inverse=True, return_counts=True)
        told = gather_values(context.comm, context.everyone, func.__name__, (values.cpu(), counts.cpu()))
        order = x._layout.partition.workers.ravel().tolist()
        listed = torch.cat([told[worker][0] for worker in order]).to(values.device)
        merged, target = find(listed, return_inverse=True)
        found = [_split(merged, input, func.__name__)]
        if return_inverse:
            first = sum(len(told[worker][0]) for worker in order[: order.index(context.me)]) if x._layout.active else 0
            own = target[first : first + len(values)][places]
            found.append(reshaped(GlobalTensor._of(own.reshape(x._layout.local), x._layout), input.shape))
        if return_counts:
            all_counts = torch.cat([told[worker][1] for worker in order]).to(values.device)
            sums = torch.zeros_like(merged, dtype=torch.int64).index_add(0, target, all_counts)
            found.append(_split(sums, input, func.__name__))
        return tuple(found) if len(found) > 1 else found[0]

    def run_sorted(input: Any, sorted: bool = True, *rest: Any, **more: Any) -> Any:
        return run(input, *rest, **more)  # (torch sorts always)

    return (run if runs else run_sorted)(*args, **kwargs)


def _split(whole: torch.Tensor, like: GlobalTensor, name: str) -> GlobalTensor:
    """What a function has found in a tensor, which every worker has, split evenly over the workers of that."""
    layout = split_like(like._context, tuple(whole.shape), like._layout.partition.workers)
    own = whole[slices(layout.box)].reshape(layout.local)
    return GlobalTensor._of(_without_derivative(own, name, block_of(like)), layout)
