"""Which geometries each normalisation takes, one function for each, on exactly four workers of any back-end."""

import torch
from helpers_layers import filled, noise

from distdl.geometry.boxes import runs
from distdl.nn import (
    DistributedBatchNorm,
    DistributedGroupNorm,
    DistributedInstanceNorm,
    DistributedLayerNorm,
    DistributedRMSNorm,
)
from distdl.partition.layout import Layout
from distdl.testing import assert_matches_sequential


class Published(torch.nn.Module):
    """torch's batch norm with the parameters of the published interface: gamma and beta, in all dims of x."""

    def __init__(self, channels, dim, affine=True, **options):
        super().__init__()
        self.inner = torch.nn.BatchNorm1d(channels, affine=False, **options)
        if affine:
            self.gamma = torch.nn.Parameter(torch.ones(1, channels, *[1] * (dim - 2)))
            self.beta = torch.nn.Parameter(torch.zeros(1, channels, *[1] * (dim - 2)))

    def forward(self, x):
        y = self.inner(x.flatten(2) if x.dim() > 2 else x).reshape(x.shape)
        return y * self.gamma + self.beta if hasattr(self, "gamma") else y


# the layer over a partition of 3 axes and its reference, for an input of the shape 4 x 6 x 5
PAIRS = {
    "DistributedBatchNorm": lambda P: (DistributedBatchNorm(P, 6), Published(6, 3)),
    "DistributedGroupNorm": lambda P: (DistributedGroupNorm(P, 2, 6), torch.nn.GroupNorm(2, 6)),
    "DistributedInstanceNorm": lambda P: (
        DistributedInstanceNorm(P, 6, affine=True),
        torch.nn.InstanceNorm1d(6, affine=True),
    ),
    "DistributedLayerNorm": lambda P: (DistributedLayerNorm(P, [6, 5]), torch.nn.LayerNorm([6, 5])),
    "DistributedRMSNorm": lambda P: (DistributedRMSNorm(P, 5), torch.nn.RMSNorm(5)),
}


def pair(make, P_x):
    layer, reference = make(P_x)
    return layer.double(), filled(reference)


def exact(make, grid, blocks=None):
    """In training mode, and then in evaluation mode, over a partition of this shape."""

    def cell(P):
        layer, reference = pair(make, P.reshape(grid))
        for mode in (True, False):
            assert_matches_sequential(layer.train(mode), reference.train(mode), noise(4, 6, 5) + 3, blocks)
        return "exact"

    return cell


def second_derivatives(make, P_x, x, blocks=None):
    """Check the gradient of a penalty on the gradient, by x and by all parameters."""
    layer, reference = pair(make, P_x)
    for (name, layout), parameter in zip(layer.parameter_layouts.items(), reference.parameters(), strict=True):
        if name in dict(layer.named_parameters()):
            layer.get_parameter(name).data = layout.block(parameter.data).clone()
    owned = Layout.balanced(P_x, x.shape) if blocks is None else Layout.of(P_x, blocks)
    whole = x.clone().requires_grad_()
    block = owned.block(x).clone().requires_grad_()
    for network, one in ((reference, whole), (layer, block)):
        (dx,) = torch.autograd.grad((network(one) ** 4).sum(), one, create_graph=True)
        (dx**2).sum().backward()
    close(block.grad, owned.block(whole.grad), whole.grad)
    for (name, layout), parameter in zip(layer.parameter_layouts.items(), reference.parameters(), strict=True):
        if name in dict(layer.named_parameters()) and parameter.grad is not None:
            close(layer.get_parameter(name).grad, layout.block(parameter.grad), parameter.grad)


def close(ours, theirs, scale):
    assert ours.shape == theirs.shape
    assert not ours.numel() or (ours - theirs).abs().max() <= 1e-9 * scale.abs().max()


def doubly(make):
    def cell(P):
        second_derivatives(make, P.reshape(2, 1, 2), noise(4, 6, 5), [runs([0, 4]), runs([6]), runs([2, 3])])
        second_derivatives(make, P.reshape(1, 4, 1), noise(4, 6, 5), [runs([4]), runs([1, 3, 0, 2]), runs([5])])
        return "exact"

    return cell


def meaningless(P):
    return "none"


CELLS = {
    name: {
        "stride": meaningless,
        "dilation": meaningless,
        "even kernel": meaningless,
        "deep halo": meaningless,
        "uneven": exact(make, (2, 2, 1), [runs([1, 3]), runs([5, 1]), runs([5])]),
        "empty": exact(make, (1, 2, 2), [runs([4]), runs([0, 6]), runs([5, 0])]),
        "batch split": exact(make, (4, 1, 1)),
        "channel split": exact(make, (1, 4, 1)),
        "double backward": doubly(make),
        "padding modes": meaningless,
    }
    for name, make in PAIRS.items()
}
