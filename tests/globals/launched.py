"""Tests that run on three workers, of which the last holds no cells, or fail on some."""

import functools

import pytest
import torch
from same import noise

import distdl
from distdl import GlobalTensor


def on_workers(function):
    """Run a test on three workers, of which the last holds no cells."""

    @functools.wraps(function)
    def run(**given):
        distdl.run_workers(lambda: function(**given), 3)

    return run


def split(x, *grid):
    """x over a grid, by default over two workers along its first dim."""
    grid = grid or (2, *[1] * (x.dim() - 1))
    P = distdl.world().create_partition_inclusive(range(torch.Size(grid).numel()))
    return distdl.distribute_tensor(x, P.create_cartesian_topology_partition(grid))


def assert_close(found, expected):
    whole = found.full_tensor() if isinstance(found, GlobalTensor) else found
    torch.testing.assert_close(whole.detach(), expected.detach(), rtol=1e-12, atol=1e-12)


class Calling(torch.nn.Module):
    """Two weights and a layer, and a forward that is given: ``forward(model, x)``. It may note what it has seen."""

    def __init__(self, forward):
        super().__init__()
        self.w, self.v = (torch.nn.Parameter(noise(5, seed=seed)) for seed in (1, 2))
        self.inner = torch.nn.Linear(5, 5, dtype=torch.float64)
        with torch.no_grad():
            self.inner.weight.copy_(noise(5, 5))
            self.inner.bias.copy_(noise(5))
        self.own, self.seen = forward, []

    def forward(self, x):
        return self.own(self, x)


def assert_told_apart(function, workers, text):
    """Call a function that fails on some workers only: each of them gets one error that says so, wherever it is."""
    told = []

    def work():
        try:
            function()
        except RuntimeError as error:
            told.append(error)

    with pytest.raises(distdl.CommunicationError):
        distdl.run_workers(work, workers)
    assert [type(error) for error in told] == [distdl.CommunicationError] * workers
    assert all(text in str(error) for error in told)
