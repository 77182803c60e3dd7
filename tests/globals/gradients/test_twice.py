"""Layers whose weights their own input follows from, as it does where a layer is used twice, or weights are tied.

The gradient of each use is that of this use alone, also where it can be differentiated once more.
"""

import copy
import math

import pytest
import torch
from nets import assert_close, batch, network, partition, run
from torch import nn

import distdl
import distdl.nn as dnn


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.sin(self.layer(x)) + 0.3 * x)


def _differentiated(model, x):
    """The gradients of x and of a model's parameters, and those of the square of the gradient of x."""
    y = model(x.requires_grad_())
    given = [x, *model.parameters()]
    first = torch.autograd.grad((y * y.cos()).sum(), given, create_graph=True)
    first[0].square().sum().backward()
    return [*first, *(one.grad for one in given)]


LAYERS = {
    "convolution": lambda: nn.Conv1d(3, 3, 3, padding=1),
    "circular convolution": lambda: nn.Conv1d(3, 3, 5, padding=2, padding_mode="circular"),
    "transposed convolution": lambda: nn.ConvTranspose1d(3, 3, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "group norm": lambda: nn.GroupNorm(1, 3),
    "instance norm": lambda: nn.InstanceNorm1d(3, affine=True),
    "layer norm": lambda: nn.LayerNorm(11),
    "rms norm": lambda: nn.RMSNorm(11),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("grid", [(1, 1, 3), (2, 1, 2)])
def test_a_layer_that_is_used_twice(layer, grid):
    def work():
        sequential = network(lambda: Twice(LAYERS[layer]()))
        model = distdl.distribute(copy.deepcopy(sequential), partition(grid), fallback="error")
        x, _ = batch(0)
        ours = _differentiated(model, distdl.distribute_tensor(x, partition(grid)))
        theirs = _differentiated(sequential, x)
        assert len(ours) == len(theirs) >= 4
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other, tolerance=1e-9)

    run(work, math.prod(grid))


def test_a_module_that_is_used_twice():
    def work():
        P = partition((1, 1, 3))
        sequential = network(lambda: Twice(nn.Conv1d(3, 3, 3, padding=1)))
        layer = dnn.DistributedConv1d(P, in_channels=3, out_channels=3, kernel_size=3, padding=1).double()
        if P.rank == 0:
            layer.load_state_dict(sequential.layer.state_dict())
        x, _ = batch(0)
        ours = _differentiated(Twice(layer), distdl.distribute_tensor(x, P))
        theirs = _differentiated(sequential, x)
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if place % 3 == 0 or P.rank == 0:  # (which has the weights)
                assert_close(one, other, tolerance=1e-9)

    run(work, 3)
