"""Which values occur in a global tensor, and how often. Each worker counts in its block, and the counts are merged."""

from __future__ import annotations

from typing import Any

import torch

from distdl.geometry.boxes import slices
from distdl.globals.functions.shapes import reshaped
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import aligned
from distdl.globals.rules.fallback import split_like
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
    """How often each of the numbers 0, 1, ... occurs, or the sum of their weights. What torch refuses falls back."""
    if input.dim() != 1 or not input.numel() or minlength < 0 or input.dtype.to_real() in _FRACTIONS:
        return NotImplemented
    if int(input.min()) < 0 or (weights is not None and weights.shape != input.shape):
        return NotImplemented
    count = max(int(input.max()) + 1, minlength)
    context = next(one for one in (input, weights) if type(one) is GlobalTensor)._context
    layout, (cells, sizes) = aligned(context, (input, weights), None, "bincount")
    own = None if sizes is None else sizes.detach().reshape(-1)
    found = torch.bincount(cells.detach().reshape(-1), own, count)
    # torch gives integers for a block without cells, whatever the dtype of the weights
    wanted = torch.int64 if own is None else own.dtype if own.dtype is torch.float32 else torch.float64
    return _summed(layout, _without_derivative(found.to(wanted), "bincount", sizes))


@handles("histc")
@by_name
def histc(func: Any, input: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """How many elements lie in each of ``bins`` intervals of equal length between two numbers.

    If these are equal, as by default, the smallest and the largest element take their place.
    """
    low, high = float(min), float(max)
    if not input.numel() or not input.is_floating_point() or bins < 1 or low > high:
        return NotImplemented
    if low == high:
        low, high = float(input.min()), float(input.max())
    if low == high:
        low, high = low - 1, high + 1
    if not (torch.isfinite(torch.tensor([low, high])).all()):
        return NotImplemented
    return _summed(input._layout, torch.histc(block_of(input).detach(), bins, low, high))


def _summed(layout: KnownLayout, counts: torch.Tensor) -> Any:
    """The sum of a vector of counts over the workers of a layout, of whose blocks each has counted its own."""
    context, workers, count = layout.context, layout.partition.workers, counts.numel()

    def make() -> KnownLayout:
        return context.layout(workers.reshape(-1, 1), [tuple((n, n + 1) for n in range(workers.size)), ((0, count),)])

    counted = context.keep(("counted", layout, count), make)
    return GlobalTensor._of(counts.reshape(1, -1)[: counted.local[0]], counted).sum(0)


def _without_derivative(y: torch.Tensor, name: str, *inputs: torch.Tensor | None) -> torch.Tensor:
    """y, which depends on its inputs but has no derivative. Every worker raises RuntimeError in backward, as torch."""
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


@handles("unique", "torch Tensor")
@by_name
def unique(func: Any, input: Any, sorted: bool = True, *rest: Any, **options: Any) -> Any:
    """The distinct values, which torch sorts whatever ``sorted`` says."""
    return _distinct(torch.unique, input, *rest, **options)


@handles("unique_consecutive", "torch Tensor")
@by_name
def unique_consecutive(func: Any, input: Any, *rest: Any, **options: Any) -> Any:
    """The flat tensor without values that equal the one before them."""
    return _distinct(torch.unique_consecutive, input, *rest, **options)


def _distinct(
    find: Any, input: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Find the values of each block, gather these on every worker, and merge them there. With a dim, falls back.

    Args:
        find: ``torch.unique`` or ``torch.unique_consecutive``.
    Returns: the values, split evenly; then, as far as asked for, the place of each element among them, split as the
        input is, and their counts, split evenly.
    """
    context, name = input._context, find.__name__
    if dim is not None or context.comm.imagined:
        return NotImplemented
    x: Any = input.detach()
    if find is torch.unique_consecutive:
        x = reshaped(x, (input.numel(),))
    refuses(find, block_of(x), (1,))
    values, places, counts = find(block_of(x).reshape(-1), return_inverse=True, return_counts=True)
    gathered = gather_values(context.comm, context.everyone, name, (values.cpu(), counts.cpu()))
    order = x._layout.partition.workers.ravel().tolist()
    merged, target = find(torch.cat([gathered[worker][0] for worker in order]).to(values.device), return_inverse=True)
    found = [_split_evenly(merged, input, name)]
    if return_inverse:
        before = order[: order.index(context.me)] if x._layout.active else []
        first = sum(len(gathered[worker][0]) for worker in before)
        own = target[first : first + len(values)][places]
        found.append(reshaped(GlobalTensor._of(own.reshape(x._layout.local), x._layout), input.shape))
    if return_counts:
        all_counts = torch.cat([gathered[worker][1] for worker in order]).to(values.device)
        sums = torch.zeros_like(merged, dtype=torch.int64).index_add(0, target, all_counts)
        found.append(_split_evenly(sums, input, name))
    return tuple(found) if len(found) > 1 else found[0]


def _split_evenly(whole: torch.Tensor, x: GlobalTensor, name: str) -> GlobalTensor:
    """Split a tensor that every worker has found in x evenly over the workers of x, without a derivative."""
    layout = split_like(x._context, tuple(whole.shape), x._layout.partition.workers)
    own = whole[slices(layout.box)].reshape(layout.local)
    return GlobalTensor._of(_without_derivative(own, name, block_of(x)), layout)
