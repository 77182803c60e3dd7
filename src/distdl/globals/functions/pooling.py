"""Pooling and interpolation of global tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from distdl.geometry.windows import PoolSliding
from distdl.globals.rules.applying import apply, hashable, single
from distdl.globals.rules.meta_checks import frozen, judge
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import by_name, handles
from distdl.ops.adaptive_pooling import AdaptiveAverage, AdaptiveMaximum
from distdl.ops.pooling import Average, Maximum, Pooling

_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # a function, and its arguments


def _space_of(func: Any) -> int:
    """The dims of space that a function's name tells: ``max_pool2d`` has two."""
    return int(next(letter for letter in func.__name__ if letter.isdigit()))


def _batched(input: Any, call: _Call, pool: Callable[[GlobalTensor], Any]) -> Any:
    """Pool a tensor that may have no batch."""
    space = _space_of(call[0])
    if input.dim() == space + 2:
        return pool(input)
    if input.dim() != space + 1:
        judge(*call)
        raise RuntimeError(f"Expected {space + 1}D or {space + 2}D input to a pooling, got {list(input.shape)}")
    y = pool(input.unsqueeze(0))
    return tuple(one.squeeze(0) for one in y) if isinstance(y, tuple) else y.squeeze(0)


def _pooled(
    call: _Call,
    input: GlobalTensor,
    reduction: Any,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
) -> Any:
    space, name = _space_of(call[0]), call[0].__name__
    stride = kernel if stride is None or stride == [] or stride == () else stride
    key = (reduction, *hashable((kernel, stride, padding, dilation)), ceil_mode)

    def op() -> Pooling:
        judge(*call)
        sliding = PoolSliding.of(name, space, *map(single, key[1:5]))
        made = Pooling(reduction, replace(sliding, ceil_mode=ceil_mode))
        made.check(name)
        accepted: Pooling = _accepting(made, made.least, input)
        return accepted

    return _batched(input, call, lambda x: apply(op, key, x, name))


def _accepting(op: Any, least: Sequence[int], x: GlobalTensor) -> Any:
    """A pooling, of which torch's operator takes tensors of this dtype.

    Raises: what torch raises, on every worker, if it does not.
    """
    if not x._block.is_meta:
        op.sample(torch.zeros(tuple(least), dtype=x.dtype, device=x.device))
    return op


@handles(
    "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices",
    "torch functional",
)
def max_pooling(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each worker completes its block by the cells that its windows read."""

    def run(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        indices = return_indices or func.__name__.endswith("indices")
        call = func, args, kwargs
        return _pooled(call, input, Maximum(indices), kernel_size, stride, padding, dilation, ceil_mode)

    return run(*args, **kwargs)


@handles("avg_pool1d avg_pool2d avg_pool3d", "torch functional")
def average_pooling(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        reduction = Average(count_include_pad, divisor_override)
        return _pooled((func, args, kwargs), input, reduction, kernel_size, stride, padding, 1, ceil_mode)

    return run(*args, **kwargs)


@handles("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", "torch functional")
@by_name
def adaptive_average_pooling(func: Any, input: Any, output_size: Any) -> Any:
    space = _space_of(func)
    op = AdaptiveAverage(_extents(space, output_size))
    if input.dim() > space + 2 > 3 and set(op.extents) == {1}:  # (torch takes a mean, and looks at no other dim)
        return input.mean(tuple(range(-space, 0)), keepdim=True)
    return _adaptive(func, input, output_size, op)


@handles(
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d_with_indices "
    "adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices",
    "torch functional",
)
@by_name
def adaptive_max_pooling(func: Any, input: Any, output_size: Any, return_indices: bool = False) -> Any:
    # (torch.adaptive_max_pool1d always gives both)
    indices = bool(return_indices) or func.__name__.endswith("indices") or func is torch.adaptive_max_pool1d
    op = AdaptiveMaximum(_extents(_space_of(func), output_size), indices)
    return _adaptive(func, input, output_size, op)


def _adaptive(func: Any, input: Any, output_size: Any, op: AdaptiveAverage | AdaptiveMaximum) -> Any:
    call: _Call = (func, (input, output_size), {})

    def accepted(x: GlobalTensor) -> Any:
        judge(*call)
        return _accepting(op, (1,) * x.dim(), x)

    key = op, frozen(output_size)
    return _batched(input, call, lambda x: apply(lambda: accepted(x), key, x, func.__name__))


def _extents(space: int, output_size: Any) -> tuple[int | None, ...]:
    sizes = (output_size,) * space if output_size is None or isinstance(output_size, int) else tuple(output_size)
    return sizes * space if len(sizes) == 1 else sizes
