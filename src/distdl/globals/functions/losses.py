"""Losses of ``torch.nn.functional``, of a global input and a global or plain target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from inspect import signature
from math import prod
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.functions.pointwise import elementwise
from distdl.globals.functions.reductions import sum_blocks, without_dims
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import aligned
from distdl.globals.rules.meta_checks import check_on_meta
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import handles
from distdl.tensors.dtypes import HALVES
from distdl.tensors.private_torch import legacy_get_string


@handles(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss",
    "functional",
)
def element_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss element by element. Each worker sums that of its block; the sum over the workers is divided once.

    Raises: ValueError for an unknown reduction; torch's error, on every worker, for shapes that do not fit.
    """
    given = {**dict(zip(_parameters(func), args, strict=False)), **kwargs}
    old = given.pop("size_average", None), given.pop("reduce", None)
    reduction = reduction_of(*old, given.pop("reduction", "mean"), func is functional.kl_div)
    _check_shapes(func, given)
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    if reduction == "none":
        return elementwise(_unreduced(func, tensors), tuple(given.pop(name) for name in tensors), given)
    # torch divides by the batch of the input, also where the input is expanded to the target
    batch = (given["input"].shape[0] or 1) if reduction == "batchmean" else 1
    operands = [given.pop(name) for name in tensors]
    first = next(one for one in operands if type(one) is GlobalTensor)
    target, own = aligned(first._context, operands, None, func.__name__)
    if reduction != "sum" and not any(one.is_floating_point() or one.is_complex() for one in operands):
        numbers = {name: torch.zeros(1, dtype=one.dtype) for name, one in zip(tensors, operands, strict=True)}
        func(**numbers, **given)  # raises torch's error
    half = any(one.dtype in HALVES for one in own)  # their sum would overflow long before their mean
    losses = func(**dict(zip(tensors, own, strict=True)), **given, reduction="none" if half else "sum")
    number = losses.sum(dtype=torch.float32) if losses.dtype in HALVES else losses.sum() if half else losses
    total: Any = all_sum_of(number, target, func.__name__)
    weight = operands[tensors.index("weight")] if "weight" in tensors else None
    if weight is not None and reduction == "mean" and func in (functional.mse_loss, functional.l1_loss):
        total = total / weight.sum()  # torch divides these two by the sum of the weights
    else:
        divisor = prod(target.extents) if reduction == "mean" else batch
        total = total if divisor == 1 else total / divisor
    return total if number.dtype is losses.dtype else total.to(losses.dtype)


@cache
def _parameters(func: Any) -> tuple[str, ...]:
    """The names of the parameters of a Python function, in order."""
    return tuple(signature(func).parameters)


def all_sum_of(number: torch.Tensor, layout: KnownLayout, name: str) -> GlobalTensor:
    """The sum of one number of each worker, over the workers of a layout."""
    if not layout.rulers:
        return GlobalTensor._of(number if layout.active else number.reshape(1)[:0], layout)
    dims = range(len(layout.rulers))
    return without_dims(sum_blocks(number.reshape((1,) * len(dims)), layout, tuple(dims), name), tuple(dims))


def _unreduced(func: Any, tensors: Sequence[str]) -> Any:
    """A loss without reduction, as a function that takes its tensors, of these names, by position."""

    def loss(*own: torch.Tensor, **options: Any) -> Any:
        return func(**dict(zip(tensors, own, strict=True)), **options, reduction="none")

    loss.__name__ = func.__name__
    return loss


def _check_shapes(func: Any, given: dict[str, Any]) -> None:
    """Let torch, on every worker, refuse shapes of named arguments for losses that do not let all of them broadcast."""
    if func is functional.margin_ranking_loss:
        if not given["input1"].dim() == given["input2"].dim() == given["target"].dim():
            check_on_meta(func, (), given)
        return
    if "binary_cross_entropy" not in func.__name__:
        return
    x, target = given["input"], given.get("target")
    if isinstance(target, torch.Tensor) and x.shape != target.shape:
        check_on_meta(func, (), given)
    for weight in (given.get("weight"), given.get("pos_weight")):
        if isinstance(weight, torch.Tensor) and _is_larger(weight.shape, x.shape):
            shape = torch.broadcast_shapes(x.shape, weight.shape)
            raise RuntimeError(f"output with shape {list(x.shape)} doesn't match the broadcast shape {list(shape)}")


def _is_larger(shape: torch.Size, other: torch.Size) -> bool:
    """Whether a tensor of the other shape would have to be expanded to broadcast to one of this shape."""
    return len(shape) > len(other) or any(m == 1 != n for n, m in zip(reversed(shape), reversed(other), strict=False))


def reduction_of(average: Any, reduce: Any, reduction: str, over_batch: bool = False) -> str:
    """The reduction that a loss is called with, which ``size_average`` and ``reduce`` override.

    Args:
        over_batch: whether it may be "batchmean".
    Raises: ValueError for an unknown one.
    """
    if average is not None or reduce is not None:
        reduction = legacy_get_string(average, reduce, emit_warning=False)
    if reduction not in ("none", "mean", "sum") and not (reduction == "batchmean" and over_batch):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return reduction
