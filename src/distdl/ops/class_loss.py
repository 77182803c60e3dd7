"""Losses of classes: scores that may be split over batch, classes and space, and class numbers as targets.

The scores stay where they are. Each worker computes, for each of its places, the share that its own classes have in the
loss; along classes the shares add up.

    P_x: 1x3             worker 0         worker 1         worker 2
                         scores of C0     scores of C1     scores of C2
    move_in, spread      t ------------>  t ------------>  t               class numbers (or its part of probabilities)
    gather (entropy)     L <------------  L1 <-----------  L2              the log of each one's sum of exponentials
    add                  loss <---------  share <--------  share           and what ``mean`` divides by
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.nn import functional

from distdl.geometry.boxes import balanced, shape
from distdl.ops.class_places import Places, Shares, filled, finishing, without_classes
from distdl.ops.setup import Setup, Site
from distdl.partition import Layout, Signature
from distdl.plan.planning import copy
from distdl.tensors.connection import local
from distdl.tensors.dtypes import HALVES


@dataclass(frozen=True, eq=False)
class ClassSetup(Setup):
    """The setup of a loss of classes.

    Attributes:
        classes: how many there are.
    """

    classes: int = 0


@dataclass(frozen=True)
class NegativeLogLikelihood:
    r"""Negative log-likelihood: the share of a worker is :math:`-w_{t_i} x_{i, t_i}` where it has the class of place i.

    It is set up for input, target and a weight for each class. The target lives on the workers of class index 0, and
    has one class in its layout. The weight may be None; then it is called with :data:`~distdl.ops.loss.ABSENT` in its
    place.

    Attributes:
        ignore_index: places of this class count nothing.
        reduction: ``none``, ``mean`` or ``sum``.
    """

    ignore_index: int
    reduction: str

    def setup(self, site: Site, x: Signature, target: Signature, weight: Signature | None = None) -> ClassSetup:
        places = Places.of(self.ignore_index, self.reduction, False, site, x, target, weight)
        moved = torch.float32 if x.dtype in HALVES else x.dtype
        finish = finishing(places, moved)

        def shares(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> Shares:
            scores, target = places.cast(scores, target)
            picked, here = places.picked(scores, target)
            counts = places.counts(target, weight)
            share = torch.where(here, -counts.to(moved) * picked.to(moved), 0.0)
            return share, finish.divisor(target, counts)

        return ClassSetup(places.move_in(), shares, finish, classes=places.classes)


@dataclass(frozen=True)
class CrossEntropy:
    r"""Cross-entropy: :math:`\sum_k q_{ik} (L_i - x_{ik})` at place i, with :math:`L_i = \log \sum_k e^{x_{ik}}`.

    Each worker computes :math:`L^s_i` over its own classes and its share :math:`-\sum_{k \in s} q_{ik} x_{ik}`. The
    workers of class index 0 gather the former, one column from each worker, and add
    :math:`L_i = \log \sum_s e^{L^s_i}`.

    It is set up as :class:`NegativeLogLikelihood` is; probabilities have all classes in their layout.

    Attributes:
        ignore_index, reduction: as of that.
        label_smoothing: from 0 to 1.
        probabilities: whether targets are the distributions q, and no class numbers.
    """

    ignore_index: int
    reduction: str
    label_smoothing: float = 0.0
    probabilities: bool = False

    def check(self, name: str) -> None:
        """Check the options.

        Raises: ValueError that names the layer.
        """
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"{name} needs label_smoothing from 0 to 1; got {self.label_smoothing}")

    def setup(self, site: Site, x: Signature, target: Signature, weight: Signature | None = None) -> ClassSetup:
        if self.probabilities and self.ignore_index >= 0:
            raise ValueError(
                f"{site.label.kind} ignores no places by class where targets are probabilities; got {self.ignore_index}"
            )
        places = Places.of(self.ignore_index, self.reduction, self.probabilities, site, x, target, weight)
        if places.is_split:
            return self._split(site, x.layout, places)
        finish = finishing(places, x.dtype)

        def losses(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> Shares:
            scores, target = places.cast(scores, target)
            found = functional.cross_entropy(
                scores, target, places.weights(weight, scores), ignore_index=self.ignore_index, reduction="none",
                label_smoothing=self.label_smoothing,
            )  # fmt: skip
            return found, finish.divisor(target, places.counts(target, weight) if finish.counted else None)

        return ClassSetup(places.move_in(), losses, finish, classes=places.classes)

    def _split(self, site: Site, owned: Layout, places: Places) -> ClassSetup:
        finish = finishing(places, torch.float64)
        batch, own, *space = owned.intervals
        # dims: which of what a worker sends (the log of its sum, and of probabilities their sum), places, and workers
        # along classes in the midst of these
        each, parts = 1 + self.probabilities, len(own)
        sent, needed = (
            Layout.along(P.reshape(1, *P.workers.shape), [[(0, each)], batch, along, *space])
            for P, along in ((owned.partition, balanced(parts, parts)), (places.first_of_each, [(0, parts)]))
        )
        inputs = [without_classes(places.local)] * each
        outputs = [shape(needed[site.me])[1:] if places.holds else (0,)] * each
        gather = site.operator(copy(sent, needed, site.me), torch.float64, places.derivatives, inputs, outputs=outputs)
        least = (1,) * owned.partition.workers.ndim

        def shares(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
            scores, target = places.cast(scores, target)
            scores = scores.float() if scores.dtype in HALVES else scores
            largest = filled(scores, -inf).detach().amax(1, keepdim=True)
            top = largest.masked_fill(largest == -inf, 0.0)
            share, mass, counts = self._cross(scores, target, weight, top, places)
            logs = _log_of_sum(scores, top)
            ignored = None if self.probabilities else target == self.ignore_index
            return share, logs, mass, ignored, finish.divisor(target, counts)

        def losses(found: tuple[Any, ...]) -> torch.Tensor:
            share, logs, mass, ignored, divisor = found
            if self.probabilities:
                weighted = local(_weighted_log_of_parts, share.shape, *((one, least) for one in gather(logs, mass)))
                return finish((weighted - share, divisor))
            weighted = local(_weighted_log, share.shape, (gather(logs), least), (mass, least[1:]))
            return finish(((weighted - share).masked_fill(ignored, 0.0), divisor))

        return ClassSetup(places.move_in(), shares, losses, classes=places.classes)

    def _cross(
        self, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, top: torch.Tensor, places: Places
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        r"""This worker's :math:`\sum_k q_{ik} x_{ik}`, and :math:`\sum_k q_{ik}`, in float64; and what places count.

        The sum of q is over all classes for class numbers, which all workers know, and else over this worker's.
        """
        z, top = x - top, top.squeeze(1).double()
        own = places.weights(weight, x)
        own = None if own is None else own[places.first : places.first + x.shape[1]]
        keep, smooth = 1 - self.label_smoothing, self.label_smoothing / places.classes
        if self.probabilities:
            q = keep * target + smooth
            q = q if own is None else q * _along_classes(own, q)
            mass = q.sum(1, dtype=torch.float64)
            return (q * z).sum(1).double() + mass * top, mass, None
        picked, here = places.picked(x, target)
        counts = places.counts(target, weight)
        share, mass = keep * torch.where(here, counts * picked.double(), 0.0), keep * counts
        if smooth:
            weighted = z if own is None else z * _along_classes(own, z)
            total = places.classes if own is None else weight.double().sum()
            share = share + smooth * (
                weighted.sum(1).double() + (z.shape[1] if own is None else own.double().sum()) * top
            )
            mass = mass + smooth * total
        return share, mass, counts


def _along_classes(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight.reshape(-1, *[1] * (x.dim() - 2))


def _weighted_log(logs: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    r""":math:`L_i \sum_k q_{ik}`, of the logs of all workers along classes."""
    return mass * logs.logsumexp(1)


def _weighted_log_of_parts(logs: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """The same, where each worker has a part of the sum."""
    return _weighted_log(logs, masses.sum(1))


def _log_of_sum(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    r""":math:`\log \sum_k e^{x_{ik}}` over this worker's classes, in float64.

    It is minus infinity where they add nothing, and its derivative then 0 (that of ``torch.logsumexp`` is nan).
    """
    sums = (filled(x, -inf) - top).exp().sum(1).double()
    nothing = sums == 0
    return torch.where(nothing, -inf, sums.masked_fill(nothing, 1.0).log() + top.squeeze(1))
