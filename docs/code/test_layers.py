"""Tests of your own layers: against the sequential layer, in y, the gradient of x and those of all parameters."""

import affine
import affine_agreed
import pytest
import torch
from row_linear import DistributedRowLinear

import distdl
from distdl.geometry import runs
from distdl.nn.placement import parameter_layouts
from distdl.ops import Site
from distdl.partition import Layout, Signature
from distdl.tensors.derivatives import Derivatives
from distdl.testing import Counting, Silent, assert_matches_sequential
from distdl.transport import Label


# [reference]
class Affine(torch.nn.Module):
    def __init__(self, channels, space):
        super().__init__()
        extents = (1, channels, *[1] * space)
        seed = torch.Generator().manual_seed(0)
        self.scale = torch.nn.Parameter(torch.randn(extents, generator=seed, dtype=torch.float64))
        self.shift = torch.nn.Parameter(torch.randn(extents, generator=seed, dtype=torch.float64))

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
    places, blocks = GRIDS[grid]

    def main():
        P = distdl.world().create_partition_inclusive(WORKERS).reshape(*places)
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


# [setup]
@pytest.mark.parametrize("me", range(4))
def test_the_parameters_of_the_setup_go_to_all_workers_of_their_channels(me):
    P = distdl.Partition(Silent(me, size=4)).reshape(1, 2, 2)
    stored = Layout.balanced(P[:, :, :1], (1, 3, 1))
    owned = Layout.of(P, [runs([2]), runs([2, 1]), runs([1, 6])])
    tensors = [
        Signature(layout, torch.float32, Derivatives(), layout.shapes[me] if me in layout.partition else (0,))
        for layout in (owned, stored, stored)
    ]
    setup = affine_agreed.Affine(dim=1).setup(Site(P, (0, 1, 2, 3), Label("DistributedAffine")), *tensors)
    keep, spread = setup.move_in.operators
    assert keep.still and repr(spread).endswith(f"  {me // 2 * 2}: {me // 2 * 2}, {me // 2 * 2 + 1}")
    channels = 2 - me // 2
    assert spread.outputs == ((1, channels, 1), (1, channels, 1)) and setup.results[0][me] == owned[me]


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


@pytest.mark.parametrize(("layer", "calls"), [
    (affine.DistributedAffine, [*AGREE, "broadcast", *AGREE, "broadcast", "sum", "sum"]),
    (affine_agreed.DistributedAffine, [*AGREE, "broadcast", "sum"]),
])  # fmt: skip
def test_affine_moves_its_two_parameters_and_nothing_else(layer, calls):
    def main():
        P = distdl.Partition(Counting(distdl.world().comm))
        network = layer(P.reshape(2, 1, 2), channels=3)
        x = torch.ones(1, 3, 5)
        network(x)
        P.comm.reset()
        network(x).sum().backward()
        assert [name for name, _ in P.comm.log] == calls

    distdl.run_workers(main)


# [errors]
@pytest.mark.parametrize(("given", "text"), [
    ((1, 1, 4), r"DistributedAffine \(P_x: 1x2x1 on workers 0, 1; 3 channels\) needs the blocks of dim 1 at "
                r"\[\(0, 2\), \(2, 3\)\], .*; those of an input of shape 1x2x4 are at \[\(0, 1\), \(1, 2\)\]"),
    ((1, 4), "needs tensors with 3 dims .* worker 0 has one with 2 dims"),
])  # fmt: skip
def test_what_does_not_fit_is_the_same_error_on_all(given, text):
    def main():
        P = distdl.world().reshape(1, 2, 1)
        layer = affine_agreed.DistributedAffine(P, channels=3)
        with pytest.raises(ValueError, match=text) as error:
            layer(torch.ones(given))
        texts = P.allgather_data(str(error.value))
        assert texts == [texts[0]] * 2
        return layer(torch.ones(1, 2 - P.rank, 4)).shape  # and both of them can go on

    distdl.run_workers(main, workers=2)


# [options]
def test_its_options_are_kept_and_the_shift_can_be_left_out():
    def main():
        P = distdl.world().reshape(1, 2, 1)
        layer = affine_agreed.DistributedAffine(P, channels=3, shift=False)
        assert repr(layer) == "DistributedAffine(P_x: 1x2x1 on workers 0, 1; channels=3)"
        with pytest.raises(AttributeError, match="build a new layer with another channels"):
            layer.channels = 4
        x = torch.ones(1, 2 - P.rank, 4)
        assert torch.equal(layer(x), layer.scale * x)

    distdl.run_workers(main, workers=2)
