"""Tests that run on three workers, of which the last holds no cells."""

import functools

import torch

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
