"""Losses over classes: ``nll_loss`` and ``cross_entropy`` of a global input and a global or plain target."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from distdl.globals.functions.losses import reduction_of
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import block_in, keep_sample, local_slice
from distdl.globals.rules.applying import replicated_weight, set_up
from distdl.globals.rules.meta_checks import check_dtypes, check_on_meta, check_range
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.ops.class_loss import CrossEntropy, NegativeLogLikelihood
from distdl.ops.loss import ABSENT
from distdl.partition import Partition


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
        check_on_meta(func, (input, target, weight), {"ignore_index": ignore_index, "reduction": reduction, **more})
    if not is_cross_entropy:
        return _of_classes(NegativeLogLikelihood(ignore_index, reduction), input, target, weight, func)
    op = CrossEntropy(ignore_index, reduction, max(label_smoothing, 0.0), probabilities)
    return _of_classes(op, input, target, weight, func)


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
        keep_sample(target, context)
    given = block_in(target, lies, name) if type(target) is GlobalTensor else local_slice(target, lies)
    if not probabilities:
        _check_numbers(given, x.shape[1], op.ignore_index)
    block = block_of(x)
    known: list[tuple[KnownLayout | None, torch.Tensor]] = [(layout, block), (seen, given)]
    own = ABSENT if weight is None else replicated_weight(weight, context)
    if weight is not None:
        known.append((None, own))

    def choose() -> tuple[Any, Partition]:
        check_dtypes(func, x, target, weight)
        return op, layout.partition

    setup = set_up(context, op, choose, name, *known).setup
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
    """For an input in a layout: that of the targets, on the workers of the first classes, without and with classes."""
    context, workers, (batch, _, *space) = layout.context, layout.partition.workers, layout.intervals
    classes = layout.extents[1] if probabilities else 1
    first = context.layout(workers[:, :1], [batch, ((0, classes),), *space])
    if probabilities:
        return first, first
    return context.layout(workers[:, 0], [batch, *space]), first
