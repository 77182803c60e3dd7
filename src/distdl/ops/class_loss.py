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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from math import inf, prod
from operator import or_
from typing import Any

import torch
from torch.nn import functional

from distdl.exchange import Operator, Together
from distdl.geometry.boxes import Shape, balanced, shape
from distdl.ops.loss import ABSENT, differentiable, sum_to_first
from distdl.ops.setup import Setup, Site, same
from distdl.partition import Layout, Partition, Signature
from distdl.partition.layout import Lookup
from distdl.plan.planners import broadcast, copy
from distdl.tensors.connection import local, no_view
from distdl.tensors.derivatives import Derivatives
from distdl.tensors.dtypes import HALVES, carries_gradients

CLASS_NUMBERS = (torch.int64, torch.uint8)
_Shares = tuple[torch.Tensor, torch.Tensor | None]  # of places, and a worker's part of what a mean divides by


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
        places = _Places.of(self, False, site, x, target, weight)
        moved = torch.float32 if x.dtype in HALVES else x.dtype
        finish = _finish(places, moved)

        def shares(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> _Shares:
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
        places = _Places.of(self, self.probabilities, site, x, target, weight)
        if places.is_split:
            return self._split(site, x.layout, places)
        finish = _finish(places, x.dtype)

        def losses(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> _Shares:
            scores, target = places.cast(scores, target)
            own = None if weight is ABSENT else weight.to(scores.dtype)
            found = functional.cross_entropy(
                scores, target, own, ignore_index=self.ignore_index, reduction="none",
                label_smoothing=self.label_smoothing,
            )  # fmt: skip
            return found, finish.divisor(target, places.counts(target, weight) if finish.counted else None)

        return ClassSetup(places.move_in(), losses, finish, classes=places.classes)

    def _split(self, site: Site, owned: Layout, places: _Places) -> ClassSetup:
        finish = _finish(places, torch.float64)
        batch, own, *space = owned.intervals
        # dims: which of what a worker sends (the log of its sum, and of probabilities their sum), places, and workers
        # along classes in the midst of these
        each, parts = 1 + self.probabilities, len(own)
        sent, needed = (
            Layout.of(P.reshape(1, *P.workers.shape), [[(0, each)], batch, along, *space])
            for P, along in ((owned.partition, balanced(parts, parts)), (places.first_of_each, [(0, parts)]))
        )
        inputs = [_without_classes(places.local)] * each
        outputs = [shape(needed[site.me])[1:] if places.holds else (0,)] * each
        gather = site.operator(copy(sent, needed, site.me), torch.float64, places.derivatives, inputs, outputs=outputs)
        least = (1,) * owned.partition.workers.ndim

        def shares(scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
            scores, target = places.cast(scores, target)
            scores = scores.float() if scores.dtype in HALVES else scores
            largest = _filled(scores, -inf).detach().amax(1, keepdim=True)
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
        self, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, top: torch.Tensor, places: _Places
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        r"""This worker's :math:`\sum_k q_{ik} x_{ik}`, and :math:`\sum_k q_{ik}`, in float64; and what places count.

        The sum of q is over all classes for class numbers, which all workers know, and else over this worker's.
        """
        z, top = x - top, top.squeeze(1).double()
        own = None if weight is ABSENT else weight[places.first : places.first + x.shape[1]].to(x.dtype)
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


@dataclass(frozen=True, eq=False)
class _Places:
    """What a worker needs to know of its places and its classes.

    Attributes:
        site: where the loss is computed.
        first_of_each: the workers of class index 0, which have the targets.
        owned: layout of the scores.
        target: signature of the target.
        dtype: of the scores.
        derivatives: what any of the tensors carries.
        ignore_index, reduction, probabilities: as in the loss.
    """

    site: Site
    first_of_each: Partition
    owned: Layout
    target: Signature
    dtype: torch.dtype
    derivatives: Derivatives
    local: Shape
    ignore_index: int
    reduction: str
    probabilities: bool

    @classmethod
    def of(
        cls,
        op: NegativeLogLikelihood | CrossEntropy,
        probabilities: bool,
        site: Site,
        x: Signature,
        target: Signature,
        weight: Signature | None,
    ) -> _Places:
        """Raises: ValueError for tensors that do not fit."""
        kind, extents = site.label.kind, x.layout.extents
        if not extents[1]:
            raise ValueError(f"{kind} needs at least one class in dim 1; the global input is {list(extents)}")
        if weight is not None and weight.local != (extents[1],):
            raise ValueError(f"{kind} needs a weight for each of {extents[1]} classes; got {list(weight.local)}")
        fits = target.dtype.is_floating_point if probabilities else target.dtype in CLASS_NUMBERS
        if 0 not in extents and not fits:
            needed = (
                "probabilities of a floating-point dtype" if probabilities else "class numbers of dtype torch.int64"
            )
            raise ValueError(f"{kind} needs {needed} as targets; got {target.dtype}")
        if not carries_gradients(x.dtype) or x.dtype.is_complex:
            raise ValueError(f"{kind} needs an input of real floating-point numbers; got {x.dtype}")
        derivatives = reduce(or_, (one.derivatives for one in (x, target, weight) if one is not None))
        return cls(
            site, target.layout.partition, x.layout, target, x.dtype, derivatives, x.local, op.ignore_index,
            op.reduction, probabilities,
        )  # fmt: skip

    @cached_property
    def classes(self) -> int:
        return self.owned.extents[1]

    @cached_property
    def is_split(self) -> bool:
        """Whether classes are split."""
        return len(self.owned.intervals[1]) > 1

    @cached_property
    def first(self) -> int:
        """The number of this worker's first class."""
        return self.owned[self.site.me][1][0]

    @cached_property
    def holds(self) -> bool:
        """Whether this worker has targets."""
        return self.site.me in self.first_of_each

    @property
    def numbers(self) -> Lookup:
        """Shapes of class numbers."""
        layout = self.target.layout
        return Lookup(tuple(layout), lambda worker: _without_classes(shape(layout[worker])))

    def move_in(self) -> Together:
        """The target, to all workers of its places: class numbers as they are, of probabilities each one's classes."""
        stay = self.site.identity(self.dtype, self.derivatives, self.local)
        if not self.is_split:
            return Together(stay)
        if self.probabilities:
            plan = copy(self.target.layout, self.owned, self.site.me)
        else:
            plan = broadcast(self.first_of_each, self.site.partition, self.numbers, self.site.me)
        spread = self.site.operator(plan, self.target.dtype, self.target.derivatives, [self.target.local])
        return Together(stay, spread)

    def cast(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both in the dtypes that they are worked on: one that is empty may have come in another."""
        return x.to(self.dtype), target.to(self.target.dtype if self.probabilities else torch.int64)

    def counts(self, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """What each place counts, in float64: the weight of its class, 0 where it is ignored."""
        counted = target != self.ignore_index
        if weight is ABSENT:
            return counted.double()
        return torch.where(counted, weight.double()[target.clamp(0, len(weight) - 1)], 0.0)

    def picked(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The score at each place's class, and where this is one of this worker's classes and not to be ignored."""
        first = self.first
        here = (target >= first) & (target < first + x.shape[1]) & (target != self.ignore_index)
        at = (target - first).clamp(0, max(x.shape[1] - 1, 0)).unsqueeze(1)
        return _filled(x, 0.0).gather(1, at).squeeze(1), here


@dataclass(frozen=True, eq=False)
class _Each:
    """From the shares of places to their losses, on the workers of class index 0.

    Attributes:
        collect: adds the shares up along classes.
        result: the dtype of the losses.
    """

    collect: Callable[[torch.Tensor], torch.Tensor]
    result: torch.dtype
    counted = False  # nothing is divided

    def divisor(self, target: torch.Tensor, counts: torch.Tensor | None) -> None:
        """Nothing."""

    def __call__(self, found: _Shares) -> torch.Tensor:
        shares = found[0]
        return no_view(self.collect(shares).to(_autocast(self.result, shares)))


@dataclass(frozen=True, eq=False)
class _Total:
    """From the shares of places to the loss, on the first worker.

    Attributes:
        add: adds up the sums of shares, and what is counted.
        result: the dtype of the loss.
        known: what the total is divided by, if that does not depend on the targets.
        counted: whether it does.
        holds: whether this worker counts.
    """

    add: Operator
    result: torch.dtype
    known: int
    counted: bool
    holds: bool

    def divisor(self, target: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor | None:
        """This worker's part of what a mean divides by, in float64 so that counts are exact."""
        if not self.counted:
            return None
        if counts is None or not self.holds:
            return torch.zeros((), dtype=torch.float64, device=target.device)
        return counts.sum()

    def __call__(self, found: _Shares) -> torch.Tensor:
        shares, divisor = found
        result, total = _autocast(self.result, shares), shares.double().sum()
        if divisor is None:
            total, count = self.add(total), self.known
        else:
            total, count = self.add(total, divisor)
            # detached: the first worker has to stay as linear as the others, whose second derivatives pass no sum here
            count = count.detach()
        return differentiable((total / count if total.numel() else total.sum()).to(result))


def _finish(places: _Places, moved: torch.dtype) -> _Each | _Total:
    """What is done with shares of one dtype."""
    site = places.site
    result = torch.promote_types(places.dtype, places.target.dtype) if places.probabilities else places.dtype
    if places.reduction == "none":
        if not places.is_split:
            return _Each(same, result)
        plan = broadcast(places.first_of_each, site.partition, places.numbers, site.me).T
        return _Each(site.operator(plan, moved, places.derivatives, [_without_classes(places.local)]), result)
    mean = places.reduction == "mean"
    counted = mean and not places.probabilities
    numbers: list[Shape] = [()] * (1 + counted)
    plan = sum_to_first(site, (2,) if counted else ())
    totals = numbers if site.me in plan.outputs else [(0,) for _ in numbers]
    add = site.operator(plan, torch.float64, places.derivatives, numbers, totals)
    known = prod(_without_classes(places.owned.extents)) if mean else 1
    return _Total(add, result, known, counted, places.holds)


def _autocast(result: torch.dtype, beside: torch.Tensor) -> torch.dtype:
    """The dtype of a loss where autocast may be on."""
    return torch.float32 if result in HALVES and torch.is_autocast_enabled(beside.device.type) else result


def _filled(x: torch.Tensor, value: float) -> torch.Tensor:
    """x, or where this worker has none of the classes, one class of the given value that depends on x."""
    return x if x.shape[1] else functional.pad(x, (0, 0) * (x.dim() - 2) + (0, 1), value=value)


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
    sums = (_filled(x, -inf) - top).exp().sum(1).double()
    nothing = sums == 0
    return torch.where(nothing, -inf, sums.masked_fill(nothing, 1.0).log() + top.squeeze(1))


def _without_classes(extents: Shape) -> Shape:
    return extents[:1] + extents[2:]
