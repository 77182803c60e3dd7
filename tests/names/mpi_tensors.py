"""What tensors look like on workers that take part and on those that do not, under MPI."""

import numpy as np
import torch
from mpi4py import MPI

from distdl.backends.mpi.buffer import MPIBufferManager
from distdl.backends.mpi.partition import MPIPartition
from distdl.nn import (
    AllGather,
    AllSumReduce,
    Broadcast,
    DistributedChannelConv1d,
    DistributedFeatureConv1d,
    DistributedGeneralConv1d,
    DistributedLinear,
    DistributedMaxPool1d,
    DistributedMSELoss,
    HaloExchange,
    ReduceScatter,
    Repartition,
    SumReduce,
)
from distdl.utilities.slicing import compute_subshape
from distdl.utilities.torch import zero_volume_tensor


def teams(P, *parts):
    """Cartesian partitions from pairs of ranks and a shape."""
    return [P.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape) for ranks, shape in parts]


def block(P_x, shape, dtype=None):
    """A worker's part of ones of a global shape; (4, 0), of the default dtype if none is given, where it has none."""
    if not P_x.active:
        return zero_volume_tensor(4, dtype=dtype)
    return torch.ones(*compute_subshape(P_x.shape, P_x.index, shape), dtype=torch.float64)


def layers(P):
    """Layers that leave workers out, with their partitions and the global shape of x."""
    line, one, two = teams(P, ([0, 1], [1, 2]), ([3], [1, 1]), ([2, 1], [2, 1]))
    P_w = P.create_cartesian_topology_partition([2, 2])
    space, first, third = teams(P, ([1, 2, 0], [1, 1, 3]), ([0, 1], [1, 2, 1]), ([2], [1, 1, 1]))
    column = P.create_partition_inclusive([0, 2]).create_cartesian_topology_partition([1, 2, 1])
    halo = np.zeros((3, 2), dtype=int) if space.active else None
    yield Broadcast(one, line), one, line, (4, 3)
    yield SumReduce(line, one), line, one, (4, 6)
    yield AllSumReduce(line, axes_reduce=(1,)), line, line, (4, 6)
    yield AllGather(line, (1,)), line, line, (4, 6)
    yield ReduceScatter(line, (1,)), line, line, (4, 6)
    yield Repartition(line, two), line, two, (4, 5)
    yield Repartition(two, one), two, one, (4, 5)
    yield HaloExchange(space, halo, halo, halo), space, space, (4, 1, 9)
    yield DistributedLinear(line, line, P_w, 5, 3), line, line, (4, 5)
    yield DistributedFeatureConv1d(space, 2, 3, 3, padding=1), space, space, (4, 2, 8)
    P_c = teams(P, ([3, 2], [1, 2, 1]))[0]
    yield (
        DistributedChannelConv1d(first, P_c, P_w.create_cartesian_topology_partition([2, 2, 1]), 4, 5, 3),
        first,
        P_c,
        (4, 4, 8),
    )
    work = P.create_partition_inclusive([3, 1]).create_cartesian_topology_partition([1, 1, 2])
    P_s = P.create_partition_inclusive([2, 3]).create_cartesian_topology_partition([1, 1, 2])
    yield DistributedGeneralConv1d(P_s, P_s, work, 2, 3, 3), P_s, P_s, (4, 2, 8)
    yield DistributedMaxPool1d(column, 2), column, column, (4, 4, 8)
    yield Repartition(third, space), third, space, (4, 1, 8)


def check_shapes_gradients_and_dtypes_on_every_worker():
    P = MPIPartition(MPI.COMM_WORLD)
    for layer, P_x, P_y, shape in layers(P):
        for dtype in (torch.float64, None):
            x = block(P_x, shape, dtype).requires_grad_()
            y = layer.double()(x)
            assert P_y.active == bool(y.numel()), layer
            assert P_y.active or y.shape == (x.shape[0], 0), (layer, y.shape)
            assert y.requires_grad and (y.dtype == torch.float64 or not P_y.active), (layer, y.dtype)
            y.backward(torch.ones(y.shape, dtype=y.dtype))
            assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == x.dtype
            x.grad.detach()


def check_workers_in_neither_partition_get_a_clone():
    P = MPIPartition(MPI.COMM_WORLD)
    one, two = teams(P, ([0], [1, 1]), ([1, 2], [1, 2]))
    for layer in (Broadcast(one, two), SumReduce(two, one), Repartition(one, two), AllSumReduce(two, [0])):
        for shape in ((4, 0), (0,), (2, 0)):
            x = torch.ones(3, 4) if layer.P_x.active else zero_volume_tensor()
            x = torch.zeros(shape) if P.rank == 3 else x
            y = layer(x)
            assert P.rank != 3 or (y.shape == x.shape and y is not x)


def check_the_batch_is_preserved_unless_told_otherwise():
    P = MPIPartition(MPI.COMM_WORLD)
    one, two = teams(P, ([0], [1, 1]), ([1, 2], [1, 2]))
    cases = [(Repartition, one, two), (Broadcast, one, two), (SumReduce, two, one)]
    for kind, P_x, P_y in cases:
        x = torch.ones(3, 4, requires_grad=True) if P_x.active else zero_volume_tensor(requires_grad=True)
        kept, dropped = kind(P_x, P_y)(x), kind(P_x, P_y, preserve_batch=False)(x)
        if P_x.active:
            assert kept.shape == (3, 0) and dropped.shape == (0,)
        (kept + 0).backward(torch.zeros(kept.shape))
        dropped.backward(torch.zeros(dropped.shape))
        assert x.grad.shape == x.shape
    assert (torch.zeros(0, 0) + torch.zeros(0)).shape == (0, 0)
    # only the workers of P_w: neither input nor output, an input of shape (0,)
    P_x, P_w = P[:1].reshape(1, 1), P[1:2].reshape(1, 1)
    y = DistributedLinear(P_x, P_x, P_w, 3, 2)(torch.ones(4, 3) if P_x.active else zero_volume_tensor())
    assert y.shape == ((4, 2) if P_x.active else (0, 0) if P_w.active else (0,))
    assert not P_w.active or (y + zero_volume_tensor()).shape == (0, 0)


def check_dtypes_follow_the_source():
    P = MPIPartition(MPI.COMM_WORLD)
    one, two = teams(P, ([0], [1, 1]), ([1, 2], [1, 2]))
    for dtype in (torch.float32, torch.float64, torch.int32):
        for layer in (Broadcast(one, two), SumReduce(two, one), Repartition(one, two), Repartition(two, one)):
            x = torch.ones(3, 4, dtype=dtype) if layer.P_x.active else zero_volume_tensor(3)
            x.requires_grad = dtype.is_floating_point
            y = layer(x)
            assert y.dtype == dtype or not layer.P_y.active
            if dtype.is_floating_point:
                y.backward(torch.ones_like(y))
                assert x.grad.dtype == x.dtype and x.grad.shape == x.shape


def check_zero_volume_gradients_keep_their_own_shape():
    P = MPIPartition(MPI.COMM_WORLD)
    one, two = teams(P, ([0], [1, 1]), ([1, 2], [1, 2]))
    for batch in (4, 7):
        x = torch.ones(batch, 4, requires_grad=True) if one.active else zero_volume_tensor(4, requires_grad=True)
        y = Repartition(one, two)(x)
        assert not two.active or y.shape == (batch, 2)
        y.backward(torch.ones(y.shape))
        assert x.grad.shape == ((batch, 4) if one.active else (4, 0))


def check_without_grad_the_result_is_a_leaf():
    P = MPIPartition(MPI.COMM_WORLD)
    one, two = teams(P, ([0], [1, 1]), ([1, 2], [1, 2]))
    with torch.no_grad():
        y = Repartition(one, two)(torch.ones(3, 4) if one.active else zero_volume_tensor(3))
    y.requires_grad = True
    z = Repartition(two, one)(y)
    z.backward(torch.ones(z.shape))
    assert y.grad.shape == y.shape and (y.grad == 1).all()


def check_one_layer_with_and_without_gradients():
    P = MPIPartition(MPI.COMM_WORLD)
    line = P.create_cartesian_topology_partition([1, 4])
    criterion, move = DistributedMSELoss(line), Repartition(line, line[:, ::-1])
    for x_grad, t_grad in ((True, False), (False, False), (False, True), (True, True), (P.rank == 1, False)):
        x = torch.full((2, 3), 2.0, requires_grad=x_grad)
        t = torch.zeros(2, 3, requires_grad=t_grad)
        criterion(move(x), t).backward()
        assert (x.grad is not None) == x_grad and (t.grad is not None) == t_grad
        assert not x_grad or torch.allclose(x.grad, torch.full((2, 3), 2 * 2.0 / 24))
        assert not t_grad or torch.allclose(t.grad, torch.full((2, 3), -2 * 2.0 / 24))


def check_layers_are_torch_modules():
    P = MPIPartition(MPI.COMM_WORLD)
    network = torch.nn.Sequential(*[layer for layer, *_ in layers(P)])
    assert network.to("cpu") is network and network.double() is network
    assert not network.eval()[0].training and network.train()[0].training
    row = P.create_cartesian_topology_partition([1, 4])
    chain = torch.nn.Sequential(
        Repartition(row, P[:1].reshape(1, 1)), torch.nn.ReLU(), Repartition(P[:1].reshape(1, 1), row)
    )
    assert chain(torch.ones(2, 1)).shape == (2, 1)


def check_numpy_integers_are_sizes():
    P = MPIPartition(MPI.COMM_WORLD)
    channels = compute_subshape(P.create_cartesian_topology_partition([4]).shape, [0], [9])[0]
    assert isinstance(channels, np.int64) and channels == 3
    P_x = P.create_cartesian_topology_partition([1, 1, 4])
    assert DistributedFeatureConv1d(P_x, channels, channels, np.int64(1))(torch.ones(2, 3, 2)).shape == (2, 3, 2)
    P_w = P.create_cartesian_topology_partition([2, 2])
    assert DistributedLinear(P_w[:1], P_w[:1], P_w, channels, channels).sublinear.weight.shape[0] in (1, 2)
    assert zero_volume_tensor(channels).shape == (3, 0)


def check_layers_check_their_buffer_manager():
    P = MPIPartition(MPI.COMM_WORLD)
    space, P_w = P.create_cartesian_topology_partition([1, 1, 4]), P.create_cartesian_topology_partition([1, 1, 4])
    zeros = np.zeros((3, 2), dtype=int)
    makers = (
        lambda manager: Repartition(space, space, buffer_manager=manager),
        lambda manager: HaloExchange(space, zeros, zeros, zeros, buffer_manager=manager),
        lambda manager: DistributedFeatureConv1d(space, 2, 2, 3, buffer_manager=manager),
        lambda manager: DistributedGeneralConv1d(space, space, P_w, 2, 2, 3, buffer_manager=manager),
        lambda manager: DistributedMaxPool1d(space, 2, buffer_manager=manager),
    )
    for make in makers:
        make(MPIBufferManager())
        try:
            make({})
        except ValueError as error:
            assert "buffer_manager" in str(error)
        else:
            raise AssertionError("a dict is no buffer manager")
