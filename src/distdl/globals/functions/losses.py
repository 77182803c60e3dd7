"""Losses of ``torch.nn.functional``: of a global input, and a target that is global or the same on every worker."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.functions.pointwise import elementwise
from distdl.globals.functions.reductions import summed, without_dims
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import aligned, moved, sample, taken
from distdl.globals.rules.applying import ready, weight_of
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import check_range, judge, judge_dtypes
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import handles
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
    """Each worker adds up the losses of its elements; the sum over the workers is divided once."""
    names = _POSITIONS[func.__name__]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    old = given.pop("size_average", None), given.pop("reduce", None)
    reduction = reduction_of(*old, given.pop("reduction", "mean"), func is functional.kl_div)
    _check_shapes(func, given)
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    if reduction == "none":
        each = _named(func, lambda *own, **more: func(**dict(zip(tensors, own, strict=True)), **more, reduction="none"))
        return elementwise(each, tuple(given.pop(name) for name in tensors), given)
    # (torch divides by the batch of the input, also where this is expanded to the target)
    batch = (given["input"].shape[0] or 1) if reduction == "batchmean" else 1
    operands = [given.pop(name) for name in tensors]
    first = next(one for one in operands if type(one) is GlobalTensor)
    target, own = aligned(first._context, operands, None, func.__name__)
    if reduction != "sum" and not any(one.is_floating_point() or one.is_complex() for one in operands):
        numbers = {name: torch.zeros(1, dtype=one.dtype) for name, one in zip(tensors, operands, strict=True)}
        func(**numbers, **given)  # (for torch's error)
    half = any(one.dtype in HALVES for one in own)  # whose sums overflow long before the mean does
    losses = func(**dict(zip(tensors, own, strict=True)), **given, reduction="none" if half else "sum")
    number = losses.sum(dtype=torch.float32) if losses.dtype in HALVES else losses.sum() if half else losses
    total: Any = added(number, target, func.__name__)
    weight = operands[tensors.index("weight")] if "weight" in tensors else None
    if weight is not None and reduction == "mean" and func in (functional.mse_loss, functional.l1_loss):
        total = total / weight.sum()  # (torch's mean with these weights)
    else:
        divisor = prod(target.extents) if reduction == "mean" else batch
        total = total if divisor == 1 else total / divisor
    return total if number.dtype is losses.dtype else total.to(losses.dtype)


def added(number: torch.Tensor, layout: KnownLayout, name: str) -> GlobalTensor:
    """The sum of a number of each worker of a layout."""
    if not layout.rulers:
        return GlobalTensor._of(number if layout.active else number.reshape(1)[:0], layout)
    dims = range(len(layout.rulers))
    return without_dims(summed(number.reshape((1,) * len(dims)), layout, tuple(dims), name), tuple(dims))


def _named(func: Any, call: Any) -> Any:
    call.__name__ = func.__name__
    return call


def _check_shapes(func: Any, given: dict[str, Any]) -> None:
    if func is functional.margin_ranking_loss:
        if not given["input1"].dim() == given["input2"].dim() == given["target"].dim():
            judge(func, (), given)
        return
    if "binary_cross_entropy" not in func.__name__:
        return
    x, target = given["input"], given.get("target")
    if isinstance(target, torch.Tensor) and x.shape != target.shape:
        judge(func, (), given)
    for weight in (given.get("weight"), given.get("pos_weight")):  # (into what these are multiplied, torch writes)
        if isinstance(weight, torch.Tensor) and _is_larger(weight.shape, x.shape):
            shape = torch.broadcast_shapes(x.shape, weight.shape)
            raise RuntimeError(f"output with shape {list(x.shape)} doesn't match the broadcast shape {list(shape)}")


def _is_larger(shape: torch.Size, other: torch.Size) -> bool:
    """Whether what broadcasts to a shape would have to be expanded for it."""
    return len(shape) > len(other) or any(m == 1 != n for n, m in zip(reversed(shape), reversed(other), strict=False))


_PLAIN = ("input", "target")
_OLD = ("size_average", "reduce", "reduction")
_POSITIONS = {
    "mse_loss": (*_PLAIN, *_OLD, "weight"),
    "l1_loss": (*_PLAIN, *_OLD, "weight"),
    "smooth_l1_loss": (*_PLAIN, *_OLD, "beta"),
    "huber_loss": (*_PLAIN, "reduction", "delta", "weight"),
    "binary_cross_entropy": (*_PLAIN, "weight", *_OLD),
    "binary_cross_entropy_with_logits": (*_PLAIN, "weight", *_OLD, "pos_weight"),
    "kl_div": (*_PLAIN, *_OLD, "log_target"),
    "poisson_nll_loss": (*_PLAIN, "log_input", "full", "size_average", "eps", "reduce", "reduction"),
    "soft_margin_loss": (*_PLAIN, *_OLD),
    "hinge_embedding_loss": (*_PLAIN, "margin", *_OLD),
    "margin_ranking_loss": ("input1", "input2", "target", "margin", *_OLD),
}


@handles("nll_loss", "functional")
def nll_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(
        input: Any,
        target: Any,
        weight: torch.Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
    ) -> Any:
        reduction = reduction_of(size_average, reduce, reduction)
        if type(input) is not GlobalTensor:
            return fall_back(func, args, kwargs)
        if not _fit(input, target):
            judge(func, args, kwargs)
        return _of_classes(NegativeLogLikelihood(ignore_index, reduction), input, target, weight, func)

    return run(*args, **kwargs)


@handles("cross_entropy", "functional")
def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(
        input: Any,
        target: Any,
        weight: torch.Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        reduction = reduction_of(size_average, reduce, reduction)
        if type(input) is not GlobalTensor:
            return fall_back(func, args, kwargs)
        probabilities = target.shape == input.shape and target.is_floating_point()
        if label_smoothing > 1 or not (probabilities or _fit(input, target)):
            judge(func, args, kwargs)
        op = CrossEntropy(ignore_index, reduction, max(label_smoothing, 0.0), probabilities)
        return _of_classes(op, input, target, weight, func)

    return run(*args, **kwargs)


def reduction_of(average: Any, reduce: Any, reduction: str, over_batch: bool = False) -> str:
    """The reduction that a loss is asked for, also by torch's older options.

    Args:
        over_batch: whether it may be "batchmean".
    Raises: ValueError for another one.
    """
    if average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(average, reduce, emit_warning=False)
    if reduction not in ("none", "mean", "sum") and not (reduction == "batchmean" and over_batch):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return reduction


def _fit(x: Any, target: Any) -> bool:
    """Whether there is one class number for each place."""
    return tuple(target.shape) == (*x.shape[: x.dim() > 1], *x.shape[2:])


def _of_classes(
    op: NegativeLogLikelihood | CrossEntropy, x: Any, target: Any, weight: torch.Tensor | None, func: Any
) -> Any:
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
    places, seen = context.keep(("places", layout, probabilities), lambda: _places(layout, probabilities))
    if type(target) is not GlobalTensor:
        sample(target, context)
    given = moved(target, places, name) if type(target) is GlobalTensor else taken(target, places)
    if not probabilities:
        n, ignored = x.shape[1], op.ignore_index

        def refuse(wrong: torch.Tensor) -> None:
            functional.nll_loss(torch.zeros(1, n, device="cpu"), wrong, ignore_index=ignored)

        check_range(given, 0, n, refuse, ignored)
    block = block_of(x)
    known: list[tuple[KnownLayout | None, torch.Tensor]] = [(layout, block), (seen, given)]
    own: torch.Tensor = ABSENT
    if weight is not None:
        own = weight_of(weight, context)
        known.append((None, own))

    def choose() -> tuple[Any, Partition]:
        judge_dtypes(func, x, target, weight)
        return op, layout.partition

    setup = ready(context, op, choose, name, *known).setup
    y = setup.move_out(setup.local(*setup.move_in(block, given, own)))
    if op.reduction == "none":
        result = context.keep(("numbers", layout), lambda: _places(layout, False))[0]
        return GlobalTensor._of(y.reshape(result.local) if y.shape != result.local else y, result)
    result = context.whole((), int(layout.partition.workers.flat[0]))
    return GlobalTensor._of(y if result.active else y.reshape(1)[:0], result)


def _places(layout: KnownLayout, probabilities: bool) -> tuple[KnownLayout, KnownLayout]:
    """Where targets lie, at the first place of the classes, and the layout by which the op knows them."""
    context, workers, (batch, _, *space) = layout.context, layout.partition.workers, layout.intervals
    classes = layout.extents[1] if probabilities else 1
    first = context.layout(workers[:, :1], [batch, ((0, classes),), *space])
    if probabilities:
        return first, first
    return context.layout(workers[:, 0], [batch, *space]), first
