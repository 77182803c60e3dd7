"""The distributed negative log-likelihood."""

from __future__ import annotations

import torch

from distdl.agreement.header import Carried
from distdl.nn.class_loss import ClassLoss, Movements
from distdl.partition import Partition
from distdl.tensors.dtypes import HALVES


class DistributedNLLLoss(ClassLoss):
    r"""Negative log-likelihood of log-probabilities that are cut up over batch, classes and space.

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

    def __init__(
        self,
        P_x: Partition,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(P_x, weight, ignore_index, reduction)

    def shares(self, x: torch.Tensor, target: torch.Tensor, go: Movements, carried: Carried) -> torch.Tensor:
        picked, here = self.picked(x, target, go)
        picked = picked.float() if picked.dtype in HALVES else picked
        return torch.where(here, -self.counts(target).to(picked.dtype) * picked, 0.0)
