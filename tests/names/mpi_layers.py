"""What the compute layers have and do, under MPI."""

import numpy as np
import torch
from helpers_layers import filled, noise
from mpi4py import MPI
from mpi_movements import own, refused_everywhere

import distdl.nn as dnn
from distdl.backends.mpi.partition import MPIPartition
from distdl.testing import assert_matches_sequential
from distdl.utilities.slicing import assemble_slices, compute_start_index, compute_stop_index, compute_subshape
from distdl.utilities.torch import zero_volume_tensor


def part(P_x, whole):
    """This worker's block of a tensor that is split as evenly as possible."""
    if not P_x.active:
        return zero_volume_tensor(whole.shape[0], dtype=whole.dtype)
    place = (P_x.shape, P_x.index, whole.shape)
    return whole[assemble_slices(compute_start_index(*place), compute_stop_index(*place))].clone()


def check_linear():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x, P_y, P_w = own(P, [1, 3], [1, 2]), own(P, [2, 0], [1, 2]), own(P, [0, 1, 2, 3], [2, 2])
    layer = dnn.DistributedLinear(P_x, P_y, P_w, np.int64(5), 7).double()
    assert_matches_sequential(layer, filled(torch.nn.Linear(5, 7)), noise(4, 5))
    assert layer.sublinear.weight.shape == tuple(compute_subshape(P_w.shape, P_w.index, [7, 5]))
    if P_w.index[-1] == 0:
        assert layer.sublinear.bias.shape == tuple(compute_subshape(2, P_w.index[0], 7).ravel())
    assert not any(
        name.endswith("bias")
        for name in dict(dnn.DistributedLinear(P_x, P_y, P_w, 5, 7, bias=False).named_parameters())
    )


def check_feature_convolutions():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x = own(P, [2, 0, 3], [1, 1, 3])
    sequential = filled(torch.nn.Conv1d(4, 6, 3, 2, 1, 2, 2))
    layer = dnn.DistributedFeatureConv1d(P_x, 4, 6, [3], [2], [1], dilation=[2], groups=2).double()
    assert_matches_sequential(layer, sequential, noise(2, 4, 17))
    layer.zero_grad()
    first = P_x.active and P_x.rank == 0
    if first:
        layer.weight.data = torch.ones(6, 2, 3, dtype=torch.float64)
        layer.bias.data = torch.full((6,), 5.0, dtype=torch.float64)
    x = part(P_x, torch.ones(2, 4, 17, dtype=torch.float64))
    y = layer(x)
    y.backward(torch.ones(y.shape, dtype=torch.float64))
    if P_x.active:
        assert y.shape == (2, 6, [3, 3, 2][P_x.index[2]]) and y.max() == 6 + 5
        for parameter in (layer.weight, layer.bias):
            assert parameter.requires_grad and parameter.grad is not None and bool(parameter.numel()) == first


def check_channel_convolutions():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x, P_y = own(P, [1, 3], [1, 2, 1]), own(P, [2, 0], [1, 2, 1])
    P_w = own(P, [0, 1, 2, 3], [2, 2, 1])
    layer = dnn.DistributedChannelConv1d(P_x, P_y, P_w, 5, 3, 3, padding=1).double()
    assert_matches_sequential(layer, filled(torch.nn.Conv1d(5, 3, 3, padding=1)), noise(2, 5, 9))
    assert layer.stores_bias == (P_w.index[1] == 0)
    assert layer.conv_layer.weight.shape == (*compute_subshape([2, 2], P_w.index[:2], [3, 5]), 3)
    if layer.stores_bias:
        layer.conv_layer.weight.data.zero_()
        layer.conv_layer.bias.data = torch.full_like(layer.conv_layer.bias.data, 2.0)
        assert layer.conv_layer.bias.shape == (2 if P_w.index[0] == 0 else 1,)
    else:
        layer.conv_layer.weight.data.zero_()
    assert (layer(part(P_x, noise(2, 5, 9))) == 2).all()


def check_general_convolutions():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x, P_y, P_w = own(P, [3, 1], [1, 1, 2]), own(P, [1, 3, 2, 0], [1, 2, 2]), own(P, [2, 1, 0, 3], [2, 1, 2])
    layer = dnn.DistributedGeneralConv1d(P_x, P_y, P_w, 3, 5, 3, 2, 1, "zeros", 1, 1, True).double()
    assert_matches_sequential(layer, filled(torch.nn.Conv1d(3, 5, 3, 2, 1)), noise(2, 3, 11))
    assert layer.weight.grad is not None and layer.bias.grad is not None
    stored = P_w.index[2] == 0
    assert bool(layer.weight.numel()) == bool(layer.bias.numel()) == layer.stores_bias == stored
    # partitions of which each leaves some of the others' workers out
    P_x, P_w = own(P, [1, 2], [1, 1, 2]), own(P, [3, 0], [1, 1, 2])
    layer = dnn.DistributedGeneralConv1d(P_x, P_x, P_w, 3, 5, 3).double()
    assert_matches_sequential(layer, filled(torch.nn.Conv1d(3, 5, 3)), noise(2, 3, 11))
    assert layer.stores_bias == (P.rank == 3)


def check_the_kind_of_convolution():
    P = MPIPartition(MPI.COMM_WORLD)
    options = {"in_channels": 4, "out_channels": 4, "kernel_size": 1}
    for n, choose in enumerate((dnn.DistributedConv1d, dnn.DistributedConv2d, dnn.DistributedConv3d), 1):
        ones, space = [1] * n, [2] + [1] * (n - 1)
        feature, channel = own(P, [0, 1], [1, 1, *space]), own(P, [0, 1], [1, 2, *ones])
        P_w, work = own(P, range(4), [2, 2, *ones]), own(P, [0, 1], [1, 1, *space])
        kinds = [type(choose(feature, **options)), type(choose(channel, channel, P_w, **options))]
        kinds.append(
            type(choose(feature, feature, work, buffer_manager=None, **options))
        )  # 2 and 3 are in none of them
        assert kinds == [getattr(dnn, f"Distributed{kind}Conv{n}d") for kind in ("Feature", "Channel", "General")]
        refused_everywhere(lambda choose=choose, P=channel: choose(P, P_y=P, **options))
        refused_everywhere(lambda choose=choose, P=channel: choose(P, P_w=P, **options))


def check_pooling():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x = own(P, [3, 0, 1], [1, 1, 3])
    x = noise(2, 3, 13) - 5  # below zero, so that a padding of zeros would be the maximum
    for options in ({}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": [1]}):
        largest = torch.nn.MaxPool1d(3, **{"stride": 1, **options})
        assert_matches_sequential(dnn.DistributedMaxPool1d(P_x, 3, **options), largest, x)
        if "dilation" not in options:
            mean = torch.nn.AvgPool1d(3, **{"stride": 1, **options})
            assert_matches_sequential(dnn.DistributedAvgPool1d(P_x, 3, **options), mean, x)
    refused_everywhere(lambda: dnn.DistributedAvgPool1d(P_x, 3, dilation=2))


LOSSES = {
    "L1": torch.nn.L1Loss,
    "MSE": torch.nn.MSELoss,
    "PoissonNLL": torch.nn.PoissonNLLLoss,
    "BCE": torch.nn.BCELoss,
    "BCEWithLogits": torch.nn.BCEWithLogitsLoss,
    "KLDiv": torch.nn.KLDivLoss,
}


def check_losses():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x = own(P, [2, 0, 3], [1, 3])
    x, t = noise(4, 7).sigmoid(), noise(4, 7, seed=1).sigmoid()
    for name, sequential in LOSSES.items():
        kind = getattr(dnn, f"Distributed{name}Loss")
        assert set(kind._valid_reductions) == {"none", "mean", "sum", *(["batchmean"] if name == "KLDiv" else [])}
        refused_everywhere(lambda kind=kind: kind(P_x, reduction="median"))
        for reduction in kind._valid_reductions:
            ours, whole = part(P_x, x).requires_grad_(), x.clone().requires_grad_()
            loss = kind(P_x, reduction)(ours, part(P_x, t))
            expected = sequential(reduction=reduction)(whole, t)
            if reduction == "none":
                assert torch.equal(loss, part(P_x, expected)) or not P_x.active
                loss.sum().backward()
                expected.sum().backward()
            else:
                assert loss.shape == () and loss.requires_grad
                assert not (P_x.active and P_x.rank == 0) or torch.allclose(loss, expected, rtol=1e-12)
                loss.backward()
                expected.backward()
            assert ours.grad.shape == ours.shape and torch.allclose(ours.grad, part(P_x, whole.grad), rtol=1e-12)


def check_cross_entropy():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x = own(P, [3, 1, 0, 2], [2, 2])
    x, t = noise(5, 3), torch.tensor([0, 2, -100, 1, 2])
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    for options in ({}, {"weight": weight, "label_smoothing": 0.1}, {"reduction": "sum", "ignore_index": 2}):
        ours, whole = part(P_x, x).requires_grad_(), x.clone().requires_grad_()
        target = t if options.get("ignore_index") != 2 else t.clamp(min=0)
        # the target has one dim less, and is read on the workers of class index 0
        mine = target[:3] if P_x.index[0] == 0 else target[3:]
        loss = dnn.DistributedCrossEntropyLoss(P_x, **options)(ours, mine if P_x.index[1] == 0 else None)
        expected = torch.nn.CrossEntropyLoss(**options)(whole, target)
        loss.backward()
        expected.backward()
        assert P_x.rank != 0 or torch.allclose(loss, expected, rtol=1e-12)
        assert torch.allclose(ours.grad, part(P_x, whole.grad), rtol=1e-12)


def check_optimisers_are_built_everywhere():
    P = MPIPartition(MPI.COMM_WORLD)
    space, row = own(P, [0, 1], [1, 1, 2]), own(P, [0], [1, 1])
    makers = (
        (lambda: dnn.DistributedFeatureConv1d(space, 2, 3, 3), space, (2, 2, 9)),
        (lambda: dnn.DistributedGeneralConv1d(space, space, space, 2, 3, 3), space, (2, 2, 9)),
        (lambda: dnn.DistributedLinear(row, row, row, 5, 3), row, (2, 5)),
    )
    for make, P_x, shape in makers:
        layer = make().double()
        optimiser = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        x = part(P_x, noise(*shape)).requires_grad_()
        y = layer(x)
        y.backward(torch.ones(y.shape, dtype=torch.float64))
        assert len(list(layer.parameters())) == 2 and all(p.grad is not None for p in layer.parameters())
        assert P_x.active or all(p.numel() == 0 for p in layer.parameters())
        optimiser.step()


def check_empty_blocks_have_full_rank():
    P = MPIPartition(MPI.COMM_WORLD)
    space = own(P, [0, 1, 2], [1, 1, 3])
    x = part(space, noise(2, 1, 2)).requires_grad_()
    assert P.rank != 2 or x.shape == (2, 1, 0)
    for layer in (
        dnn.DistributedFeatureConv1d(space, 1, 3, 1).double(),
        dnn.DistributedMaxPool1d(space, 1),
        dnn.Repartition(space, space),
    ):
        y = layer(x)
        assert P.rank != 2 or (y.dim() == 3 and y.shape[0] == 2 and y.shape[2] == 0)
        y.backward(torch.ones(y.shape, dtype=torch.float64))
        assert x.grad.shape == x.shape
