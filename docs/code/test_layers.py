"""Tests of layers of one's own: against the sequential layer, in y, the gradient of x and those of all parameters."""

import affine
import affine_agreed
import pytest
import torch
from row_linear import DistributedRowLinear

import distdl
from distdl.geometry.boxes import runs
from distdl.nn.placement import parameter_layouts
from distdl.testing import Counting, assert_matches_sequential


# [reference]
class Affine(torch.nn.Module):
    def __init__(self, channels, space):
        super().__init__()
        shape = (1, channels, *[1] * space)
        seed = torch.Generator().manual_seed(0)
        self.scale = torch.nn.Parameter(torch.randn(shape, generator=seed, dtype=torch.float64))
        self.shift = torch.nn.Parameter(torch.randn(shape, generator=seed, dtype=torch.float64))

    def forward(self, x):
        return x * self.scale + self.shift


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# [values]
# each layer is tested on the first four of these workers; the fifth stays outside
WORKERS = [3, 0, 4, 1]
GRIDS = {
    "channels and space": ((1, 2, 2), None),
    "an empty block of space": ((1, 2, 2), [runs([2]), runs([2, 1]), runs([0, 6])]),
    "batch and space, uneven": ((2, 1, 2), [runs([1, 1]), runs([3]), runs([1, 5])]),
    "four workers for three channels": ((1, 4, 1), None),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("layer", [affine.DistributedAffine, affine_agreed.DistributedAffine])
def test_affine_matches_the_sequential_layer(layer, grid):
    shape, blocks = GRIDS[grid]

    def main():
        P = distdl.world().create_partition_inclusive(WORKERS).reshape(*shape)
        assert_matches_sequential(layer(P, channels=3).double(), Affine(3, space=1), noise(2, 3, 6), blocks)

    distdl.run_workers(main, workers=5)


@pytest.mark.parametrize("features", [7, 2])  # with 2, one of three workers has none
def test_row_linear_matches_the_sequential_layer(features):
    def main():
        P = distdl.world()
        layer = DistributedRowLinear(P[1:].reshape(1, 3), P[:1].reshape(1, 1), features, 4).double()
        reference = torch.nn.Linear(features, 4, bias=False).double()
        reference.weight.data = noise(4, features)
        assert_matches_sequential(layer, reference, noise(5, features))

    distdl.run_workers(main)


# [same]
def test_another_partition_begins_with_the_same_parameters():
    def values(*grid):
        P = distdl.world().reshape(*grid)
        torch.manual_seed(0)
        layer = affine.DistributedAffine(P, channels=3)
        (_, layout), *_ = parameter_layouts(layer).items()
        blocks = P.allgather_data(layer.scale.detach())
        return torch.cat([blocks[P.workers.ravel().tolist().index(worker)] for worker in layout], dim=1).flatten()

    two = distdl.run_workers(lambda: values(1, 2, 1), workers=2)
    four = distdl.run_workers(lambda: values(1, 2, 2), workers=4)
    assert torch.equal(two[0], four[0])


# [count]
AGREE = ["all_max"]


@pytest.mark.parametrize(("layer", "forward"), [
    (affine.DistributedAffine, [*AGREE, "broadcast", *AGREE, "broadcast"]),
    (affine_agreed.DistributedAffine, [*AGREE, "broadcast", "broadcast"]),
])  # fmt: skip
def test_affine_moves_its_two_parameters_and_nothing_else(layer, forward):
    def main():
        P = distdl.Partition(Counting(distdl.world().comm))
        network = layer(P.reshape(2, 1, 2), channels=3)
        x = torch.ones(1, 3, 5)
        network(x)
        P.comm.reset()
        network(x).sum().backward()
        assert [name for name, _ in P.comm.log] == [*forward, "sum", "sum"]

    distdl.run_workers(main)
