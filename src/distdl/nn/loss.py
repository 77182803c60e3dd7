"""The distributed element-wise losses: torch's losses of a tensor that is cut up over workers."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from distdl.agreement import can_be_read
from distdl.nn.loss_base import DistributedLossBase
from distdl.nn.loss_base import ZeroVolumeCorrectorFunction as ZeroVolumeCorrectorFunction  # a published name
from distdl.nn.module import Option
from distdl.partition import Partition
from distdl.tensors.dtypes import can_be_added


class DistributedL1Loss(DistributedLossBase):
    r"""Mean absolute error: :math:`f(x, t) = \sum |x - t|`."""

    _operator = functional.l1_loss

    def __init__(self, P_x: Partition, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction)


class DistributedMSELoss(DistributedLossBase):
    r"""Mean squared error: :math:`f(x, t) = \sum (x - t)^2`."""

    _operator = functional.mse_loss

    def __init__(self, P_x: Partition, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction)


class DistributedSmoothL1Loss(DistributedLossBase):
    r"""Quadratic near zero, :math:`|x - t| - \beta/2` beyond: :math:`\sum \tfrac{1}{2\beta} (x - t)^2` for
    :math:`|x - t| < \beta`.

    Raises: ValueError, on every worker, for a negative beta.
    """

    beta = Option[float]()
    _operator = functional.smooth_l1_loss

    def __init__(self, P_x: Partition, reduction: str = "mean", beta: float = 1.0) -> None:
        if not beta >= 0:
            raise ValueError(f"DistributedSmoothL1Loss needs a beta of at least 0; got {beta}")
        super().__init__(P_x, reduction, beta=float(beta))


class DistributedHuberLoss(DistributedLossBase):
    r"""Quadratic near zero, linear beyond: :math:`\tfrac12 (x - t)^2` for :math:`|x - t| < \delta`, else
    :math:`\delta (|x - t| - \delta/2)`.

    Raises: ValueError, on every worker, for a delta that is not positive.
    """

    delta = Option[float]()
    _operator = functional.huber_loss

    def __init__(self, P_x: Partition, reduction: str = "mean", delta: float = 1.0) -> None:
        if not delta > 0:
            raise ValueError(f"DistributedHuberLoss needs a positive delta; got {delta}")
        super().__init__(P_x, reduction, delta=float(delta))


class DistributedPoissonNLLLoss(DistributedLossBase):
    r"""Negative log-likelihood of Poisson targets: :math:`f(x, t) = \sum e^x - t x`; without ``log_input``
    :math:`\sum x - t \log(x + \epsilon)`; with ``full``, plus Stirling's approximation of :math:`\log t!` where t > 1.
    """

    log_input = Option[bool]()
    full = Option[bool]()
    eps = Option[float]()
    _operator = functional.poisson_nll_loss

    def __init__(
        self, P_x: Partition, reduction: str = "mean", log_input: bool = True, full: bool = False, eps: float = 1e-8
    ) -> None:
        super().__init__(P_x, reduction, log_input=log_input, full=full, eps=eps)


class DistributedBCELoss(DistributedLossBase):
    r"""Binary cross-entropy of probabilities: :math:`f(x, t) = -\sum w (t \log x + (1 - t) \log(1 - x))`.

    ``weight`` is this worker's block, as the input is, or broadcasts to it.
    """

    _operator = functional.binary_cross_entropy

    def __init__(self, P_x: Partition, reduction: str = "mean", weight: torch.Tensor | None = None) -> None:
        super().__init__(P_x, reduction, weight)

    def is_out_of_range(self, x: Any, target: Any) -> bool:
        tensors = [one.detach() for one in (x, target) if can_be_read(one)]
        return any(
            one.numel() and not bool(((one >= 0) & (one <= 1)).all())
            for one in tensors
            if can_be_added(one.dtype) and not one.is_complex()
        )


class DistributedBCEWithLogitsLoss(DistributedLossBase):
    r"""Binary cross-entropy of the sigmoid of the input:
    :math:`f(x, t) = -\sum w (p\, t \log \sigma(x) + (1 - t) \log(1 - \sigma(x)))`.

    ``weight`` w is this worker's block, as the input is, or broadcasts to it. ``pos_weight`` p, often one number for
    each class, is the same global tensor on every worker. It broadcasts to the global input, of which P_x then needs
    one axis for each dim, and each worker takes its part.
    """

    _operator = functional.binary_cross_entropy_with_logits

    def __init__(
        self,
        P_x: Partition,
        reduction: str = "mean",
        weight: torch.Tensor | None = None,
        pos_weight: torch.Tensor | None = None,
    ) -> None:
        super().__init__(P_x, reduction, weight, pos_weight)


class DistributedKLDivLoss(DistributedLossBase):
    r"""Kullback-Leibler divergence, x being log-probabilities: :math:`f(x, t) = \sum t (\log t - x)`; with
    ``log_target`` t are log-probabilities, too: :math:`\sum e^t (t - x)`.
    """

    _valid_reductions = ("none", "mean", "sum", "batchmean")
    log_target = Option[bool]()
    _operator = functional.kl_div

    def __init__(self, P_x: Partition, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(P_x, reduction, log_target=log_target)
