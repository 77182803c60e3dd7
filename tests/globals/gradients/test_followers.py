"""What follows from weights and has no gradient, beside global tensors: indices, masks, statistics."""

import copy
import math

import pytest
import torch
from nets import assert_close, network, partition, run
from same import noise
from torch import nn
from torch.nn import functional as F

import distdl


class Using(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


def _indices(weight, count):
    return (weight[:count].detach().abs() * 7).long() % 3


def _set(x, weight):
    y = x * 1
    y[_indices(weight, 2)] = 0.0
    return y * x


FUNCTIONS = {
    "statistics": lambda x, w: F.batch_norm(x, w[:3].detach(), w[3:6].detach() ** 2, w[6:9], w[9:12]),
    "statistics of instances": lambda x, w: F.instance_norm(
        x, w[:3].detach(), w[3:6].detach() ** 2, w[6:9], w[9:12], use_input_stats=False
    ),
    "index": lambda x, w: x[_indices(w, 4)],
    "index_select": lambda x, w: x.index_select(2, _indices(w, 4)),
    "topk": lambda x, w: x.index_select(2, w[:11].topk(3).indices) * w[:3],
    "index_put": lambda x, w: x.index_put((_indices(w, 2),), w[:11].detach()),
    "index_add": lambda x, w: x.index_add(0, _indices(w, 2), x[:2]),
    "repeat_interleave": lambda x, w: x.repeat_interleave(_indices(w, 4) + 1, 0),
    "gather": lambda x, w: x.gather(2, _indices(w, 11).expand(4, 3, 11)),
    "set": _set,
    "mask": lambda x, w: x.masked_fill(w[:11].detach() > 0, 0.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("grid", [(1, 1, 2), (2, 1, 1), (1, 2, 1)])
def test_gradients(name, grid):
    def work():
        sequential = network(lambda: Using(FUNCTIONS[name]))
        model = distdl.distribute(copy.deepcopy(sequential), partition(grid), fallback="silent")
        x = noise(4, 3, 11, seed=3)
        ours = distdl.distribute_tensor(x, partition(grid)).requires_grad_()
        found = torch.autograd.grad(model(ours).square().sum(), [ours, model.weight], allow_unused=True)
        x.requires_grad_()
        expected = torch.autograd.grad(sequential(x).square().sum(), [x, sequential.weight], allow_unused=True)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                assert_close(one, other, tolerance=1e-9)

    run(work, math.prod(grid))
