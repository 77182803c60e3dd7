"""What the losses of classes have in common: class numbers as targets, class weights, a class dim that may be split."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import or_
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional

from distdl.agreement import Agreement, Decision, can_be_read
from distdl.agreement.header import Carried, Headers
from distdl.exchange.route import Route, move
from distdl.geometry.boxes import Shape, shape
from distdl.nn.loss_base import (
    ABSENT,
    check_given,
    check_reduction,
    described,
    differentiable,
    loss_outside,
    sum_to_root,
)
from distdl.nn.module import Module, Option, stay, zeros_on
from distdl.partition import Partition
from distdl.partition.layout import Layout, Lookup
from distdl.plan import Plan
from distdl.plan.planners import broadcast, copy
from distdl.tensors.dtypes import HALVES, carries_gradients
from distdl.transport.label import Label

CLASS_NUMBERS = (torch.int64, torch.uint8)


@dataclass(frozen=True)
class Movements:
    """What follows from the headers: routes (None where nothing has to move), dtypes, and this worker's classes.

    Attributes:
        spread: the target, from the workers of class index 0 along classes: class numbers are copied, of probabilities
            each worker gets those of its classes.
        gather: what a loss needs to know of all classes, to the workers of class index 0.
        collect: the losses of places, along classes to the workers of class index 0.
        add: the sums, to the root.
        dtypes: of input, target and result.
        first: number of this worker's first class.
        classes: global number of classes.
        probabilities: whether targets are probabilities.
    """

    spread: Route | None
    gather: Route | None
    collect: Route | None
    add: Route
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    first: int
    classes: int
    probabilities: bool


class ClassLoss(Module):
    """Base of the losses of a class dim.

    Each worker computes, for each of its places, the share that its own classes have in the loss. Along classes the
    shares add up: on the workers of class index 0 for ``none``, in the sum on the worker of rank 0 else.
    """

    P_x = Option[Partition]()
    ignore_index = Option[int]()
    reduction = Option[str]()
    _valid_reductions: ClassVar[tuple[str, ...]] = ("none", "mean", "sum")
    takes_probabilities: ClassVar[bool] = False
    weight: torch.Tensor | None

    def __init__(
        self, P_x: Partition, weight: torch.Tensor | None, ignore_index: int, reduction: str, *options: Any
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_reduction(name, reduction, self._valid_reductions)
        if P_x.workers.ndim < 2:
            raise ValueError(f"{name} needs P_x: batch x classes x space; got {P_x}")
        self.P_x = P_x
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction = int(ignore_index), reduction
        self._places = P_x[:, :1]
        self._root = P_x.create_partition_inclusive([0])
        self.label = Label(f"{name} (P_x: {P_x}; {reduction})")
        self._classes = 0  # how many the members last agreed on; before that none, and nothing is said of class numbers
        weighted = None if weight is None else tuple(weight.shape)
        identity = (P_x.workers.shape, self.ignore_index, reduction, weighted, *options)
        self._agreement = Agreement.among(P_x, self.label, identity, self._derive, parts=(P_x, self._places, P_x))

    @abstractmethod
    def shares(self, x: torch.Tensor, target: torch.Tensor, go: Movements, carried: Carried) -> torch.Tensor:
        """What this worker's classes add to the loss of each of its places."""

    def gather_plan(self, owned: Layout, places: Partition, probabilities: bool) -> Plan | None:
        """What the workers of class index 0 have to know of the other classes; None if that is nothing."""
        return None

    def forward(self, x: torch.Tensor, target: Any = None) -> torch.Tensor:
        me = self.P_x.comm.rank
        if me not in self.P_x:
            return loss_outside(x, target, self.reduction)
        holds = me in self._places
        target = target if holds else _ignored(target, x)
        decision = self._agree(x, target)
        go, carried = decision.outcome, reduce(or_, decision.carried)
        x, target = stay(x.to(go.dtypes[0]), carried), target.to(go.dtypes[1])
        if go.spread is not None:
            target = move(go.spread, target, go.dtypes[1], (0,), decision.carried[1])
        shares = self.shares(x, target, go, carried)
        result = _result_dtype(go.dtypes[2], x.device.type)
        if self.reduction == "none":
            losses = shares if go.collect is None else move(go.collect, shares, shares.dtype, (0,), carried)
            losses = losses.to(result)
            # torch's own losses are views, if space has one dim or three; what works in place behind those may cut the
            # graph where a block is empty
            return losses.clone() if losses._is_view() else losses
        total = torch.stack([shares.double().sum(), self._divisor(target, go, holds)])
        total = move(go.add, total, total.dtype, (0,), carried)
        if not total.numel():
            return differentiable(total.sum().to(result))
        # the divisor is detached: rank 0 has to stay as linear as the others, whose second derivatives pass no sum here
        divisor = total[1].detach() if self.reduction == "mean" else 1.0
        return differentiable((total[0] / divisor).to(result))

    def counts(self, target: torch.Tensor) -> torch.Tensor:
        """What each place counts, in float64: the weight of its class, 0 where it is ignored."""
        counted = target != self.ignore_index
        if self.weight is None:
            return counted.double()
        return torch.where(counted, self.weight.double()[target.clamp(0, len(self.weight) - 1)], 0.0)

    def own_weight(self, x: torch.Tensor, go: Movements) -> torch.Tensor | None:
        """The weights of this worker's classes."""
        return None if self.weight is None else self.weight[go.first : go.first + x.shape[1]].to(x.dtype)

    def picked(self, x: torch.Tensor, target: torch.Tensor, go: Movements) -> tuple[torch.Tensor, torch.Tensor]:
        """The input at each place's class, and where this is one of this worker's classes and not to be ignored."""
        last = go.first + x.shape[1]
        here = (target >= go.first) & (target < last) & (target != self.ignore_index)
        at = (target - go.first).clamp(0, max(x.shape[1] - 1, 0)).unsqueeze(1)
        return filled(x, 0.0).gather(1, at).squeeze(1), here

    def _divisor(self, target: torch.Tensor, go: Movements, holds: bool) -> torch.Tensor:
        """This worker's part of what a mean divides by, in float64 so that counts are exact."""
        if self.reduction != "mean" or not holds:
            return torch.zeros((), dtype=torch.float64, device=target.device)
        if go.probabilities:
            places = prod(target.shape[:1] + target.shape[2:])
            return torch.full((), places, dtype=torch.float64, device=target.device)
        return self.counts(target).sum()

    def _agree(self, x: torch.Tensor, target: Any) -> Decision[Movements]:
        """Agree on the call, and that all class numbers are in range, by the number of classes last agreed on.

        Where that has changed, and it changes on all members alike, they agree again.
        """
        tensors = (x, target, ABSENT if self.weight is None else self.weight)
        decision = self._agreement.reach(tensors, self._strays(target))
        if decision.outcome.classes != self._classes:
            self._classes = decision.outcome.classes
            decision = self._agreement.reach(tensors, self._strays(target))
        return decision

    def _strays(self, target: Any) -> tuple[int, int]:
        """This worker's lowest and highest class number, if one of them is out of range; else zeros."""
        if not self._classes or not can_be_read(target) or target.dtype not in CLASS_NUMBERS:
            return 0, 0
        lowest, highest = _range(target)
        if lowest < 0 or highest >= self._classes:
            lowest, highest = _range(target[target.long() != self.ignore_index])
        return (lowest, highest) if lowest < 0 or highest >= self._classes else (0, 0)

    def _derive(self, headers: Headers) -> Movements:
        name, P_x, me = type(self).__name__, self.P_x, self.P_x.comm.rank
        owned = Layout.tiled(P_x, headers.shapes(P_x, name, P_x.workers.ndim))
        batch, own, *space = owned.intervals
        classes = owned.extents[1]
        if not classes:
            raise ValueError(f"{name} needs at least one class in dim 1; the global input is {list(owned.extents)}")
        self._check_weight(headers, classes)
        whole = Layout.of(self._places, [batch, [(0, classes)], *space])
        probabilities = self._check_targets(headers, whole)
        dtype, target = headers.dtype(P_x, name), headers.dtype(self._places, name, tensor=1)
        if not carries_gradients(dtype) or dtype.is_complex:
            raise ValueError(f"{name} needs an input of real floating-point numbers; got {dtype}")
        routes: dict[str, Plan | None] = {"spread": None, "gather": None, "collect": None}
        if len(own) > 1:
            numbers = Lookup(tuple(whole), lambda worker: _without_classes(shape(whole[worker])))
            along = broadcast(self._places, P_x, numbers, me)
            routes["spread"] = copy(whole, owned, me) if probabilities else along
            routes["gather"] = self.gather_plan(owned, self._places, probabilities)
            routes["collect"] = along.T
        return Movements(
            **{key: self._route(headers, plan) for key, plan in routes.items()},
            add=sum_to_root(headers, self._root, P_x, (2,), self.label),
            dtypes=(dtype, target, torch.promote_types(dtype, target))
            if probabilities
            else (dtype, torch.int64, dtype),
            first=owned[me][1][0],
            classes=classes,
            probabilities=probabilities,
        )

    def _route(self, headers: Headers, plan: Plan | None) -> Route | None:
        return None if plan is None else Route(plan, self.P_x.comm, headers.members, self.label)

    def _check_weight(self, headers: Headers, classes: int) -> None:
        name, workers = type(self).__name__, self.P_x.workers.ravel().tolist()
        shapes = {worker: headers.shape(worker, tensor=2) for worker in workers}
        check_given(name, "weight", {worker: found != ABSENT.shape for worker, found in shapes.items()})
        for worker, found in shapes.items():
            if found not in (ABSENT.shape, (classes,)):
                raise ValueError(
                    f"{name} needs a weight for each of {classes} classes; got {list(found)} on worker {worker}"
                )

    def _check_targets(self, headers: Headers, whole: Layout) -> bool:
        """Whether targets are probabilities.

        Raises: ValueError for targets of another shape, kind or dtype, or class numbers that are out of range.
        """
        name, classes = type(self).__name__, whole.extents[1]
        kinds = {self._is_probabilities(headers, worker, shape(whole[worker])) for worker in whole}
        if len(kinds) > 1:
            raise ValueError(f"{name} needs targets that are class numbers, or probabilities, on all workers alike")
        probabilities = kinds.pop()
        if probabilities and self.ignore_index >= 0:
            raise ValueError(
                f"{name} ignores no places by class where targets are probabilities; got {self.ignore_index}"
            )
        dtype = headers.dtype(self._places, name, tensor=1)
        if 0 not in whole.extents and not (dtype.is_floating_point if probabilities else dtype in CLASS_NUMBERS):
            needed = (
                "probabilities of a floating-point dtype" if probabilities else "class numbers of dtype torch.int64"
            )
            raise ValueError(f"{name} needs {needed} as targets; got {dtype}")
        extras = headers.extras(self._places).reshape(-1, 2)
        wrong = np.flatnonzero((extras[:, 0] < 0) | (extras[:, 1] >= classes))
        if len(wrong):
            lowest, highest = extras[wrong[0]].tolist()
            raise ValueError(
                f"{name} needs class numbers from 0 to {classes - 1}, or {self.ignore_index} to ignore a place; worker "
                f"{self._places.workers.flat[wrong[0]]} has {lowest if lowest < 0 else highest}"
            )
        return probabilities

    def _is_probabilities(self, headers: Headers, worker: int, x: Shape) -> bool:
        target, numbers = headers.shape(worker, tensor=1), _without_classes(x)
        if target == numbers or (target == x and self.takes_probabilities):
            return target == x
        alternative = f" (class numbers) or {list(x)} (probabilities)" if self.takes_probabilities else ""
        raise ValueError(
            f"{type(self).__name__} needs a target of shape {list(numbers)}{alternative} on worker {worker}; "
            f"got {list(target)}"
        )

    def extra_repr(self) -> str:
        options = [f"reduction={self.reduction}", f"ignore_index={self.ignore_index}", *described(self)]
        return f"P_x: {self.P_x}; {', '.join(options)}"


def filled(x: torch.Tensor, value: float) -> torch.Tensor:
    """x, or where this worker has none of the classes, one class of the given value that hangs on x."""
    return x if x.shape[1] else functional.pad(x, (0, 0) * (x.dim() - 2) + (0, 1), value=value)


def _ignored(target: Any, x: torch.Tensor) -> torch.Tensor:
    """In place of a target that is not read: nothing, which hangs on the target if that requires a gradient."""
    hangs = can_be_read(target) and target.requires_grad
    return zeros_on(target, (0,)) if hangs else torch.empty(0, device=getattr(x, "device", None))


def _range(numbers: torch.Tensor) -> tuple[int, int]:
    lowest, highest = numbers.aminmax() if numbers.numel() else (0, 0)
    return int(lowest), int(highest)


def _without_classes(extents: Shape) -> Shape:
    return extents[:1] + extents[2:]


def _result_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    return torch.float32 if dtype in HALVES and torch.is_autocast_enabled(device) else dtype
