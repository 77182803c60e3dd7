"""The distributed cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch.nn import functional

from distdl.agreement import Agreement
from distdl.boxes import Shape, shape
from distdl.exchange import Route, move
from distdl.header import Headers
from distdl.layout import Layout
from distdl.nn.loss_base import differentiable, sum_to_root
from distdl.nn.module import Module, local
from distdl.partition import Partition
from distdl.planning import copy


class DistributedCrossEntropyLoss(Module):
    r"""Cross-entropy of class scores that are cut up over batch, classes and space.

    Forward: the scores of all classes come together on the workers of class index 0; each sums the losses of its
    places; a sum-reduce adds those, and the weights of the targets for ``mean``, on the worker of rank 0 in P_x, which
    divides once. All other workers return a 0-d tensor of value 0.
    Adjoint: the transpose of both movements around torch's own derivative.

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
        another rank than P_x has axes, or a target that does not fit to it.
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if reduction not in ("none", "mean", "sum"):
            raise ValueError(f"{name} has the reductions none, mean, sum; got {reduction!r}")
        if P_x.workers.ndim < 2:
            raise ValueError(f"{name} needs P_x: batch x classes x space; got {P_x}")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"{name} needs label_smoothing from 0 to 1; got {label_smoothing}")
        self.P_x = P_x
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self._places = P_x[:, :1]
        self._root = P_x.create_partition_inclusive([0])
        self._name = f"{name} (P_x: {P_x}; {reduction})"
        options = (P_x.workers.shape, ignore_index, reduction, label_smoothing)
        self._agreement = Agreement.among(P_x, self._name, options, self._derive)

    def forward(self, x: torch.Tensor, target: Any = None) -> torch.Tensor:
        me = self.P_x.comm.rank
        if me not in self.P_x:
            return x.clone() if self.reduction == "none" else differentiable(x.sum())
        holds = me in self._places
        decision = self._agreement.reach((x, target if holds else torch.empty(0)))
        go = decision.outcome
        if go.gather is not None:
            x = move(go.gather, x, go.dtype, (0,), decision.carried[0])
        least_target = go.least if go.probabilities else go.least[:1] + go.least[2:]
        if not holds:
            target = torch.empty(0, dtype=go.dtype if go.probabilities else torch.int64, device=x.device)
        if self.reduction == "none":
            result = x.shape[:1] + x.shape[2:] if holds else (0,)
            return local(self._losses, result, (x, go.least), (target, least_target))
        total = local(self._sums, (2,) if holds else (0,), (x, go.least), (target, least_target))
        total = move(go.add, total, total.dtype, (0,), reduce(or_, decision.carried))
        if not total.numel():
            return differentiable(total.sum().to(go.dtype))
        # the divisor is detached: rank 0 has to stay as linear as the others, whose second derivatives pass no sum here
        divisor = total[1].detach() if self.reduction == "mean" else 1.0
        return differentiable((total[0] / divisor).to(go.dtype))

    def _losses(self, x: torch.Tensor, target: torch.Tensor, reduction: str = "none") -> torch.Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return functional.cross_entropy(
            x, target, weight, ignore_index=self.ignore_index, reduction=reduction, label_smoothing=self.label_smoothing
        )

    def _sums(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The sum of the losses and what it is divided by for ``mean``, in float64 so that counts are exact."""
        loss = self._losses(x, target, "sum").double()
        if target.shape == x.shape:
            return torch.stack([loss, loss.new_tensor(target.numel() / x.shape[1])])
        counted = target[target != self.ignore_index]
        if self.weight is None:
            return torch.stack([loss, loss.new_tensor(counted.numel())])
        return torch.stack([loss, self.weight.double()[counted].sum()])

    def _derive(self, headers: Headers) -> Movements:
        name, P_x, me = type(self).__name__, self.P_x, self.P_x.comm.rank
        owned = Layout.tiled(P_x, headers.shapes(P_x, name, P_x.workers.ndim))
        batch, _, *space = owned.intervals
        classes = owned.extents[1]
        if self.weight is not None and self.weight.shape != (classes,):
            raise ValueError(f"{name} needs a weight for each of {classes} classes; got {list(self.weight.shape)}")
        needed = Layout.of(self._places, [batch, [(0, classes)], *space])
        kinds = {self._is_probabilities(headers, worker, shape(needed[worker])) for worker in needed}
        if len(kinds) > 1:
            raise ValueError(f"{name} needs targets that are class numbers, or probabilities, on all workers alike")
        split = P_x.workers.shape[1] > 1
        gather = Route(copy(owned, needed, me), P_x.comm, headers.members, self._name) if split else None
        add = sum_to_root(headers, self._root, self._places, (2,), self._name)
        return Movements(gather, add, headers.dtype(P_x, name), (1, classes, *[1] * len(space)), kinds.pop())

    def _is_probabilities(self, headers: Headers, worker: int, x: Shape) -> bool:
        target = headers.shape(worker, tensor=1)
        if target not in (x, x[:1] + x[2:]):
            raise ValueError(
                f"{type(self).__name__} needs a target of shape {list(x[:1] + x[2:])} (class numbers) or {list(x)} "
                f"(probabilities) on worker {worker}; got {list(target)}"
            )
        return target == x


@dataclass(frozen=True)
class Movements:
    """What follows from the headers: the scores of all classes come together (if they are split), sums go to the root.

    Attributes:
        dtype: of the scores.
        least: shape of the smallest scores.
        probabilities: whether targets are probabilities.
    """

    gather: Route | None
    add: Route
    dtype: torch.dtype
    least: Shape
    probabilities: bool
