"""What the upsampling layer keeps of the sequential one, property by property, on a world of exactly 4 workers."""

import torch
from helpers_layers import noise, penalty
from torch.nn import functional

from distdl.geometry.boxes import runs
from distdl.nn import DistributedUpsample
from distdl.partition.layout import Layout
from distdl.testing import assert_matches_sequential


class Whole(torch.nn.Module):
    """torch's interpolation of the whole tensor, with the options of our layer."""

    def __init__(self, size=None, scale_factor=None, mode="linear", align_corners=False):
        super().__init__()
        corners = None if "nearest" in mode else align_corners
        self.options = (None if size is None else tuple(size[2:]), scale_factor, mode, corners)

    def forward(self, x):
        size, factor, mode, corners = self.options
        mode = {("linear", 4): "bilinear", ("linear", 5): "trilinear"}.get((mode, x.dim()), mode)
        return functional.interpolate(x, size, factor, mode, align_corners=corners)


def both_corners(mode):
    return (False,) if "nearest" in mode else (False, True)


def compare(P_x, x, mode, space=None, factor=None, blocks=None):
    for corners in both_corners(mode):
        size = None if space is None else (*x.shape[:2], *space)
        options = {"size": size, "scale_factor": factor, "mode": mode, "align_corners": corners}
        assert_matches_sequential(DistributedUpsample(P_x, **options), Whole(**options), x, blocks)
    return "exact"


def deep_halo(mode):
    """All cells but one on the last worker; the first computes outputs from all over the tensor."""

    def cell(P):
        blocks = [runs([2]), runs([1]), runs([1, 0, 0, 12]), runs([3])]
        return compare(P.reshape(1, 1, 4, 1), noise(2, 1, 13, 3), mode, (7, 6), blocks=blocks)

    return cell


def uneven(mode):
    def cell(P):
        blocks = [runs([2]), runs([1]), runs([1, 6]), runs([5, 1])]
        compare(P.reshape(1, 1, 2, 2), noise(2, 1, 7, 6), mode, (9, 11), blocks=blocks)
        return compare(P.reshape(1, 1, 2, 2), noise(2, 1, 7, 6), mode, factor=1.5, blocks=blocks)

    return cell


def empty(mode):
    """An empty block of x, and fewer outputs than workers."""

    def cell(P):
        blocks = [runs([2]), runs([1]), runs([3, 0, 4, 0]), runs([3])]
        compare(P.reshape(1, 1, 4, 1), noise(2, 1, 7, 3), mode, (9, 6), blocks=blocks)
        return compare(P.reshape(1, 1, 4, 1), noise(2, 1, 7, 3), mode, (2, 3), blocks=blocks)

    return cell


def batch_split(mode):
    return lambda P: compare(P.reshape(2, 1, 2, 1), noise(3, 2, 5, 4), mode, (8, 9))


def channel_split(mode):
    return lambda P: compare(P.reshape(1, 2, 1, 2), noise(2, 3, 5, 4), mode, (8, 9))


def double_backward(mode):
    def cell(P):
        P_x, x = P.reshape(1, 1, 2, 2), noise(1, 2, 5, 4).requires_grad_()
        layer = DistributedUpsample(P_x, scale_factor=2, mode=mode)
        reference = Whole(scale_factor=2, mode=mode)

        penalty(reference, x).backward()
        owned = Layout.balanced(P_x, x.shape)
        block = owned.block(x.detach()).clone().requires_grad_()
        penalty(layer, block).backward()
        assert torch.allclose(block.grad, owned.block(x.grad), rtol=1e-10, atol=1e-10)
        return "exact"

    return cell


def meaningless(P):
    return "none"


def properties(mode):
    return {
        "stride": meaningless,
        "dilation": meaningless,
        "even kernel": meaningless,
        "deep halo": deep_halo(mode),
        "uneven": uneven(mode),
        "empty": empty(mode),
        "batch split": batch_split(mode),
        "channel split": channel_split(mode),
        "double backward": double_backward(mode),
        "padding modes": meaningless,
    }


CELLS = {
    f"DistributedUpsample ({mode})": properties(mode) for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
}
