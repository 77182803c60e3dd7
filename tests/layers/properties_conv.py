"""What the convolutions promise, as functions of a world of four workers."""

import torch
from helpers_layers import filled, noise, penalty, take_weights

from distdl.geometry.boxes import runs
from distdl.nn import DistributedConv1d, DistributedConv2d, DistributedConv3d
from distdl.partition.layout import Layout
from distdl.testing import assert_matches_sequential

CONVOLUTIONS = (
    (DistributedConv1d, torch.nn.Conv1d),
    (DistributedConv2d, torch.nn.Conv2d),
    (DistributedConv3d, torch.nn.Conv3d),
)
CHANNELS = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}
KINDS = ("DistributedFeatureConv", "DistributedChannelConv", "DistributedGeneralConv")


def partitions(kind, P):
    """Partitions of four workers over batch, channels and one dim of space, as the kind splits them."""
    if kind == "DistributedFeatureConv":
        return (P.reshape(1, 1, 4),)
    if kind == "DistributedChannelConv":
        return P[2:].reshape(1, 2, 1), P[:2].reshape(1, 2, 1), P.reshape(2, 2, 1)
    return P.reshape(1, 2, 2), P[1:3].reshape(1, 1, 2), P.reshape(1, 2, 2)


def exact(team, blocks=None, batch=2, **options):
    """In 1-d, and in 2-d and 3-d with the other dims whole."""
    options = {**CHANNELS, **options}
    for more, (convolution, sequential) in enumerate(CONVOLUTIONS):
        layer = convolution(*(P.reshape(*P.workers.shape, *[1] * more) for P in team), **options).double()
        x = noise(batch, options["in_channels"], 9, *[5] * more)
        split = None if blocks is None else [*map(runs, blocks), *[runs([5])] * more]
        assert_matches_sequential(layer, filled(sequential(**options)), x, split)
    return "exact"


def refused(P, make):
    try:
        make()
        text = ""
    except ValueError as error:
        text = str(error)
    texts = P.allgather_data(text)
    assert texts[0] and len(set(texts)) == 1, texts
    return "refused"


def blocks_of(team, empty):
    """Blocks that are not the balanced split: all but the last are small, or empty."""
    split = []
    for extent, parts in zip((2, 4, 9), team[0].workers.shape, strict=True):
        least = 0 if empty else 1
        split.append([least] * (parts - 1) + [extent - least * (parts - 1)])
    return split


def with_batch_split(kind, P):
    if kind == "DistributedFeatureConv":
        return (P.reshape(2, 1, 2),)
    if kind == "DistributedChannelConv":
        return P.reshape(2, 2, 1), P[1:3].reshape(2, 1, 1), P.reshape(2, 1, 2, 1)
    return P.reshape(2, 1, 2), P.reshape(2, 1, 2), P.reshape(2, 1, 1, 2)


def channel_split(kind, P):
    """Without groups and with two; a feature convolution splits channels in groups only."""
    if kind == "DistributedFeatureConv":
        exact((P.reshape(1, 4, 1),), groups=2)
        return refused(P, lambda: DistributedConv1d(P.reshape(1, 4, 1), **CHANNELS))
    exact(partitions(kind, P), groups=2)
    return exact(partitions(kind, P))


def double_backward(kind, P):
    layer = DistributedConv1d(*partitions(kind, P), padding=1, **CHANNELS).double()
    reference = filled(torch.nn.Conv1d(padding=1, **CHANNELS))
    take_weights(layer, reference)
    whole = noise(2, 4, 7).requires_grad_()

    penalty(reference, whole).backward()
    owned = Layout.balanced(layer.P_x, whole.shape)
    x = owned.block(whole.detach()).clone().requires_grad_()
    penalty(layer, x).backward()
    weights = layer.parameter_layouts["weight"]
    assert torch.allclose(x.grad, owned.block(whole.grad) if P.rank in layer.P_x else x.grad, rtol=1e-10, atol=1e-12)
    assert torch.allclose(layer.weight.grad, weights.block(reference.weight.grad), rtol=1e-10, atol=1e-12)
    return "exact"


def padding_modes(kind, P):
    for mode in ("zeros", "reflect", "replicate", "circular"):
        exact(partitions(kind, P), padding=3, padding_mode=mode)
    return "exact"


def cells(kind):
    return {
        "stride": lambda P: exact(partitions(kind, P), stride=2, padding=1),
        "dilation": lambda P: exact(partitions(kind, P), dilation=3, padding=2),
        "even kernel": lambda P: exact(partitions(kind, P), kernel_size=4, stride=2, padding=1),
        "deep halo": lambda P: exact(partitions(kind, P), kernel_size=9, padding=4),
        "uneven": lambda P: exact(partitions(kind, P), padding=1, blocks=blocks_of(partitions(kind, P), empty=False)),
        "empty": lambda P: exact(partitions(kind, P), padding=1, blocks=blocks_of(partitions(kind, P), empty=True)),
        "batch split": lambda P: exact(with_batch_split(kind, P), batch=3, padding=1),
        "channel split": lambda P: channel_split(kind, P),
        "double backward": lambda P: double_backward(kind, P),
        "padding modes": lambda P: padding_modes(kind, P),
    }  # fmt: skip


CELLS = {kind: cells(kind) for kind in KINDS}
