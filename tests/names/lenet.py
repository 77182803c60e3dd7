"""LeNet-5 on four workers, written as code for upstream is written."""

import numpy as np
import torch

import distdl.nn as dnn

SHAPE = (5, 1, 28, 28)
CLASSES = 10


def sequential():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, kernel_size=(5, 5), padding=(2, 2)),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(kernel_size=(2, 2), stride=(2, 2)),
        torch.nn.Conv2d(6, 16, kernel_size=(5, 5)),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(kernel_size=(2, 2), stride=(2, 2)),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 5 * 5, 120),
        torch.nn.ReLU(),
        torch.nn.Linear(120, 84),
        torch.nn.ReLU(),
        torch.nn.Linear(84, 10),
    )


def distributed(P_world):
    """Images enter on worker 0; the scores leave split over workers 0 and 1."""
    P_base = P_world.create_partition_inclusive(np.arange(4))
    P_root_base = P_world.create_partition_inclusive([0])
    P_fc_base = P_world.create_partition_inclusive(np.arange(2))
    P_0 = P_root_base.create_cartesian_topology_partition([1, 1, 1, 1])
    P_space = P_base.create_cartesian_topology_partition([1, 1, 2, 2])
    P_channels = P_base.create_cartesian_topology_partition([1, 4, 1, 1])
    P_flat = P_base.create_cartesian_topology_partition([1, 4])
    P_fc = P_fc_base.create_cartesian_topology_partition([1, 2])
    P_fc_mtx = P_base.create_cartesian_topology_partition([2, 2])

    network = torch.nn.Sequential(
        dnn.DistributedTranspose(P_0, P_space),
        dnn.DistributedConv2d(P_space, in_channels=1, out_channels=6, kernel_size=(5, 5), padding=(2, 2)),
        torch.nn.ReLU(),
        dnn.DistributedMaxPool2d(P_space, kernel_size=(2, 2), stride=(2, 2)),
        dnn.DistributedConv2d(P_space, in_channels=6, out_channels=16, kernel_size=(5, 5)),
        torch.nn.ReLU(),
        dnn.Repartition(P_space, P_channels),
        dnn.DistributedMaxPool2d(P_channels, kernel_size=(2, 2), stride=(2, 2)),
        torch.nn.Flatten(),
        dnn.Repartition(P_flat, P_fc),
        dnn.DistributedLinear(P_fc, P_fc, P_fc_mtx, 16 * 5 * 5, 120),
        torch.nn.ReLU(),
        dnn.DistributedLinear(P_fc, P_fc, P_fc_mtx, 120, 84),
        torch.nn.ReLU(),
        dnn.DistributedLinear(P_fc, P_fc, P_fc_mtx, 84, 10),
    )
    return network, dnn.DistributedCrossEntropyLoss(P_fc), P_fc
