"""The distributed losses: torch's losses of a tensor that is cut up over workers."""

from __future__ import annotations

from abc import abstractmethod
from functools import reduce
from operator import or_
from typing import ClassVar

import torch
from torch.nn import functional

from distdl.agreement import Agreement
from distdl.boxes import Shape
from distdl.exchange import Route, move
from distdl.header import Headers
from distdl.layout import Layout, Lookup
from distdl.nn.module import Module
from distdl.partition import Partition
from distdl.planning import broadcast


class DistributedLossBase(Module):
    r"""A loss of an input and a target that are cut up alike over ``P_x``.

    Forward: :math:`\ell = c^{-1} \sum_s f(x_s, t_s)` on the worker of rank 0 in P_x: each worker sums its elements, a
    sum-reduce adds them up, and the sum is divided once, by 1 (``sum``), the global number of elements (``mean``) or
    the global batch (``batchmean``). All other workers, those outside P_x too, return a 0-d tensor of value 0.
    Adjoint: a broadcast of the gradient from rank 0. Every worker calls ``backward()``; what the others pass has no
        effect.

    Args:
        P_x: the partition.
        reduction: ``none`` (each worker returns the loss of its own elements), ``mean`` or ``sum``.
    Shapes: input and target local, equal on each worker, in elements.
    Raises: ValueError, on every worker, for another reduction; in forward, on every member, if input and target differ
        in shape on some worker, or dtypes between workers.
    """

    _valid_reductions: ClassVar[tuple[str, ...]] = ("none", "mean", "sum")

    def __init__(self, P_x: Partition, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in self._valid_reductions:
            raise ValueError(
                f"{type(self).__name__} has the reductions {', '.join(self._valid_reductions)}; got {reduction!r}"
            )
        self.P_x = P_x
        self.reduction = reduction
        self._root = P_x.create_partition_inclusive([0])
        self._name = f"{type(self).__name__} (P_x: {P_x}; {reduction})"
        self._agreement = Agreement.among(P_x, self._name, P_x.workers.shape, self._derive)

    @abstractmethod
    def elements(self, x: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        """torch's loss of local tensors, with torch's reduction ``none`` or ``sum``."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.reduction == "none":
            return self.elements(x, target, "none")
        if self.P_x.comm.rank not in self.P_x:
            return differentiable(x.sum())
        decision = self._agreement.reach((x, target))
        route, dtypes, divisor = decision.outcome
        total = self.elements(x.to(dtypes[0]), target.to(dtypes[1]), "sum")
        total = move(route, total, total.dtype, (0,), reduce(or_, decision.carried))
        return differentiable(total / divisor if total.numel() else total.sum())

    def _derive(self, headers: Headers) -> tuple[Route, tuple[torch.dtype, torch.dtype], float]:
        name, P_x = type(self).__name__, self.P_x
        headers.check_alike(P_x, name, "input", "target")
        shapes = headers.shapes(P_x, name)
        divisor = 1.0
        if self.reduction == "mean":
            divisor = float(shapes.prod(axis=-1).sum())
        elif self.reduction == "batchmean":
            divisor = float(Layout.tiled(P_x, headers.shapes(P_x, name, P_x.workers.ndim)).extents[0])
        dtypes = (headers.dtype(P_x, name), headers.dtype(P_x, name, tensor=1))
        return sum_to_root(headers, self._root, P_x, (), self._name), dtypes, divisor


def sum_to_root(headers: Headers, root: Partition, P: Partition, shape: Shape, name: str) -> Route:
    """The sum of tensors of one shape over the workers of P, on the root."""
    shapes = Lookup(headers.members, lambda worker: shape)
    return Route(broadcast(root, P, shapes, P.comm.rank).T, P.comm, headers.members, name)


def differentiable(loss: torch.Tensor) -> torch.Tensor:
    """The loss, such that ``backward()`` may be called on it even if nothing that it depends on requires a gradient."""
    if torch.is_grad_enabled() and not loss.requires_grad:
        return loss + torch.empty(0, dtype=loss.dtype, device=loss.device, requires_grad=True).sum()
    return loss


class DistributedL1Loss(DistributedLossBase):
    r"""Mean absolute error: :math:`f(x, t) = \sum |x - t|`."""

    def elements(self, x: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        return functional.l1_loss(x, target, reduction=reduction)


class DistributedMSELoss(DistributedLossBase):
    r"""Mean squared error: :math:`f(x, t) = \sum (x - t)^2`."""

    def elements(self, x: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        return functional.mse_loss(x, target, reduction=reduction)


class DistributedPoissonNLLLoss(DistributedLossBase):
    r"""Negative log-likelihood of Poisson targets: :math:`f(x, t) = \sum e^x - t x`."""

    def elements(self, x: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        return functional.poisson_nll_loss(x, target, reduction=reduction)


class DistributedBCELoss(DistributedLossBase):
    r"""Binary cross-entropy of probabilities: :math:`f(x, t) = -\sum t \log x + (1 - t) \log(1 - x)`."""

    def elements(self, x: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        return functional.binary_cross_entropy(x, target, reduction=reduction)


class DistributedBCEWithLogitsLoss(DistributedLossBase):
    r"""Binary cross-entropy of the sigmoid of the input."""

    def elements(self, x: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(x, target, reduction=reduction)


class DistributedKLDivLoss(DistributedLossBase):
    r"""Kullback-Leibler divergence, x being log-probabilities: :math:`f(x, t) = \sum t (\log t - x)`."""

    _valid_reductions = ("none", "mean", "sum", "batchmean")

    def elements(self, x: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        return functional.kl_div(x, target, reduction=reduction)
