"""Layers, beside the sequential ones."""

from __future__ import annotations

import torch

import distdl
from distdl.geometry.boxes import runs
from distdl.nn import DistributedConv2d, DistributedCrossEntropyLoss, DistributedLinear, DistributedMaxPool2d
from distdl.testing import assert_matches_sequential


def check_layers_match_the_sequential_ones():
    P = distdl.world()
    seed = torch.Generator().manual_seed(3)

    def network(layer):
        layer = layer.double()
        for number, parameter in enumerate(layer.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).double()
        return layer

    side = 2 if P.size == 4 else 1
    square = P.reshape(1, 1, side, side)
    x = torch.randn(2, 2, 9, 7, generator=seed).double()
    uneven = [runs([2]), runs([2]), runs([1, 8] if side == 2 else [9]), runs([7, 0] if side == 2 else [7])]
    for blocks in (None, uneven):
        conv = DistributedConv2d(square, in_channels=2, out_channels=3, kernel_size=3, stride=2, padding=1).double()
        assert_matches_sequential(conv, network(torch.nn.Conv2d(2, 3, 3, 2, 1)), x, blocks)
        pool = DistributedMaxPool2d(square, 3, stride=2, padding=1)
        assert_matches_sequential(pool, torch.nn.MaxPool2d(3, 2, 1), x, blocks)
    P_w = P.reshape(side, side)
    rows, columns = P_w[:1], P_w[:, -1:].reshape(1, side)
    linear = DistributedLinear(rows, columns, P_w, 7, 5).double()
    assert_matches_sequential(linear, network(torch.nn.Linear(7, 5)), torch.randn(3, 7, generator=seed).double())


def check_cross_entropy_matches_the_sequential_one():
    P = distdl.world()
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(4)).double().requires_grad_()
    target = torch.tensor([0, 4, 2, 2, 1, 3])
    torch.nn.functional.cross_entropy(x, target).backward()
    grid = P.reshape(2, 2) if P.size == 4 else P.reshape(1, 1)
    rows = runs([4, 2]) if P.size == 4 else runs([6])
    columns = runs([3, 2]) if P.size == 4 else runs([5])
    row, column = (slice(*rows[grid.index[0]]), slice(*columns[grid.index[1]]))
    local = x.detach()[row, column].clone().requires_grad_()
    loss = DistributedCrossEntropyLoss(grid)(local, target[row] if grid.index[1] == 0 else None)
    expected = torch.nn.functional.cross_entropy(x, target).item() if P.rank == 0 else 0.0
    assert loss.dim() == 0 and abs(loss.item() - expected) < 1e-12
    loss.backward()
    assert torch.allclose(local.grad, x.grad[row, column], rtol=1e-12, atol=1e-14)
