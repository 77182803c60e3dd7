"""What normalisation, resampling and transposed convolutions have and do, under MPI; and a network with them."""

import resnet
import torch
from helpers_layers import filled, noise
from mpi4py import MPI
from mpi_layers import part
from mpi_movements import own, refused_everywhere
from mpi_networks import agree, trains_like_sequential
from torch.nn.functional import interpolate

import distdl.nn as dnn
from distdl.backends.mpi.partition import MPIPartition
from distdl.testing import assert_matches_sequential
from distdl.utilities.torch import zero_volume_tensor


def check_a_resnet_trains_like_the_sequential_network():
    kinds = trains_like_sequential(resnet)
    assert {"DistributedBatchNorm", "DistributedAvgPool2d"} <= kinds


def check_batch_norm():
    P = MPIPartition(MPI.COMM_WORLD)
    cases = (([3, 1, 0, 2], [2, 2], (6, 5)), ([2, 0], [1, 2, 1], (4, 3, 7)), (range(4), [1, 1, 2, 2], (3, 2, 5, 7)))
    for ranks, shape, extents in cases:
        P_x = own(P, ranks, shape)
        x = noise(*extents)
        sequential = filled((torch.nn.BatchNorm1d if len(extents) < 4 else torch.nn.BatchNorm2d)(extents[1]))
        layer = dnn.DistributedBatchNorm(P_x, num_features=extents[1]).double()
        wanted = [p.reshape([1, -1] + [1] * (len(extents) - 2)) for p in sequential.parameters()]
        stores = P_x.active and not P_x.index[0] and not P_x.index[2:].any()
        column = P_x[:1, :, *[slice(0, 1)] * (len(shape) - 2)]
        for ours, theirs in zip(layer.parameters(), wanted, strict=True) if stores else ():  # gamma, then beta
            ours.data = part(column, theirs.detach())
        for _ in range(2):
            ours, whole = part(P_x, x).requires_grad_(), x.clone().requires_grad_()
            layer.zero_grad()
            sequential.zero_grad()
            y, expected = layer(ours), sequential(whole)
            y.backward(part(P_x, noise(*extents, seed=9)) if P_x.active else torch.zeros(y.shape, dtype=y.dtype))
            expected.backward(noise(*extents, seed=9))
            assert not P_x.active or agree(y, part(P_x, expected.detach()))
            assert ours.grad.shape == ours.shape and (not P_x.active or agree(ours.grad, part(P_x, whole.grad)))
        gradients = [p.grad.reshape(w.shape) for p, w in zip(sequential.parameters(), wanted, strict=True)]
        for mine, theirs in zip(layer.parameters(), gradients, strict=True) if stores else ():
            assert agree(mine.grad, part(column, theirs))
        y, expected = layer.eval()(part(P_x, x)), sequential.eval()(x)
        assert not P_x.active or agree(y.detach(), part(P_x, expected.detach()))


def check_batch_norm_stores_few_parameters():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x = own(P, range(4), [2, 2, 1])
    layer = dnn.DistributedBatchNorm(P_x, 5)
    shapes = [tuple(p.shape) for p in layer.parameters()]
    assert shapes == [[(1, 3, 1)] * 2, [(1, 2, 1)] * 2, [], []][P.rank]
    x = part(P_x, noise(4, 5, 3).float())
    y = layer(x)
    assert y.requires_grad  # also where there is no parameter
    loss = dnn.DistributedMSELoss(P_x)(y, torch.zeros_like(y))
    assert loss.requires_grad
    loss.backward()
    assert all(p.grad is not None for p in layer.parameters())
    plain = dnn.DistributedBatchNorm(P_x, 5, affine=False, track_running_stats=False)
    assert not list(plain.parameters()) and plain(x).shape == x.shape


def check_upsampling():
    P = MPIPartition(MPI.COMM_WORLD)
    for space, shape, extents in (
        (1, [1, 1, 3], (2, 3, 7)),
        (2, [1, 1, 1, 3], (2, 2, 5, 7)),
        (3, [1, 1, 3, 1, 1], (1, 2, 5, 3, 3)),
    ):
        P_x = own(P, [3, 0, 2], shape)
        x = noise(*extents)
        to = (*extents[:2], *(2 * n - 1 for n in extents[2:]))
        for mode in ("nearest", "linear"):
            names = {"nearest": "nearest", "linear": ["linear", "bilinear", "trilinear"][space - 1]}
            corners = (False,) if mode == "nearest" else (False, True)
            for align in corners:
                # the size is the whole global shape; a factor is used as it is
                for ours, theirs in (({"size": to}, {"size": to[2:]}), ({"scale_factor": 1.5}, {"scale_factor": 1.5})):
                    layer = dnn.DistributedUpsample(P_x, mode=mode, align_corners=align, **ours)
                    whole, mine = x.clone().requires_grad_(), part(P_x, x).requires_grad_()
                    option = {} if mode == "nearest" else {"align_corners": align}
                    expected = interpolate(whole, mode=names[mode], **theirs, **option)
                    y = layer(mine)
                    assert not P_x.active or agree(y.detach(), part(P_x, expected.detach())), (mode, ours)
                    y.backward(part(P_x, torch.ones_like(expected)) if P_x.active else torch.zeros_like(y))
                    expected.backward(torch.ones_like(expected))
                    assert mine.grad.shape == mine.shape and (not P_x.active or agree(mine.grad, part(P_x, whole.grad)))
    for bad in ({}, {"size": (1, 1, 4), "scale_factor": 2}):
        refused_everywhere(lambda bad=bad: dnn.DistributedUpsample(own(P, range(4), [1, 1, 4]), **bad))


def check_interpolation_of_blocks():
    x = noise(2, 1, 7)
    for mode, align in (("nearest", False), ("linear", False), ("linear", True)):
        option = {} if mode == "nearest" else {"align_corners": align}
        for factor, extent in ((None, 11), (1.5, 10)):
            size = {"size": [extent]} if factor is None else {"scale_factor": factor}
            expected = interpolate(x, mode=mode, **size, **option)
            for start, stop in ((0, extent), (3, 8)):
                shapes = ([2, 1, 7], [0, 0, start], [2, 1, stop], [2, 1, extent])
                layer = dnn.Interpolate(
                    [0, 0, 0], [2, 1, 7], *shapes, scale_factor=factor, mode=mode, align_corners=align
                )
                whole = x.clone().requires_grad_()
                y = layer(whole)
                assert agree(y.detach(), expected[..., start:stop])
                dy = noise(2, 1, stop - start, seed=3)
                y.backward(dy.float())  # float32, for a float64 y
                assert whole.grad.dtype == torch.float64
                assert abs((y * dy.float()).sum() - (whole * whole.grad).sum()) < 1e-12


def check_interpolation_stays_within_its_block():
    # twice as many cells; the block has cells 2 and 3 of 6, and outputs 2 to 9 belong to cells 1 to 4
    block = [0, 0, 2], [1, 1, 4], [1, 1, 6], [0, 0, 2], [1, 1, 10], [1, 1, 12]
    x = torch.tensor([[[20.0, 30.0]]], requires_grad=True)
    assert dnn.Interpolate(*block, mode="nearest")(x).flatten().tolist() == [20] * 4 + [30] * 4
    y = dnn.Interpolate(*block, mode="linear")(x)
    assert y.flatten().tolist() == [20, 20, 20, 22.5, 27.5, 30, 30, 30]
    y.sum().backward()
    assert x.grad.flatten().tolist() == [4, 4]


def check_transposed_convolutions():
    P = MPIPartition(MPI.COMM_WORLD)
    options = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}
    torch_options = {name: value for name, value in options.items() if "channels" not in name and name != "kernel_size"}
    P_x = own(P, [2, 0, 3], [1, 1, 3])
    layer = dnn.DistributedConvTranspose1d(P_x, **options, groups=2).double()
    sequential = filled(torch.nn.ConvTranspose1d(4, 6, 3, groups=2, **torch_options))
    assert_matches_sequential(layer, sequential, noise(2, 4, 8))
    for parameter in layer.parameters():
        assert parameter.grad is not None and bool(parameter.numel()) == (P.rank == 2)
    P_c, P_y, P_w = own(P, [1, 3], [1, 2, 1]), own(P, [2, 0], [1, 2, 1]), own(P, range(4), [2, 2, 1])
    layer = dnn.DistributedConvTranspose1d(P_c, P_y, P_w, **options).double()
    assert_matches_sequential(layer, filled(torch.nn.ConvTranspose1d(4, 6, 3, **torch_options)), noise(2, 4, 8))
    y = layer(part(P_c, noise(2, 4, 8)) if P_c.active else zero_volume_tensor(2))
    assert P_y.active == bool(y.numel()) and all(isinstance(p, torch.nn.Parameter) for p in (layer.weight, layer.bias))
