"""Compiled steps of networks that are written by hand, of the layers of ``distdl.nn``."""

import re

import pytest
import torch
from torch import nn

import distdl
from distdl.nn import (
    DistributedConv2d,
    DistributedCrossEntropyLoss,
    DistributedLinear,
    DistributedMaxPool2d,
    Repartition,
)

BATCH = 5


def network_of(P):
    """Rows of images over two workers, then features over them. Worker 0 has the scores."""
    rows = P.reshape(1, 1, 2, 1)
    network = nn.Sequential(
        DistributedConv2d(rows, in_channels=1, out_channels=4, kernel_size=3), nn.Tanh(),
        DistributedMaxPool2d(rows, kernel_size=2, stride=2),
        Repartition(rows, P.reshape(1, 2, 1, 1)),
        nn.Flatten(),
        DistributedLinear(P.reshape(1, 2), P[:1].reshape(1, 1), P.reshape(1, 2), 36, 6),
    ).double()  # fmt: skip
    draw = torch.Generator().manual_seed(P.rank)
    with torch.no_grad():
        for one in network.parameters():
            one.copy_(0.3 * torch.randn(one.shape, generator=draw))
    return network


def stepped(compiled, *, wrong_at=None, steps=7):
    """Losses, weights and gradients after some steps, and whether the last of them was a replay."""
    P = distdl.world()
    network, criterion = network_of(P), DistributedCrossEntropyLoss(P[:1].reshape(1, 1))
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

    def step(x, target):
        loss = criterion(network(x), target)
        loss.backward()
        return loss.detach()

    wrapped = distdl.compile(step) if compiled else step
    losses = []
    for number in range(steps):
        draw = torch.Generator().manual_seed(number)
        images = torch.randn(BATCH, 1, 9, 8, generator=draw).double()
        target = torch.randint(0, 6, (BATCH,), generator=draw)
        target[1] = -100
        if number == wrong_at:
            target[2] = 6
        optimiser.zero_grad()
        block = images[:, :, :5] if P.rank == 0 else images[:, :, 5:]
        losses.append(wrapped(block.clone(), target if P.rank == 0 else None))
        optimiser.step()
    weights = [one.detach() for one in network.parameters()]
    return [*losses, *weights, *(one.grad for one in network.parameters())], wrapped


def test_replays_have_the_bits_of_the_step_as_it_is():
    def both():
        (ours, wrapped), (theirs, _) = stepped(True), stepped(False)
        assert all(one.line is not None for one in wrapped.programs), wrapped.explain()
        return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    assert distdl.run_workers(both, 2) == [True, True]


@pytest.mark.parametrize("number", [1, 2, 6], ids=["recorded", "recorded again", "replayed"])
def test_a_wrong_class_number_is_an_error_in_a_compiled_step(number):
    with pytest.raises(ValueError, match=re.escape("class numbers from 0 to 5, or -100 to ignore a place")) as caught:
        distdl.run_workers(lambda: stepped(True, wrong_at=number), 2)
    assert "has 6" in str(caught.value)
