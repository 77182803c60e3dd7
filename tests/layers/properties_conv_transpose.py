"""What the transposed convolutions keep, property by property, on four workers of any back-end.

``CELLS[layer][property](P)`` asserts that the layer matches the sequential one in y, the gradient of x and those of all
parameters and returns "exact"; or that every worker raises the same ValueError, and returns "refused".
"""

from functools import partial

import torch
from helpers_layers import filled, noise, take_weights

from distdl.geometry.boxes import runs
from distdl.nn import DistributedConvTranspose1d, DistributedConvTranspose2d, DistributedConvTranspose3d
from distdl.partition.layout import Layout
from distdl.testing import assert_matches_sequential

KINDS = {
    1: (DistributedConvTranspose1d, torch.nn.ConvTranspose1d),
    2: (DistributedConvTranspose2d, torch.nn.ConvTranspose2d),
    3: (DistributedConvTranspose3d, torch.nn.ConvTranspose3d),
}


def pair(dims, partitions, channels, kernel, **options):
    """The layer and the sequential one."""
    distributed, sequential = KINDS[dims]
    ins, outs = channels
    layer = distributed(*partitions, in_channels=ins, out_channels=outs, kernel_size=kernel, **options)
    return layer.double(), filled(sequential(ins, outs, kernel, **options))


def along_space(P, dims):
    """All workers along the last dims of space: 4, or 2x2."""
    return (P.reshape(1, 1, *[1] * (dims - 2), *([4] if dims == 1 else [2, 2])),)


def matches(extent, blocks=None, channels=(2, 3), kernel=3, **options):
    """The cell of a layer with these options."""

    def cell(P, dims):
        layer, reference = pair(dims, along_space(P, dims), channels, kernel, **options)
        x = noise(2, channels[0], *[3] * (dims - 1), extent)
        if blocks is None:
            assert_matches_sequential(layer, reference, x)
        else:  # as many cells at the first places of each axis, the rest at the last
            cut = [
                runs([*blocks[: places - 1], n - sum(blocks[: places - 1])])
                for n, places in zip(x.shape, layer.P_x.workers.shape, strict=True)
            ]
            assert_matches_sequential(layer, reference, x, cut)
        return "exact"

    return cell


def batch_split(P, dims):
    for places, groups in (((4, 1), 1), ((2, 2), 2)):
        grid = P.reshape(places[0], 1, places[1], *[1] * (dims - 1))
        layer, reference = pair(dims, (grid,), (2, 4), 3, stride=2, groups=groups)
        assert_matches_sequential(layer, reference, noise(5, 2, 5, *[2] * (dims - 1)))
    return "exact"


def channel_split(P, dims):
    ones = [1] * dims
    row, work = P[1:3].reshape(1, 2, *ones), P.reshape(2, 2, *ones)
    for partitions, channels, groups in (
        ((row, row, work), (3, 5), 1),
        ((row, row, work), (4, 6), 2),
        ((P.reshape(1, 4, *ones),), (6, 6), 6),
    ):
        layer, reference = pair(dims, partitions, channels, 3, stride=2, padding=1, groups=groups)
        assert_matches_sequential(layer, reference, noise(2, channels[0], *[3] * dims))
    return "exact"


def double_backward(P, dims):
    layer, reference = pair(dims, along_space(P, dims), (1, 2), 3, stride=2)
    take_weights(layer, reference)
    whole = noise(1, 1, *[3] * dims).requires_grad_()
    owned = Layout.balanced(layer.P_x, whole.shape)
    x = owned.block(whole.detach()).clone().requires_grad_()
    for network, tensor in ((reference, whole), (layer, x)):
        (dx,) = torch.autograd.grad((network(tensor) ** 3).sum(), tensor, create_graph=True)
        (dx**2).sum().backward()
    assert torch.allclose(x.grad, owned.block(whole.grad), rtol=1e-10, atol=1e-12)
    for (name, layout), parameter in zip(layer.parameter_layouts.items(), reference.parameters(), strict=True):
        assert torch.allclose(layer.get_parameter(name).grad, layout.block(parameter.grad), rtol=1e-10, atol=1e-12)
    return "exact"


def padding_modes(P, dims):
    """torch has none but zeros either."""
    texts = []
    for mode in ("reflect", "replicate", "circular"):
        try:
            pair(dims, along_space(P, dims), (1, 1), 3, padding_mode=mode)
        except ValueError as error:
            texts.append(str(error))
    assert len(texts) == 3 and all(theirs == texts for theirs in P.allgather_data(texts))
    return "refused"


PROPERTIES = {
    "stride": matches(6, kernel=4, stride=3, padding=1, output_padding=2),
    "dilation": matches(6, stride=2, padding=2, dilation=3, output_padding=2),
    "even kernel": matches(7, kernel=4, stride=2, padding=1),
    "deep halo": matches(5, kernel=7, padding=3, dilation=2),
    "uneven": matches(9, (2, 1, 4), stride=2),
    "empty": matches(5, (0, 3, 0), stride=2, padding=1, output_padding=1),
    "batch split": batch_split,
    "channel split": channel_split,
    "double backward": double_backward,
    "padding modes": padding_modes,
}
CELLS = {
    f"DistributedConvTranspose{dims}d": {name: partial(cell, dims=dims) for name, cell in PROPERTIES.items()}
    for dims in KINDS
}
