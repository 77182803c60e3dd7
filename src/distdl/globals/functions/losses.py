"""Losses of ``torch.nn.functional``: of a global input, and a target that is global or the same on every worker."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.context import KnownLayout
from distdl.globals.fallback import fall_back
from distdl.globals.functions.applying import ready, weight_of
from distdl.globals.functions.judging import check_range, judge, judge_dtypes
from distdl.globals.functions.pointwise import elementwise
from distdl.globals.functions.reductions import summed, without_dims
from distdl.globals.functions.shapes import whole_along
from distdl.globals.operands import aligned, block_of, entire, moved, sample, taken
from distdl.globals.table import handles
from distdl.globals.tensor import GlobalTensor
from distdl.ops.class_loss import CrossEntropy, NegativeLogLikelihood
from distdl.ops.loss import ABSENT
from distdl.partition import Partition
from distdl.tensors.connection import local
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
        raise ValueError(
            f"Using a target size ({target.shape}) that is different to the input size ({x.shape}) is deprecated. "
            "Please ensure they have the same size."
        )
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
            _refuse(func, args, kwargs)
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
            _refuse(func, args, kwargs)
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


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what torch raises. (For tensors without memory it asserts what it checks of others.)"""
    try:
        judge(func, args, kwargs)
    except AssertionError as problem:
        raise RuntimeError(str(problem)) from None


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


@handles("ctc_loss", "torch functional")
def ctc_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of sequences of labels. Each sequence of a batch is whole where its loss is computed."""

    def run(
        log_probs: Any,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str | int = 0 if func is torch.ctc_loss else "mean",
        zero_infinity: bool = False,
    ) -> Any:
        wanted = ("none", "mean", "sum")[reduction] if isinstance(reduction, int) else reduction
        if type(log_probs) is not GlobalTensor or wanted not in ("none", "mean", "sum"):
            return fall_back(func, args, kwargs)
        x: Any = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
        labels, read, written = entire(targets), _numbers(input_lengths), _numbers(target_lengths)
        if not _are_labels(x, labels, read, written, blank):
            return fall_back(func, args, kwargs)  # (for torch's error)
        x = whole_along(x, [0, 2], "ctc_loss")
        layout, (steps, _, classes) = x._layout, x.shape
        start, stop = layout.box[1]
        rows = labels[start:stop] if labels.dim() == 2 else labels[sum(written[:start]) : sum(written[:stop])]
        own = (rows, read[start:stop], written[start:stop])
        if stop == start:  # (no label, of one sequence)
            own = (labels.new_zeros(1, 1), [steps], [0])
        target = layout.context.layout(layout.partition.workers[0, :, 0], [layout.intervals[1]])
        losses: Any = GlobalTensor._of(
            local(
                # (lists of numbers go, too, where the stubs have tensors)
                lambda block: functional.ctc_loss(block, *own, blank, "none", zero_infinity),  # type: ignore[arg-type]
                target.local,
                (block_of(x), (steps, 1, classes)),
            ),
            target,
        )
        if wanted == "none":
            return losses if log_probs.dim() == 3 else losses.squeeze(0)
        if wanted == "sum":
            return losses.sum()
        return (losses / torch.tensor(written, dtype=x.dtype, device=x.device).clamp_min(1)).mean()

    return run(*args, **kwargs)


def _numbers(lengths: Any) -> list[int]:
    return entire(lengths).reshape(-1).tolist() if isinstance(lengths, torch.Tensor) else list(lengths)


def _are_labels(x: GlobalTensor, labels: torch.Tensor, read: list[int], written: list[int], blank: int) -> bool:
    """Whether there is a target for each sequence, and all lengths are right."""
    if x.dim() != 3 or not x.numel() or x.dtype not in (torch.float32, torch.float64):
        return False
    if not all(isinstance(n, int) for n in (*read, *written)):
        return False
    steps, count, classes = x.shape
    if labels.dim() == 2:
        enough = labels.shape[0] == count and labels.shape[1] >= max(written, default=0)
    else:
        enough = labels.dim() == 1 and len(labels) == sum(written)
    lengths = len(read) == len(written) == count and all(0 <= n <= steps for n in read) and min(written) >= 0
    return enough and lengths and 0 <= blank < classes
