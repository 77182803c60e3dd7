"""The distributed losses of classes, which may be split, too: negative log-likelihood and cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from distdl.agreement import Headers, can_be_read
from distdl.geometry.boxes import Shape, shape
from distdl.nn.layer import Layer, tiled
from distdl.nn.loss.common import alone, check_reduction, described, finished, is_given, or_absent
from distdl.nn.module import Option
from distdl.ops import Site
from distdl.ops.class_loss import ClassSetup, CrossEntropy, NegativeLogLikelihood
from distdl.ops.class_places import CLASS_NUMBERS
from distdl.partition import Layout, Partition, Signature
from distdl.partition.arguments import checks_arguments
from distdl.tensors.connection import zeros_on
from distdl.tensors.recorders import as_one_call, here
from distdl.transport import Label

_TARGET, _WEIGHT = 1, 2  # which of the tensors they are that are agreed on
_WEIGHTED = 2  # which of the extra integers says whether there is a weight; before it, class numbers out of range


@dataclass(frozen=True, eq=False)
class _ByClass:
    """How the setup of a loss follows from scores, targets on the workers of class index 0, and a weight.

    Checked here is what only reports tell: whether workers differ, and which class numbers they have. The loss itself
    checks the signatures.

    Attributes:
        op: the loss.
        P_x: the workers that have scores; ``places`` those that have targets.
    """

    op: NegativeLogLikelihood | CrossEntropy
    P_x: Partition
    places: Partition

    @property
    def read(self) -> Sequence[Partition]:
        return (self.P_x, self.places, self.P_x)

    @property
    def identity(self) -> object:
        return (self.op, self.P_x.workers.shape)

    def __call__(self, headers: Headers, label: Label) -> ClassSetup:
        x = tiled(headers, self.P_x, 0, label)
        given = is_given(headers, self.P_x, label.kind, "weight", _WEIGHTED)
        if given:
            self._check_weight(headers, label.kind, x.layout.extents[1])
        batch, _, *space = x.layout.intervals
        whole = Layout.along(self.places, [batch, [(0, x.layout.extents[1])], *space])
        op, probabilities = self.op, self._are_probabilities(headers, label.kind, whole)
        if isinstance(op, CrossEntropy):
            op = replace(op, probabilities=probabilities)
        places = whole if probabilities else Layout.along(self.places, [batch, [(0, 1)], *space])
        dtype = headers.dtype(self.places, label.kind, _TARGET)
        target = Signature(places, dtype, headers.derivatives[_TARGET], headers.own[_TARGET])
        weight = self._weight(headers, label.kind, x.layout.extents[1]) if given else None
        setup = op.setup(Site._make((self.P_x, headers.members, label)), x, target, weight)
        self._check_numbers(headers, label.kind, setup.classes)
        return setup

    def _weight(self, headers: Headers, kind: str, classes: int) -> Signature:
        """The signature of a weight, which every worker has as a whole."""
        P_x = self.P_x.reshape(self.P_x.workers.size)
        return Signature(
            Layout.along(P_x, [[(0, classes)] * P_x.workers.size]),
            headers.dtype(P_x, kind, _WEIGHT),
            headers.derivatives[_WEIGHT],
            headers.own[_WEIGHT],
        )

    def _check_weight(self, headers: Headers, kind: str, classes: int) -> None:
        first = int(self.P_x.workers.flat[0])
        shape = headers.shape(first, _WEIGHT)
        alike = headers.have_shape(self.P_x, shape, _WEIGHT)
        if not alike.all():
            other = int(self.P_x.workers.flat[int(alike.argmin())])
            raise ValueError(
                f"{kind} needs the same weight for each of {classes} classes; got "
                f"{list(headers.shape(other, _WEIGHT))} on worker {other} and {list(shape)} on worker {first}"
            )

    def _are_probabilities(self, headers: Headers, kind: str, whole: Layout) -> bool:
        kinds = {self._is_probabilities(headers, kind, worker, shape(whole[worker])) for worker in whole}
        if len(kinds) > 1:
            raise ValueError(f"{kind} needs targets that are class numbers, or probabilities, on all workers alike")
        return kinds.pop()

    def _is_probabilities(self, headers: Headers, kind: str, worker: int, x: Shape) -> bool:
        takes = isinstance(self.op, CrossEntropy)
        target, numbers = headers.shape(worker, _TARGET), x[:1] + x[2:]
        if target == numbers or (target == x and takes):
            return target == x
        alternative = f" (class numbers) or {list(x)} (probabilities)" if takes else ""
        raise ValueError(
            f"{kind} needs a target of shape {list(numbers)}{alternative} on worker {worker}; got {list(target)}"
        )

    def _check_numbers(self, headers: Headers, kind: str, classes: int) -> None:
        """Check that no class number is out of range, by what the workers reported."""
        extras = headers.extras(self.places)[..., :_WEIGHTED].reshape(-1, _WEIGHTED)
        wrong = np.flatnonzero((extras[:, 0] < 0) | (extras[:, 1] >= classes))
        if len(wrong):
            lowest, highest = extras[wrong[0]].tolist()
            raise ValueError(
                f"{kind} needs class numbers from 0 to {classes - 1}, or {self.op.ignore_index} to ignore a place; "
                f"worker {self.places.workers.flat[wrong[0]]} has {lowest if lowest < 0 else highest}"
            )


class _ClassLoss(Layer):
    """What the losses of classes are."""

    P_x = Option[Partition]()
    ignore_index = Option[int]()
    reduction = Option[str]()
    _valid_reductions: ClassVar[tuple[str, ...]] = ("none", "mean", "sum")
    weight: torch.Tensor | None

    def __init__(self, P_x: Partition, weight: torch.Tensor | None, op: NegativeLogLikelihood | CrossEntropy) -> None:
        kind = type(self).__name__
        check_reduction(kind, op.reduction, self._valid_reductions)
        if P_x.workers.ndim < 2:
            raise ValueError(f"{kind} needs P_x: batch x classes x space; got {P_x}")
        derive = _ByClass(op, P_x, P_x[:, :1])
        weighted = None if weight is None else tuple(weight.shape)
        name = f"{kind} (P_x: {P_x}; {op.reduction})"
        super().__init__(name, P_x, derive, weighted, alone=alone(op.reduction))
        self.P_x, self.ignore_index, self.reduction = P_x, op.ignore_index, op.reduction
        self.register_buffer("weight", weight)
        self._reads_targets = P_x.comm.rank in derive.places
        self._classes = 0  # how many the members last agreed on; before that none, and class numbers are not looked at

    def forward(self, x: torch.Tensor, target: Any = None) -> Any:
        own = target if self._reads_targets or not self._member else _nothing(target, x)
        tensors = (x, own, or_absent(self.weight))
        setup = self._agree_on_numbers(*tensors)
        moved = setup.move_in(*tensors)
        return finished(setup.move_out(setup.local(*moved)), self.reduction)

    def _agree_on_numbers(self, x: torch.Tensor, target: Any, weight: torch.Tensor) -> Any:
        """Agree on the call, and that all class numbers are in range, by the number of classes last agreed on.

        Where that has changed, and it changes on all members alike, they agree again.
        """
        given = int(self.weight is not None)
        setup: Any = self.agree(x, target, weight, extra=(*_strays(target, self._classes, self.ignore_index), given))
        if self._member and setup.classes != self._classes:
            self._classes = setup.classes
            setup = self.agree(x, target, weight, extra=(*_strays(target, self._classes, self.ignore_index), given))
        return setup

    extra_repr = described


class DistributedNLLLoss(_ClassLoss):
    r"""Negative log-likelihood of log-probabilities that are split over batch, classes and space.

    Forward: :math:`\ell = c^{-1} \sum_i -w_{t_i} x_{i, t_i}` over places i, c being 1 (``sum``) or
    :math:`\sum_i w_{t_i}` (``mean``). The targets are copied along classes; each worker picks the places whose class is
    one of its own; a sum-reduce adds up on the worker of rank 0 in P_x, which divides once. All other workers return a
    0-d tensor of value 0.
    Adjoint: a broadcast of the gradient from rank 0, to the elements that were picked.

    Args:
        P_x: the partition, ``batch x classes x space...``.
        weight: a weight for each class, the whole vector on every worker; None for 1.
        ignore_index: targets of this class count nothing.
        reduction: ``none`` (the losses of the local places, on the workers of class index 0), ``mean`` or ``sum``.
    Shapes: x local ``(batch, classes, space...)``, in elements. The target, class numbers, has that shape without dim
        1. It is read on the workers of class index 0.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        another rank than P_x has axes, a target that does not fit to it, or a class number that is out of range.
    """

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(P_x, weight, NegativeLogLikelihood(int(ignore_index), reduction))


class DistributedCrossEntropyLoss(_ClassLoss):
    r"""Cross-entropy of class scores that are split over batch, classes and space.

    Forward: :math:`\ell = c^{-1} \sum_i \sum_k q_{ik} (L_i - x_{ik})` over places i and classes k, with
    :math:`L_i = \log \sum_k e^{x_{ik}}` and the target distribution q. Each worker computes :math:`L^s_i` over its own
    classes and its share :math:`-\sum_{k \in s} q_{ik} x_{ik}`; the workers of class index 0 gather the former, one
    number for each place and worker, and add :math:`L_i = \log \sum_s e^{L^s_i}`; a sum-reduce adds all up on the
    worker of rank 0 in P_x, which divides once. All other workers return a 0-d tensor of value 0.
    Adjoint: the transpose of the movements around torch's own derivatives. No scores are moved, nor their gradients.

    Args:
        P_x: the partition, ``batch x classes x space...``.
        weight: a weight for each class, the whole vector on every worker; None for 1.
        ignore_index: targets of this class count nothing.
        reduction: ``none`` (the losses of the local places, on the workers of class index 0), ``mean`` or ``sum``.
        label_smoothing: from 0 to 1.
    Shapes: x local ``(batch, classes, space...)``, in elements. The target has that shape without dim 1 (class
        numbers), or with the global number of classes there (probabilities). It is read on the workers of class index
        0.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        another rank than P_x has axes, a target that does not fit to it, or a class number that is out of range.
    """

    label_smoothing = Option[float]()

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        op = CrossEntropy(int(ignore_index), reduction, float(label_smoothing))
        op.check(type(self).__name__)
        super().__init__(P_x, weight, op)
        self.label_smoothing = float(label_smoothing)


def _strays(target: Any, classes: int, ignore_index: int) -> tuple[int, int]:
    """This worker's lowest and highest class number, if one of them is out of range; else zeros.

    While a step is recorded they are zeros, and each replay checks the numbers that it gets.
    """
    if here.recorder is not None:
        if classes and target.dtype in CLASS_NUMBERS:
            _check_in_replay(target, classes, ignore_index)
        return 0, 0
    if not classes or not can_be_read(target) or target.dtype not in CLASS_NUMBERS:
        return 0, 0
    lowest, highest = _range(target)
    if lowest < 0 or highest >= classes:
        lowest, highest = _range(target[target.long() != ignore_index])
    return (lowest, highest) if lowest < 0 or highest >= classes else (0, 0)


@as_one_call
def _check_in_replay(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Raises: ValueError, on this worker, for a class number that is out of range."""
    lowest, highest = _range(target[target.long() != ignore_index])
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"a loss needs class numbers from 0 to {classes - 1}, or {ignore_index} to ignore a place; this worker has "
            f"{lowest if lowest < 0 else highest}"
        )


def _range(numbers: torch.Tensor) -> tuple[int, int]:
    lowest, highest = numbers.aminmax() if numbers.numel() else (0, 0)
    return int(lowest), int(highest)


def _nothing(target: Any, x: torch.Tensor) -> torch.Tensor:
    """In place of a target that is not read: nothing, which depends on the target if that requires a gradient."""
    depends = can_be_read(target) and target.requires_grad
    return zeros_on(target, (0,)) if depends else torch.empty(0, device=getattr(x, "device", None))
