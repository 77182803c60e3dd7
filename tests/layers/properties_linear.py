"""What :class:`DistributedLinear` promises, as functions of a world of four workers."""

import torch
from helpers_layers import filled, noise, penalty, take_weights

from distdl.geometry.boxes import runs
from distdl.nn import DistributedLinear
from distdl.partition.layout import Layout
from distdl.testing import assert_matches_sequential


def grid(P):
    return P[1:3].reshape(1, 2), P[2:].reshape(1, 2), P.reshape(2, 2)


def exact(P, partitions, extents=(3, 7), blocks=None):
    layer = DistributedLinear(*partitions, 7, 5).double()
    blocks = None if blocks is None else [runs(sizes) for sizes in blocks]
    assert_matches_sequential(layer, filled(torch.nn.Linear(7, 5)), noise(*extents), blocks)
    return "exact"


def none(P):
    return "none"


def batch_split(P):
    exact(P, (P.reshape(2, 2), P[1:3].reshape(2, 1), P.reshape(2, 1, 2)))
    return exact(P, (P.reshape(2, 2, 1), P.reshape(2, 2, 1), P.reshape(2, 2, 1, 1)), (3, 5, 7))


def double_backward(P):
    layer, reference = DistributedLinear(*grid(P), 7, 5).double(), filled(torch.nn.Linear(7, 5))
    take_weights(layer, reference)
    whole = noise(3, 7).requires_grad_()

    penalty(reference, whole).backward()
    owned = Layout.balanced(layer.P_x, whole.shape)
    x = owned.block(whole.detach()).clone().requires_grad_()
    penalty(layer, x).backward()
    assert torch.allclose(x.grad, owned.block(whole.grad) if P.rank in layer.P_x else x.grad, rtol=1e-10, atol=1e-12)
    weights = layer.parameter_layouts["sublinear.weight"]
    assert torch.allclose(layer.sublinear.weight.grad, weights.block(reference.weight.grad), rtol=1e-10, atol=1e-12)
    return "exact"


CELLS = {
    "DistributedLinear": {
        "stride": none,
        "dilation": none,
        "even kernel": none,
        "deep halo": none,
        "uneven": lambda P: exact(P, grid(P), blocks=[[3], [1, 6]]),
        "empty": lambda P: exact(P, grid(P), blocks=[[3], [0, 7]]),
        "batch split": batch_split,
        "channel split": lambda P: exact(P, grid(P)),
        "double backward": double_backward,
        "padding modes": none,
    }
}
