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
from distdl.globals.functions.reductions import summed, without_dims
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import aligned, moved, sample, taken
from distdl.globals.rules.applying import ready, weight_of
from distdl.globals.rules.meta_checks import check_range, judge, judge_dtypes
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.ops.class_loss import CrossEntropy, NegativeLogLikelihood
from distdl.ops.loss import ABSENT
from distdl.partition import Partition
from distdl.tensors.dtypes import HALVES


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
    return without_dims(summed(number.reshape((1,) * len(dims)), layout, tuple(dims), name), tuple(dims))


def _unreduced(func: Any, tensors: Sequence[str]) -> Any:
    """A loss without reduction, as a function that takes its tensors, of these names, by position."""

    def loss(*own: torch.Tensor, **options: Any) -> torch.Tensor:
        y: torch.Tensor = func(**dict(zip(tensors, own, strict=True)), **options, reduction="none")
        return y

    loss.__name__ = func.__name__
    return loss


def _check_shapes(func: Any, given: dict[str, Any]) -> None:
    """Raise, on every worker, what torch raises for the shapes of losses that do not let all operands broadcast.

    Args:
        given: the arguments, by name.
    """
    if func is functional.margin_ranking_loss:
        if not given["input1"].dim() == given["input2"].dim() == given["target"].dim():
            judge(func, (), given)
        return
    if "binary_cross_entropy" not in func.__name__:
        return
    x, target = given["input"], given.get("target")
    if isinstance(target, torch.Tensor) and x.shape != target.shape:
        judge(func, (), given)
    for weight in (given.get("weight"), given.get("pos_weight")):
        if isinstance(weight, torch.Tensor) and _is_larger(weight.shape, x.shape):
            shape = torch.broadcast_shapes(x.shape, weight.shape)
            raise RuntimeError(f"output with shape {list(x.shape)} doesn't match the broadcast shape {list(shape)}")


def _is_larger(shape: torch.Size, other: torch.Size) -> bool:
    """Whether a tensor of the other shape would have to be expanded to broadcast to one of this shape."""
    return len(shape) > len(other) or any(m == 1 != n for n, m in zip(reversed(shape), reversed(other), strict=False))


@handles("nll_loss cross_entropy", "functional")
@by_name
def class_loss(
    func: Any,
    input: Any,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The loss of an input (batch, classes, ...) and class numbers, or for ``cross_entropy`` probabilities.

    A plain input falls back.

    Raises: ValueError for an unknown reduction; torch's error, on every worker, for shapes that do not fit.
    """
    reduction = reduction_of(size_average, reduce, reduction)
    if type(input) is not GlobalTensor:
        return NotImplemented
    is_cross_entropy = func is functional.cross_entropy
    probabilities = is_cross_entropy and target.shape == input.shape and target.is_floating_point()
    has_numbers = tuple(target.shape) == (*input.shape[: input.dim() > 1], *input.shape[2:])
    if label_smoothing > 1 or not (probabilities or has_numbers):
        more = {"label_smoothing": label_smoothing} if is_cross_entropy else {}
        judge(func, (input, target, weight), {"ignore_index": ignore_index, "reduction": reduction, **more})
    if not is_cross_entropy:
        return _of_classes(NegativeLogLikelihood(ignore_index, reduction), input, target, weight, func)
    op = CrossEntropy(ignore_index, reduction, max(label_smoothing, 0.0), probabilities)
    return _of_classes(op, input, target, weight, func)


def reduction_of(average: Any, reduce: Any, reduction: str, over_batch: bool = False) -> str:
    """The reduction that a loss is called with, which ``size_average`` and ``reduce`` override.

    Args:
        over_batch: whether it may be "batchmean".
    Raises: ValueError for an unknown one.
    """
    if average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(average, reduce, emit_warning=False)
    if reduction not in ("none", "mean", "sum") and not (reduction == "batchmean" and over_batch):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return reduction


def _of_classes(
    op: NegativeLogLikelihood | CrossEntropy, x: Any, target: Any, weight: torch.Tensor | None, func: Any
) -> Any:
    """Apply the op of a loss over classes to x, (classes,) or (batch, classes, ...).

    Args:
        target: class numbers, of x's shape without classes; or probabilities, of x's shape.
        weight: one for each class.
    Raises: ValueError for class numbers of another shape; torch's error for one that is out of range.
    """
    name = func.__name__
    if x.dim() == 1:
        y = _of_classes(op, x.unsqueeze(0), target.unsqueeze(0), weight, func)
        return y.squeeze(0) if y.dim() else y
    probabilities = isinstance(op, CrossEntropy) and op.probabilities
    if not probabilities and tuple(target.shape) != (x.shape[0], *x.shape[2:]):
        raise ValueError(
            f"{name} needs class numbers of shape {[x.shape[0], *x.shape[2:]]} for an input of {list(x.shape)}; got "
            f"{list(target.shape)}"
        )
    context, layout = x._context, x._layout
    lies, seen = context.keep(("targets", layout, probabilities), lambda: _target_layouts(layout, probabilities))
    if type(target) is not GlobalTensor:
        sample(target, context)
    given = moved(target, lies, name) if type(target) is GlobalTensor else taken(target, lies)
    if not probabilities:
        _check_numbers(given, x.shape[1], op.ignore_index)
    block = block_of(x)
    known: list[tuple[KnownLayout | None, torch.Tensor]] = [(layout, block), (seen, given)]
    own = ABSENT if weight is None else weight_of(weight, context)
    if weight is not None:
        known.append((None, own))

    def choose() -> tuple[Any, Partition]:
        judge_dtypes(func, x, target, weight)
        return op, layout.partition

    setup = ready(context, op, choose, name, *known).setup
    y = setup.move_out(setup.local(*setup.move_in(block, given, own)))
    if op.reduction == "none":
        result = context.keep(("targets", layout, False), lambda: _target_layouts(layout, False))[0]
        return GlobalTensor._of(y.reshape(result.local) if y.shape != result.local else y, result)
    result = context.whole((), int(layout.partition.workers.flat[0]))
    return GlobalTensor._of(y if result.active else y.reshape(1)[:0], result)


def _check_numbers(target: torch.Tensor, classes: int, ignored: int) -> None:
    """Check the class numbers that this worker reads. Raises: torch's error for one that is out of range."""

    def refuse(wrong: torch.Tensor) -> None:
        functional.nll_loss(torch.zeros(1, classes, device="cpu"), wrong, ignore_index=ignored)

    check_range(target, 0, classes, refuse, ignored)


def _target_layouts(layout: KnownLayout, probabilities: bool) -> tuple[KnownLayout, KnownLayout]:
    """The layout of the targets, on the workers of the first classes; and the same with a dim of classes, for the op.

    Args:
        layout: that of the input.
    """
    context, workers, (batch, _, *space) = layout.context, layout.partition.workers, layout.intervals
    classes = layout.extents[1] if probabilities else 1
    first = context.layout(workers[:, :1], [batch, ((0, classes),), *space])
    if probabilities:
        return first, first
    return context.layout(workers[:, 0], [batch, *space]), first
