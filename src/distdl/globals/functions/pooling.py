"""Pooling of global tensors. Each worker gets the cells beside its block that its windows read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from distdl.geometry.windows import PoolSliding
from distdl.globals.rules.applying import apply, hashable, unwrap_single
from distdl.globals.rules.meta_checks import as_key, check_on_meta
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import by_name, handles
from distdl.ops.adaptive_pooling import AdaptiveAverage, AdaptiveMaximum
from distdl.ops.pooling import Average, Maximum, Pooling

_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A function of torch and its arguments."""


def _space_of(func: Any) -> int:
    """How many dims of space a function has, by its name: two for ``max_pool2d``."""
    return int(next(letter for letter in func.__name__ if letter.isdigit()))


def _with_batch(input: Any, call: _Call, pool: Callable[[GlobalTensor], Any]) -> Any:
    """Pool a tensor that may lack the batch dim: it is added before and removed after.

    Raises: torch's error, or RuntimeError, for any other number of dims.
    """
    space = _space_of(call[0])
    if input.dim() == space + 2:
        return pool(input)
    if input.dim() != space + 1:
        check_on_meta(*call)
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
    """Apply a pooling over windows. Torch checks the call, and the op its windows, once for each key and signature.

    Args:
        reduction: what is taken of each window: Maximum or Average.
    """
    space, name = _space_of(call[0]), call[0].__name__
    stride = kernel if stride is None or stride == [] or stride == () else stride
    key = (reduction, *hashable((kernel, stride, padding, dilation)), ceil_mode)

    def op() -> Pooling:
        check_on_meta(*call)
        sliding = PoolSliding.of(name, space, *map(unwrap_single, key[1:5]))
        made = Pooling(reduction, replace(sliding, ceil_mode=ceil_mode))
        made.check(name)
        _check_dtype(made, made.least, input)
        return made

    return _with_batch(input, call, lambda x: apply(op, key, x, name))


def _check_dtype(op: Any, least: Sequence[int], x: GlobalTensor) -> None:
    """Let torch pool zeros of the smallest shape, because a worker without cells does not call its operator.

    Raises: what torch raises, on every worker, for a dtype that it does not pool.
    """
    if not x._block.is_meta:
        op.sample(torch.zeros(tuple(least), dtype=x.dtype, device=x.device))


@handles(
    "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices",
    "torch functional",
)
def max_pooling(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest element of each window; its index too, for functions that return indices."""

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
    """The mean of each window."""

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
    """The mean of each of as many windows as the output size says."""
    space = _space_of(func)
    op = AdaptiveAverage(_extents(space, output_size))
    if input.dim() > space + 2 > 3 and set(op.extents) == {1}:  # for one window torch takes a mean, with any dims
        return input.mean(tuple(range(-space, 0)), keepdim=True)
    return _adaptive(func, input, output_size, op)


@handles(
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d_with_indices "
    "adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices",
    "torch functional",
)
@by_name
def adaptive_max_pooling(func: Any, input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """The largest element of each window; torch.adaptive_max_pool1d always returns its index, too."""
    indices = bool(return_indices) or func.__name__.endswith("indices") or func is torch.adaptive_max_pool1d
    op = AdaptiveMaximum(_extents(_space_of(func), output_size), indices)
    return _adaptive(func, input, output_size, op)


def _adaptive(func: Any, input: Any, output_size: Any, op: AdaptiveAverage | AdaptiveMaximum) -> Any:
    """Apply an adaptive pooling. Torch checks the call once for each key and signature."""
    call: _Call = (func, (input, output_size), {})

    def checked(x: GlobalTensor) -> Any:
        check_on_meta(*call)
        _check_dtype(op, (1,) * x.dim(), x)
        return op

    key = op, as_key(output_size)
    return _with_batch(input, call, lambda x: apply(lambda: checked(x), key, x, func.__name__))


def _extents(space: int, output_size: Any) -> tuple[int | None, ...]:
    """An output size as one for each dim of space; None keeps the input's."""
    sizes = (output_size,) * space if output_size is None or isinstance(output_size, int) else tuple(output_size)
    return sizes * space if len(sizes) == 1 else sizes
