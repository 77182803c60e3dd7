"""A network of VGG's shape on four workers, written as code for upstream is written."""

from itertools import pairwise

import numpy as np
import torch

import distdl.nn as dnn

SHAPE = (3, 3, 18, 14)
CLASSES = 7


def block(*channels):
    """Convolutions of 3 x 3 and ReLUs, then a pooling that halves the extents."""
    layers = []
    for inputs, outputs in pairwise(channels):
        layers += [torch.nn.Conv2d(inputs, outputs, 3, padding=1), torch.nn.ReLU()]
    return [*layers, torch.nn.MaxPool2d(2, 2)]


def sequential():
    return torch.nn.Sequential(
        *block(3, 6, 6), *block(6, 10, 9), *block(9, 12, 11), torch.nn.Flatten(),
        torch.nn.Linear(11 * 2 * 1, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES),
    )  # fmt: skip


def conv(inputs, outputs, *partitions):
    """One layer of a block, of the kind that fits the partitions."""
    layer = dnn.DistributedConv2d(
        *partitions, in_channels=inputs, out_channels=outputs, kernel_size=[3, 3], padding=[1, 1]
    )
    return [layer, torch.nn.ReLU()]


def distributed(P_world):
    """Split over space, then over space and channels, then over channels. In and out on worker 0."""

    def grid(ranks, shape):
        return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)

    P_0, P_out = grid([0], [1, 1, 1, 1]), grid([0], [1, 1])
    P_space = grid(np.arange(4), [1, 1, 2, 2])
    P_rows, P_rows_channels = grid([1, 3], [1, 1, 2, 1]), grid([0, 1, 2, 3], [1, 2, 2, 1])
    P_w_up, P_w_down = grid([3, 2, 1, 0], [2, 1, 2, 1]), grid(np.arange(4), [1, 2, 2, 1])
    P_channels, P_w = grid([2, 0], [1, 2, 1, 1]), grid(np.arange(4), [2, 2, 1, 1])
    P_fc, P_fc_mtx = grid([2, 0], [1, 2]), grid(np.arange(4), [2, 2])

    network = torch.nn.Sequential(
        dnn.Repartition(P_0, P_space),
        *conv(3, 6, P_space),
        *conv(6, 6, P_space),
        dnn.DistributedMaxPool2d(P_space, kernel_size=2, stride=2),
        dnn.Repartition(P_space, P_rows),
        *conv(6, 10, P_rows, P_rows_channels, P_w_up),
        *conv(10, 9, P_rows_channels, P_rows, P_w_down),
        dnn.DistributedMaxPool2d(P_rows, kernel_size=2, stride=2),
        dnn.Repartition(P_rows, P_channels),
        *conv(9, 12, P_channels, P_channels, P_w),
        *conv(12, 11, P_channels, P_channels, P_w),
        dnn.DistributedMaxPool2d(P_channels, kernel_size=2, stride=2),
        torch.nn.Flatten(),
        dnn.DistributedLinear(P_fc, P_fc, P_fc_mtx, 11 * 2 * 1, 16),
        torch.nn.ReLU(),
        dnn.DistributedLinear(P_fc, P_fc, P_fc_mtx, 16, CLASSES),
        dnn.Repartition(P_fc, P_out),
    )
    return network, dnn.DistributedCrossEntropyLoss(P_out), P_out
