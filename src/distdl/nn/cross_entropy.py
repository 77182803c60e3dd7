"""The distributed cross-entropy."""

from __future__ import annotations

from math import inf

import torch
from torch.nn import functional

from distdl.agreement.header import Carried
from distdl.exchange.route import move
from distdl.geometry.boxes import balanced
from distdl.nn.class_loss import ClassLoss, Movements, filled
from distdl.nn.module import Option, local
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.plan import Plan
from distdl.plan.planners import copy
from distdl.tensors.dtypes import HALVES


class DistributedCrossEntropyLoss(ClassLoss):
    r"""Cross-entropy of class scores that are cut up over batch, classes and space.

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
    takes_probabilities = True

    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"{type(self).__name__} needs label_smoothing from 0 to 1; got {label_smoothing}")
        super().__init__(P_x, weight, ignore_index, reduction, float(label_smoothing))
        self.label_smoothing = float(label_smoothing)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, label_smoothing={self.label_smoothing}"

    def gather_plan(self, owned: Layout, places: Partition, probabilities: bool) -> Plan:
        """One column from each worker along classes, the log of its sum; with probabilities, theirs is another one."""
        batch, own, *space = owned.intervals
        columns = len(own) * (1 + probabilities)
        sent = Layout.of(owned.partition, [batch, balanced(columns, len(own)), *space])
        return copy(sent, Layout.of(places, [batch, [(0, columns)], *space]), owned.partition.comm.rank)

    def shares(self, x: torch.Tensor, target: torch.Tensor, go: Movements, carried: Carried) -> torch.Tensor:
        if go.gather is None:
            weight = None if self.weight is None else self.weight.to(x.dtype)
            ignored, smoothing = self.ignore_index, self.label_smoothing
            return functional.cross_entropy(
                x, target, weight, ignore_index=ignored, reduction="none", label_smoothing=smoothing
            )
        x = x.float() if x.dtype in HALVES else x
        largest = filled(x, -inf).detach().amax(1, keepdim=True)
        top = largest.masked_fill(largest == -inf, 0.0)
        share, mass = self._cross(x, target, go, top)
        columns = torch.stack([_log_of_sum(x, top), mass] if go.probabilities else [_log_of_sum(x, top)], 1)
        gathered = move(go.gather, columns, columns.dtype, (0,), carried)
        known, ones = None if go.probabilities else mass, (1,) * (x.dim() - 2)
        least = (1, columns.shape[1] * self.P_x.workers.shape[1], *ones)
        losses = local(_weighted_log, share.shape, (gathered, least), (known, (1, *ones))) - share
        return losses if go.probabilities else losses.masked_fill(target == self.ignore_index, 0.0)

    def _cross(
        self, x: torch.Tensor, target: torch.Tensor, go: Movements, top: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        r"""This worker's :math:`\sum_k q_{ik} x_{ik}`, and :math:`\sum_k q_{ik}`, in float64.

        The latter is over all classes for class numbers, which all workers know, and else over this worker's.
        """
        z, weight, top = x - top, self.own_weight(x, go), top.squeeze(1).double()
        keep, smooth = 1 - self.label_smoothing, self.label_smoothing / go.classes
        if go.probabilities:
            q = keep * target + smooth
            q = q if weight is None else q * _along_classes(weight, q)
            mass = q.sum(1, dtype=torch.float64)
            return (q * z).sum(1).double() + mass * top, mass
        picked, here = self.picked(x, target, go)
        counts = self.counts(target)
        share, mass = keep * torch.where(here, counts * picked.double(), 0.0), keep * counts
        if smooth:
            own = z if weight is None else z * _along_classes(weight, z)
            total = go.classes if self.weight is None else self.weight.double().sum()
            share = share + smooth * (
                own.sum(1).double() + (z.shape[1] if weight is None else weight.double().sum()) * top
            )
            mass = mass + smooth * total
        return share, mass


def _along_classes(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight.reshape(-1, *[1] * (x.dim() - 2))


def _weighted_log(columns: torch.Tensor, mass: torch.Tensor | None) -> torch.Tensor:
    r""":math:`L_i \sum_k q_{ik}` of the columns that came; every other one is a mass, if none is given."""
    if mass is None:
        columns, mass = columns[:, ::2], columns[:, 1::2].sum(1)
    return mass * columns.logsumexp(1)


def _log_of_sum(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    r""":math:`\log \sum_k e^{x_{ik}}` over this worker's classes, in float64.

    It is minus infinity where they add nothing, and its derivative then 0 (that of ``torch.logsumexp`` is nan).
    """
    sums = (filled(x, -inf) - top).exp().sum(1).double()
    nothing = sums == 0
    return torch.where(nothing, -inf, sums.masked_fill(nothing, 1.0).log() + top.squeeze(1))
