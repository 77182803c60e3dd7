"""Every layer with parameters, split over four workers: sequential state_dicts go in and come out, to the last bit."""

import pytest
import torch
from saved_models import assert_equal, noise
from torch import nn
from torch.nn.utils import prune

import distdl
from distdl import nn as dnn


def grid(P, *shape):
    count = int(torch.Size(shape).numel())
    return P.create_partition_inclusive(range(count)).create_cartesian_topology_partition(shape)


LAYERS = {
    "linear": (
        lambda P: dnn.DistributedLinear(grid(P, 1, 2), grid(P, 1, 2), grid(P, 2, 2), 5, 7),
        lambda: nn.Linear(5, 7),
    ),
    "convolution": (
        lambda P: dnn.DistributedConv2d(grid(P, 1, 1, 2, 2), in_channels=3, out_channels=5, kernel_size=3),
        lambda: nn.Conv2d(3, 5, 3),
    ),
    "channels": (
        lambda P: dnn.DistributedChannelConv1d(
            grid(P, 1, 2, 1), grid(P, 1, 2, 1), grid(P, 2, 2, 1), in_channels=3, out_channels=5, kernel_size=3
        ),
        lambda: nn.Conv1d(3, 5, 3),
    ),
    "transposed": (
        lambda P: dnn.DistributedConvTranspose1d(grid(P, 1, 1, 4), in_channels=3, out_channels=5, kernel_size=3),
        lambda: nn.ConvTranspose1d(3, 5, 3),
    ),
    "batch norm": (lambda P: dnn.DistributedBatchNorm(grid(P, 1, 2, 2), 5), lambda: nn.BatchNorm1d(5)),
    "instance norm": (
        lambda P: dnn.DistributedInstanceNorm(grid(P, 1, 3, 1), 5, affine=True, track_running_stats=True),
        lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
    ),
    "group norm": (lambda P: dnn.DistributedGroupNorm(grid(P, 1, 2, 2), 2, 6), lambda: nn.GroupNorm(2, 6)),
    "layer norm": (lambda P: dnn.DistributedLayerNorm(grid(P, 1, 2, 2), (5, 3)), lambda: nn.LayerNorm((5, 3))),
    "embedding": (
        lambda P: dnn.DistributedEmbedding(grid(P, 1), grid(P, 1, 2), grid(P, 2, 2), 7, 5),
        lambda: nn.Embedding(7, 5),
    ),
    "pruned": (
        lambda P: pruned(dnn.DistributedLinear(grid(P, 1, 1), grid(P, 1, 4), grid(P, 4, 1), 5, 7)),
        lambda: pruned(nn.Linear(5, 7)),
    ),
    "weight norm": (
        lambda P: dnn.utils.weight_norm(dnn.DistributedLinear(grid(P, 1, 1), grid(P, 1, 4), grid(P, 4, 1), 5, 7)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 7)),
    ),
    "spectral norm": (
        lambda P: dnn.utils.spectral_norm(dnn.DistributedLinear(grid(P, 1, 1), grid(P, 1, 1), grid(P, 1, 1), 5, 7)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 7)),
    ),
}


def pruned(layer):
    """A layer of which nothing is pruned yet (the mask is loaded)."""
    return prune.identity(getattr(layer, "sublinear", layer), "weight") and layer


def filled(layer):
    for number, one in enumerate((*layer.parameters(), *layer.buffers())):
        one.data.copy_((noise(*one.shape, seed=number) if one.dim() else torch.tensor(number)).to(one.dtype))
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(name, tmp_path):
    split, sequential = LAYERS[name]
    alone = nn.ModuleDict({"layer": filled(sequential())})
    expected = dict(alone.state_dict())

    def work():
        P = distdl.world()
        layers = [nn.ModuleDict({"layer": split(P)}) for _ in range(2)]
        distdl.import_state(layers[0], expected)
        assert_equal(distdl.export_state(layers[0])[0], expected)
        distdl.save(tmp_path, layers[0])
        distdl.load(tmp_path, layers[1])
        assert_equal(distdl.export_state(layers[1])[0], expected)
        assert list(distdl.export_state(layers[1])[0]) == list(expected)

    distdl.run_workers(work, 4)
    other = nn.ModuleDict({"layer": sequential()})
    distdl.load(tmp_path, other)
    assert_equal(dict(other.state_dict()), expected)
