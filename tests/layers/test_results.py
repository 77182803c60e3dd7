"""What holds for the results of all layers: they are no views, and may be changed in place."""

import pytest
import torch
from helpers_layers import noise, on_workers

from distdl import nn
from distdl.geometry.boxes import runs
from distdl.partition.layout import Layout

LINE, ROWS, SQUARE = (1, 1, 3), (3, 1, 1), (1, 1, 3, 1)
NORMS = {
    "batch": lambda P: nn.DistributedBatchNorm(P, 4),
    "batch, no weights": lambda P: nn.DistributedBatchNorm(P, 4, affine=False),
    "evaluated batch": lambda P: nn.DistributedBatchNorm(P, 4).eval(),
    "evaluated batch, no weights": lambda P: nn.DistributedBatchNorm(P, 4, affine=False).eval(),
    "instance": lambda P: nn.DistributedInstanceNorm(P, 4, affine=True),
    "instance, no weights": lambda P: nn.DistributedInstanceNorm(P, 4),
    "tracked instance": lambda P: nn.DistributedInstanceNorm(P, 4, track_running_stats=True),
    "evaluated instance": lambda P: nn.DistributedInstanceNorm(P, 4, affine=True, track_running_stats=True).eval(),
    "group": lambda P: nn.DistributedGroupNorm(P, 2, 4),
    "group, no weights": lambda P: nn.DistributedGroupNorm(P, 2, 4, affine=False),
    "layer": lambda P: nn.DistributedLayerNorm(P, [4, 6]),
    "layer, no weights": lambda P: nn.DistributedLayerNorm(P, [4, 6], elementwise_affine=False),
    "rms": lambda P: nn.DistributedRMSNorm(P, [4, 6]),
}
POOLS = {
    "max pooling": lambda P: nn.DistributedMaxPool1d(P, 3, 1, 1),
    "max pooling of single cells": lambda P: nn.DistributedMaxPool1d(P, 1, 1),
    "average pooling": lambda P: nn.DistributedAvgPool1d(P, 2, 2),
    "average pooling of single cells": lambda P: nn.DistributedAvgPool1d(P, 1, 1),
    "power pooling": lambda P: nn.DistributedLPPool1d(P, 2.0, 2, 2),
    "adaptive average": lambda P: nn.DistributedAdaptiveAvgPool1d(P, 4),
    "adaptive average of single cells": lambda P: nn.DistributedAdaptiveAvgPool1d(P, 6),
    "adaptive maximum": lambda P: nn.DistributedAdaptiveMaxPool1d(P, 4),
    "adaptive maximum of single cells": lambda P: nn.DistributedAdaptiveMaxPool1d(P, 6),
}
OTHERS = {
    "nearest": lambda P: nn.DistributedUpsample(P, scale_factor=2, mode="nearest"),
    "linear": lambda P: nn.DistributedUpsample(P, scale_factor=2.0),
    "the same size": lambda P: nn.DistributedUpsample(P, scale_factor=1, mode="nearest"),
    "pad": lambda P: nn.DistributedPad(P, (1, 1)),
    "pad by nothing": lambda P: nn.DistributedPad(P, (0, 0)),
    "dropout": lambda P: nn.DistributedDropout(P, 0.5),
    "dropout of channels": lambda P: nn.DistributedDropout1d(P, 0.5),
    "dropout of nothing": lambda P: nn.DistributedDropout(P, 0.0),
    "evaluated dropout": lambda P: nn.DistributedDropout(P, 0.5).eval(),
    "convolution": lambda P: nn.DistributedConv1d(P, in_channels=4, out_channels=2, kernel_size=3, padding=1),
    "convolution of single cells": lambda P: nn.DistributedConv1d(P, in_channels=4, out_channels=2, kernel_size=1),
    "reflected": lambda P: nn.DistributedConv1d(
        P, in_channels=4, out_channels=2, kernel_size=3, padding=1, padding_mode="reflect"
    ),
    "transposed convolution": lambda P: nn.DistributedConvTranspose1d(
        P, in_channels=4, out_channels=2, kernel_size=3, padding=1
    ),
    "unreduced loss": lambda P: lambda x: nn.DistributedL1Loss(P, "none")(x, torch.zeros_like(x)),
    "repartition": lambda P: nn.Repartition(P, P),
}
LAYERS = {**NORMS, **POOLS, **OTHERS}
BLOCKS = {
    LINE: [runs([3]), runs([4]), runs([4, 0, 2])],
    ROWS: [runs([2, 0, 1]), runs([4]), runs([6])],
}


@pytest.mark.parametrize("grid", BLOCKS, ids=["space", "batch"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_result_is_no_view_and_can_be_changed_in_place(name, grid):
    """In front of an in-place activation: a second derivative comes past the same messages where a block is empty."""

    def main(P):
        torch.manual_seed(0)
        P_x = P[1:].reshape(grid)
        layer = LAYERS[name](P_x)
        if isinstance(layer, torch.nn.Module):
            layer.double()
        x = Layout.of(P_x, BLOCKS[grid]).block(noise(3, 4, 6) + 2).clone().requires_grad_()
        y = layer(x * 1)
        assert not y._is_view() and y.requires_grad
        found = []
        for in_place in (True, False):
            x = x.detach().requires_grad_()
            torch.manual_seed(1)
            layer = LAYERS[name](P_x) if "dropout" in name else layer
            y = layer(x * 1)
            y = y.relu_() if in_place else y.relu()
            (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            (dx**2).sum().backward()
            found.append((y.detach(), x.grad))
        if "dropout" not in name:  # (each layer draws its own)
            for one, other in zip(*found, strict=True):
                assert torch.equal(one, other)

    on_workers(4, main)
