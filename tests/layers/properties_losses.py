"""What the losses promise, as functions of a world of four workers."""

from functools import partial

import torch
from helpers_layers import noise
from helpers_losses import assert_loss_matches
from torch.nn import functional

from distdl.geometry.boxes import runs
from distdl.nn import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedCrossEntropyLoss,
    DistributedHuberLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedMSELoss,
    DistributedNLLLoss,
    DistributedPoissonNLLLoss,
    DistributedSmoothL1Loss,
)

BY_ELEMENT = {
    DistributedL1Loss: functional.l1_loss,
    DistributedMSELoss: functional.mse_loss,
    DistributedSmoothL1Loss: functional.smooth_l1_loss,
    DistributedHuberLoss: functional.huber_loss,
    DistributedPoissonNLLLoss: functional.poisson_nll_loss,
    DistributedBCELoss: functional.binary_cross_entropy,
    DistributedBCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
    DistributedKLDivLoss: functional.kl_div,
}
BY_CLASS = {DistributedNLLLoss: functional.nll_loss, DistributedCrossEntropyLoss: functional.cross_entropy}
SHAPES = {  # of P_x, and the extents of blocks along each dim
    "uneven": ((2, 2, 1), ([1, 3], [5, 2], [3])),
    "empty": ((1, 2, 2), ([3], [0, 4], [2, 0])),
    "batch split": ((4, 1, 1), ([2, 1, 1, 1], [3], [2])),
    "channel split": ((1, 4, 1), ([3], [2, 2, 1, 1], [2])),
    "double backward": ((2, 2, 1), ([2, 2], [2, 3], [2])),
}


def exact(P, kind, name):
    """Every reduction, for every split; the derivative of the derivative where it is asked for."""
    grid, extents = SHAPES[name]
    blocks = [runs(along) for along in extents]
    batch, classes, space = (sum(along) for along in extents)
    x, target = noise(batch, classes, space), torch.sigmoid(noise(batch, classes, space, seed=1))
    if kind is DistributedBCELoss:
        x = torch.sigmoid(x)
    if kind in BY_CLASS:
        target = torch.randint(0, classes, (batch, space), generator=torch.Generator().manual_seed(2))
    for reduction in ("none", "mean", "sum"):
        assert_loss_matches(
            kind(P.reshape(*grid), reduction=reduction),
            (BY_CLASS | BY_ELEMENT)[kind],
            x,
            target,
            blocks,
            classes=kind in BY_CLASS,
            twice=name == "double backward",
        )
    return "exact"


def none(P):
    return "none"


CELLS = {
    kind.__name__: {
        "stride": none,
        "dilation": none,
        "even kernel": none,
        "deep halo": none,
        **{name: partial(exact, kind=kind, name=name) for name in SHAPES},
        "padding modes": none,
    }
    for kind in (*BY_ELEMENT, *BY_CLASS)
}
