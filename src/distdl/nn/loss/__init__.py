"""The distributed losses: of elements, and of classes."""

from distdl.nn.loss.classes import DistributedCrossEntropyLoss, DistributedNLLLoss
from distdl.nn.loss.corrector import ZeroVolumeCorrectorFunction
from distdl.nn.loss.elements import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedHuberLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedLossBase,
    DistributedMSELoss,
    DistributedPoissonNLLLoss,
    DistributedSmoothL1Loss,
)

__all__ = [
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedCrossEntropyLoss",
    "DistributedHuberLoss",
    "DistributedKLDivLoss",
    "DistributedL1Loss",
    "DistributedLossBase",
    "DistributedMSELoss",
    "DistributedNLLLoss",
    "DistributedPoissonNLLLoss",
    "DistributedSmoothL1Loss",
    "ZeroVolumeCorrectorFunction",
]
