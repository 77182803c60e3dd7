"""A network of ResNet's shape on four workers, written as code for upstream is written."""

import numpy as np
import torch

import distdl.nn as dnn

SHAPE = (4, 2, 13, 10)
CLASSES = 5


class Residual(dnn.Module):
    """The sum of two ways through it."""

    def __init__(self, way, shortcut):
        super().__init__()
        self.way, self.shortcut, self.relu = way, shortcut, torch.nn.ReLU()

    def forward(self, x):
        return self.relu(self.way(x) + self.shortcut(x))


def sequential():
    def conv(inputs, outputs, kernel=3, stride=1):
        return torch.nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)

    def way(inputs, outputs, stride=1):
        return torch.nn.Sequential(
            conv(inputs, outputs, 3, stride), torch.nn.BatchNorm2d(outputs), torch.nn.ReLU(),
            conv(outputs, outputs), torch.nn.BatchNorm2d(outputs),
        )  # fmt: skip

    shortcut = torch.nn.Sequential(conv(6, 8, 1, 2), torch.nn.BatchNorm2d(8))
    return torch.nn.Sequential(
        conv(2, 6), torch.nn.BatchNorm2d(6), torch.nn.ReLU(),
        Residual(way(6, 6), torch.nn.Identity()),
        Residual(way(6, 8, 2), shortcut),
        Residual(way(8, 8), torch.nn.Identity()),
        torch.nn.AvgPool2d((7, 5)), torch.nn.Flatten(), torch.nn.Linear(8, CLASSES),
    )  # fmt: skip


def distributed(P_world):
    """Two blocks split over space, one over channels. In and out on worker 0."""

    def grid(ranks, shape):
        return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)

    P_0, P_out = grid([0], [1, 1, 1, 1]), grid([0], [1, 1])
    P_space = grid(np.arange(4), [1, 1, 2, 2])
    P_channels, P_w = grid([1, 2], [1, 2, 1, 1]), grid(np.arange(4), [2, 2, 1, 1])
    P_fc, P_fc_mtx = grid([1, 2], [1, 2]), grid([0, 3], [1, 2])

    def conv(partitions, inputs, outputs, kernel=3, stride=1):
        return dnn.DistributedConv2d(
            *partitions, in_channels=inputs, out_channels=outputs, kernel_size=[kernel, kernel],
            stride=[stride, stride], padding=[kernel // 2, kernel // 2], bias=False,
        )  # fmt: skip

    def way(partitions, inputs, outputs, stride=1):
        return torch.nn.Sequential(
            conv(partitions, inputs, outputs, 3, stride), dnn.DistributedBatchNorm(partitions[0], outputs),
            torch.nn.ReLU(),
            conv(partitions, outputs, outputs), dnn.DistributedBatchNorm(partitions[0], outputs),
        )  # fmt: skip

    space, channels = (P_space,), (P_channels, P_channels, P_w)
    shortcut = torch.nn.Sequential(conv(space, 6, 8, 1, 2), dnn.DistributedBatchNorm(P_space, num_features=8))
    network = torch.nn.Sequential(
        dnn.Repartition(P_0, P_space),
        conv(space, 2, 6), dnn.DistributedBatchNorm(P_space, num_features=6), torch.nn.ReLU(),
        Residual(way(space, 6, 6), torch.nn.Identity()),
        Residual(way(space, 6, 8, 2), shortcut),
        dnn.Repartition(P_space, P_channels),
        Residual(way(channels, 8, 8), torch.nn.Identity()),
        dnn.DistributedAvgPool2d(P_channels, kernel_size=(7, 5)),
        torch.nn.Flatten(),
        dnn.DistributedLinear(P_fc, P_out, P_fc_mtx, 8, CLASSES),
    )  # fmt: skip
    return network, dnn.DistributedCrossEntropyLoss(P_out), P_out
