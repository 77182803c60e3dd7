"""Places of a loss of classes: what a worker knows of them, and how their shares become the loss.

Along classes the shares of a place add up, on the workers of class index 0; all places, and what a mean divides by, add
up on the first worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from operator import or_

import torch
from torch.nn import functional

from distdl.exchange import Operator, Together
from distdl.geometry.boxes import Shape, shape
from distdl.ops.loss import ABSENT, sum_to_first
from distdl.ops.setup import Site, same
from distdl.partition import Layout, Partition, Signature
from distdl.partition.layout import Lookup
from distdl.plan.planning import broadcast, copy
from distdl.tensors.connection import no_view
from distdl.tensors.derivatives import Derivatives
from distdl.tensors.dtypes import HALVES, carries_gradients

CLASS_NUMBERS = (torch.int64, torch.uint8)
Shares = tuple[torch.Tensor, torch.Tensor | None]  # of places, and a worker's part of what a mean divides by


@dataclass(frozen=True, eq=False)
class Places:
    """What a worker needs to know of its places and its classes.

    Attributes:
        site: where the loss is computed.
        first_of_each: the workers of class index 0, which have the targets.
        owned: layout of the scores.
        target: signature of the target.
        dtype: of the scores.
        result: that of the loss. Probabilities and their weights may have wider ones than scores.
        derivatives: what any of the tensors carries.
        ignore_index, reduction, probabilities: as in :class:`~distdl.ops.class_loss.CrossEntropy`.
    """

    site: Site
    first_of_each: Partition
    owned: Layout
    target: Signature
    dtype: torch.dtype
    result: torch.dtype
    derivatives: Derivatives
    local: Shape
    ignore_index: int
    reduction: str
    probabilities: bool

    @classmethod
    def of(
        cls,
        ignore_index: int,
        reduction: str,
        probabilities: bool,
        site: Site,
        x: Signature,
        target: Signature,
        weight: Signature | None,
    ) -> Places:
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
        given = [one for one in (x, target, weight) if one is not None]
        derivatives = reduce(or_, (one.derivatives for one in given))
        result = reduce(torch.promote_types, (one.dtype for one in given)) if probabilities else x.dtype
        return cls(
            site, target.layout.partition, x.layout, target, x.dtype, result, derivatives, x.local, ignore_index,
            reduction, probabilities,
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
        return self.owned.box_of(self.site.me)[1][0]

    @cached_property
    def holds(self) -> bool:
        """Whether this worker has targets."""
        return self.site.me in self.first_of_each

    @property
    def numbers(self) -> Lookup:
        """Shapes of class numbers."""
        layout = self.target.layout
        return Lookup(tuple(layout), lambda worker: without_classes(shape(layout[worker])))

    def move_in(self) -> Together:
        """The target, to all workers of its places: class numbers as they are, of probabilities each one's classes."""
        stay = self.site.identity(self.dtype, self.derivatives, self.local)
        if not self.is_split:
            return Together(stay)
        if self.probabilities:
            plan = copy(self.target.layout, self.owned, self.site.me)
        else:
            plan = broadcast(self.first_of_each, self.site.partition, self.numbers, self.site.me)
        blank = self.local if self.probabilities else without_classes(self.local)
        spread = self.site.operator(plan, self.target.dtype, self.target.derivatives, [self.target.local], [blank])
        return Together(stay, spread)

    def cast(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both in the dtypes that they are worked on: one that is empty may have come in another."""
        if not self.is_split and x.shape[1] != self.classes:
            # outside the partition; torch wants all classes, if of no place
            x = x.reshape(0, self.classes, *x.shape[2:])
            target = target.reshape(x.shape) if self.probabilities else target
        return x.to(self.dtype), target.to(self.target.dtype if self.probabilities else torch.int64)

    def weights(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Those of the classes, in the dtype of x if targets are no probabilities; None if there are none."""
        return None if weight is ABSENT else weight if self.probabilities else weight.to(x.dtype)

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
        return filled(x, 0.0).gather(1, at).squeeze(1), here


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

    def __call__(self, found: Shares) -> torch.Tensor:
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

    def __call__(self, found: Shares) -> torch.Tensor:
        shares, divisor = found
        result, total = _autocast(self.result, shares), shares.double().sum()
        if divisor is None:
            total, count = self.add(total), self.known
        else:
            total, count = self.add(total, divisor)
            # detached: the first worker has to stay as linear as the others, whose second derivatives pass no sum here
            count = count.detach()
        loss: torch.Tensor = total / count if total.numel() else total.sum()
        return loss.to(result)


def finishing(places: Places, moved: torch.dtype) -> _Each | _Total:
    """What is done with shares of one dtype."""
    site, result = places.site, places.result
    if places.reduction == "none":
        if not places.is_split:
            return _Each(same, result)
        plan = broadcast(places.first_of_each, site.partition, places.numbers, site.me).T
        return _Each(site.operator(plan, moved, places.derivatives, [without_classes(places.local)]), result)
    mean = places.reduction == "mean"
    counted = mean and not places.probabilities
    numbers: list[Shape] = [()] * (1 + counted)
    plan = sum_to_first(site, (2,) if counted else ())
    totals = numbers if site.me in plan.outputs else [(0,) for _ in numbers]
    add = site.operator(plan, torch.float64, places.derivatives, numbers, totals)
    known = prod(without_classes(places.owned.extents)) if mean else 1
    return _Total(add, result, known, counted, places.holds)


def _autocast(result: torch.dtype, beside: torch.Tensor) -> torch.dtype:
    """The dtype of a loss where autocast may be on."""
    return torch.float32 if result in HALVES and torch.is_autocast_enabled(beside.device.type) else result


def filled(x: torch.Tensor, value: float) -> torch.Tensor:
    """x, or where this worker has none of the classes, one class of the given value that depends on x."""
    return x if x.shape[1] else functional.pad(x, (0, 0) * (x.dim() - 2) + (0, 1), value=value)


def without_classes(extents: Shape) -> Shape:
    return extents[:1] + extents[2:]
