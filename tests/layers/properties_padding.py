"""What :class:`DistributedPad` promises, as functions of a world of four workers."""

import torch
from helpers_layers import noise, penalty
from torch.nn import functional

from distdl.geometry.boxes import runs
from distdl.nn import DistributedPad
from distdl.testing import assert_matches_sequential

ROW = (1, 1, 4)


class Sequential(torch.nn.Module):
    def __init__(self, padding, mode, value=0.0):
        super().__init__()
        self.options = (padding, mode, value if mode == "constant" else None)

    def forward(self, x):
        return functional.pad(x, *self.options)


def exact(P, shape, padding, mode="constant", sizes=None, grid=ROW):
    blocks = None if sizes is None else [runs([n]) for n in shape[:-1]] + [runs(sizes)]
    layer = DistributedPad(P.reshape(*grid), padding, mode)
    assert_matches_sequential(layer, Sequential(padding, mode), noise(*shape), blocks)
    return "exact"


def none(P):
    return "none"


def padding_modes(P):
    for mode in ("constant", "reflect", "replicate", "circular"):
        exact(P, (2, 1, 9), (2, 1), mode)
    return "exact"


def double_backward(P):
    layer = DistributedPad(P.reshape(*ROW), (2, 1), "reflect")
    whole = noise(1, 1, 5).requires_grad_()

    penalty(Sequential((2, 1), "reflect"), whole).backward()
    cells = slice(*runs([2, 0, 2, 1])[P.rank])
    x = whole.detach()[..., cells].clone().requires_grad_()
    penalty(layer, x).backward()
    assert torch.allclose(x.grad, whole.grad[..., cells], rtol=1e-10, atol=1e-12)
    return "exact"


CELLS = {
    "DistributedPad": {
        "stride": none,
        "dilation": none,
        "even kernel": none,
        "deep halo": lambda P: exact(P, (1, 1, 7), (6, 5), "reflect"),
        "uneven": lambda P: exact(P, (1, 1, 9), (2, 2), "circular", [1, 5, 1, 2]),
        "empty": lambda P: exact(P, (1, 1, 6), (3, 3), "circular", [0, 5, 0, 1]),
        "batch split": lambda P: exact(P, (3, 2, 5), (2, 1), "replicate", grid=(2, 1, 2)),
        "channel split": lambda P: exact(P, (2, 3, 5), (2, 1), "reflect", grid=(1, 2, 2)),
        "double backward": double_backward,
        "padding modes": padding_modes,
    }
}
