"""What the data movement layers do, under MPI, and the geometry of halos."""

import numpy as np
import torch
from mpi4py import MPI

from distdl.backends.mpi.partition import MPIPartition
from distdl.nn import AllGather, AllSumReduce, Broadcast, HaloExchange, ReduceScatter, Repartition, SumReduce
from distdl.nn.mixins.conv_mixin import ConvMixin
from distdl.nn.mixins.halo_mixin import HaloMixin
from distdl.utilities.slicing import assemble_slices, compute_start_index, compute_stop_index, compute_subshape
from distdl.utilities.torch import distdl_padding_to_torch_padding, zero_volume_tensor


def refused_everywhere(call, kind=ValueError):
    """Every worker gets the same error."""
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        text = None
    texts = MPI.COMM_WORLD.allgather(text)
    assert texts[0] is not None and len(set(texts)) == 1, texts


def own(P, ranks, shape):
    return P.create_partition_inclusive(ranks).create_cartesian_topology_partition(shape)


def number(P_x, value):
    """A tensor with one number, or none."""
    return (
        torch.tensor([[float(value)]], requires_grad=True) if P_x.active else zero_volume_tensor(1, requires_grad=True)
    )


def check_broadcast():
    P = MPIPartition(MPI.COMM_WORLD)
    grid = own(P, [0, 1, 2, 3], [2, 2])
    # P_x: workers 3 and 1, extended on the left with ones; it overlaps P_y
    row = own(P, [3, 1], [2])
    x = number(row, P.rank)
    y = Broadcast(row, grid)(x)
    assert y.item() == [3, 1, 3, 1][P.rank]
    y.backward(torch.tensor([[10.0**P.rank]]))
    assert not row.active or x.grad.item() == {3: 101, 1: 1010}[P.rank]
    # disjoint partitions; worker 0 is in neither
    y = Broadcast(own(P, [2], [1, 1]), own(P, [3, 1], [2, 1]))(number(own(P, [2], [1, 1]), 7))
    assert y.shape == ((1, 1) if P.rank in (1, 3) else (1, 0)) and (y == 7).all()


def check_transposed_partitions():
    P = MPIPartition(MPI.COMM_WORLD)
    grid = own(P, [0, 1, 2, 3], [2, 2])
    column, row = own(P, [3, 1], [2, 1]), own(P, [3, 1], [1, 2])
    for flags in ({"transpose_src": True}, {"transpose_dest": True}):
        assert Broadcast(grid, grid, **flags)(number(grid, P.rank)).item() == [0, 2, 1, 3][P.rank]
        assert SumReduce(grid, grid, **flags)(number(grid, P.rank)).item() == [0, 2, 1, 3][P.rank]
    assert Broadcast(column, grid, transpose_src=True)(number(column, P.rank)).item() == [3, 1, 3, 1][P.rank]
    assert Broadcast(column, grid, transpose_dest=True)(number(column, P.rank)).item() == [3, 1, 3, 1][P.rank]
    y = SumReduce(grid, row, transpose_src=True)(number(grid, 10**P.rank))
    assert not row.active or y.item() == {3: 11, 1: 1100}[P.rank]


def check_sum_reduce():
    P = MPIPartition(MPI.COMM_WORLD)
    grid, row = own(P, [0, 1, 2, 3], [2, 2]), own(P, [3, 1], [2])
    x = number(grid, 10**P.rank)
    y = SumReduce(grid, row)(x)
    assert y.shape == ((1, 1) if row.active else (1, 0))
    assert not row.active or y.item() == {3: 101, 1: 1010}[P.rank]
    y.backward(torch.full(y.shape, float(P.rank)))
    assert x.grad.item() == [3, 1, 3, 1][P.rank]


def check_all_sum_reduce():
    P = MPIPartition(MPI.COMM_WORLD)
    grid = own(P, [0, 1, 2, 3], [2, 2])
    for bad in ({}, {"axes_reduce": (0,), "axes_keep": (1,)}):
        refused_everywhere(lambda bad=bad: AllSumReduce(grid, **bad))
    for options, total in (
        ({"axes_reduce": (0,)}, [101, 1010, 101, 1010]),
        ({"axes_keep": (0,)}, [11, 11, 1100, 1100]),
        ({"axes_reduce": (0, 1)}, [1111] * 4),
        ({"axes_reduce": ()}, [1, 10, 100, 1000]),
    ):
        for shape in ((), (3,), (1, 2, 1, 2, 1)):  # of any rank
            x = torch.full(shape, 10.0**P.rank, requires_grad=True)
            y = AllSumReduce(grid, **options)(x)
            y.backward(torch.full(shape, 10.0**P.rank))
            assert (y == total[P.rank]).all() and (x.grad == total[P.rank]).all()


def check_repartition():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x, P_y = own(P, [2, 0], [1, 2]), own(P, [1, 2, 3], [3, 1])
    whole = torch.arange(35.0).reshape(5, 7)
    x = {2: whole[:, :6], 0: whole[:, 6:]}[P.rank].clone() if P_x.active else zero_volume_tensor(5)
    x.requires_grad = True
    y = Repartition(P_x, P_y)(x)
    if P_y.active:
        rows = slice(*[(0, 2), (2, 4), (4, 5)][P_y.rank])
        assert torch.equal(y, whole[rows]) and y.shape[0] == compute_subshape([3], [P_y.rank], [5])[0]
    y.backward(y.detach())
    assert torch.equal(x.grad, x.detach())


def check_overlaps_of_a_repartition():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x = P.create_cartesian_topology_partition([2, 2])
    layer = Repartition(P_x, P_x)
    layer(torch.ones(3, 2))
    for overlaps in (layer.P_x_to_y_overlaps, layer.P_y_to_x_overlaps):
        found = [overlap for overlap in overlaps if overlap != (None, None, None)]
        assert all(len(overlap) == 3 and overlap[-1] == "self" for overlap in found) and len(found) == 1
    turn = Repartition(P_x, P.create_cartesian_topology_partition([4, 1]))
    turn(torch.ones(2, 2))
    slices, shape, partner = next(o for o in turn.P_x_to_y_overlaps if o[2] not in ("self", None))
    assert shape == tuple(s.stop - s.start for s in slices) and partner in range(4)


def check_all_gather_and_reduce_scatter():
    P = MPIPartition(MPI.COMM_WORLD)
    line = P.create_partition_inclusive([3, 0, 1]).create_cartesian_topology_partition([1, 3])
    widths = {3: 1, 0: 3, 1: 2}
    x = torch.full((2, widths[P.rank]), float(P.rank)) if line.active else zero_volume_tensor(2)
    x.requires_grad = True
    y = AllGather(line, (1,))(x)
    assert y.tolist() == ([[3, 0, 0, 0, 1, 1]] * 2 if line.active else [[], []])
    y.backward(torch.ones(y.shape))
    assert (x.grad == 3).all() and x.grad.shape == x.shape
    for sizes, expected in ((None, {3: 2, 0: 2, 1: 2}), ({1: (1, 3, 2)}, widths)):
        z = torch.full((2, 6), 10.0**P.rank) if line.active else zero_volume_tensor(2)
        w = ReduceScatter(line, (1,), sizes=sizes)(z)
        assert not line.active or (w.shape == (2, expected[P.rank]) and (w == 1011).all())


def check_errors_are_raised_on_every_worker():
    P = MPIPartition(MPI.COMM_WORLD)
    grid, line = P.create_cartesian_topology_partition([2, 2]), P.create_cartesian_topology_partition([4])
    refused_everywhere(lambda: Repartition(own(P, [0], [1, 1, 1]), grid))
    refused_everywhere(lambda: Repartition(own(P, [0, 1], [1, 2]), grid)(torch.ones(2)))
    refused_everywhere(lambda: Repartition(grid, line.reshape(1, 4))(torch.ones(1, 1)[:, : int(P.rank % 2 == 0)]))
    for kind in (Broadcast, SumReduce):
        refused_everywhere(lambda kind=kind: kind(own(P, [0, 1, 2], [1, 3]), grid), Exception)
    refused_everywhere(lambda: AllSumReduce(grid, (2,)))


def check_halo_exchange_fills_the_halo_and_writes_nothing():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x = own(P, [1, 3], [1, 2])
    halo = np.array([[0, 0], [0, 1] if P_x.rank == 0 else [1, 0]]) if P_x.active else None
    layer = HaloExchange(P_x, halo, halo, halo)
    x = zero_volume_tensor(2)
    if P_x.active:
        x = torch.full((2, 3), float(P.rank))
        x[:, 2 if P_x.rank == 0 else 0] = 9
    before = x.clone()
    x.requires_grad = True
    y = layer(x)
    dy = torch.full(y.shape, 1.0 + P.rank)
    y.backward(dy)
    assert torch.equal(x.detach(), before) and (dy == 1.0 + P.rank).all()
    if P_x.active:
        assert y[0].tolist() == ([1, 1, 3] if P_x.rank == 0 else [1, 3, 3])
        assert x.grad[0].tolist() == ([2, 6, 0] if P_x.rank == 0 else [0, 6, 4])
    else:
        assert y.shape == x.shape


class Layer(HaloMixin, ConvMixin):
    pass


def check_a_convolution_of_the_users_own_from_the_mixins():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x = P.create_cartesian_topology_partition([1, 1, 4])
    for extent, kernel, stride, padding, dilation in ((10, 2, 2, 0, 1), (13, 3, 1, 1, 1), (17, 3, 2, 1, 2)):
        shape = [2, 1, extent]
        x = torch.arange(2.0 * extent, dtype=torch.float64).reshape(shape)
        weight = torch.arange(1.0, kernel + 1, dtype=torch.float64).reshape(1, 1, -1)
        place = (P_x.shape, P_x.index, shape)
        block = x[assemble_slices(compute_start_index(*place), compute_stop_index(*place))]
        halo, receive, send, needed = Layer()._compute_exchange_info(
            shape, [kernel], [stride], [padding], [dilation], P_x.active, P_x.shape, P_x.index
        )
        padded = torch.nn.functional.pad(block, distdl_padding_to_torch_padding(halo))
        filled = HaloExchange(P_x, halo, receive, send)(padded)[assemble_slices(*needed.T)]
        ends = [padding * int(P_x.index[2] == 0), padding * int(P_x.index[2] == 3)]
        y = torch.nn.functional.conv1d(torch.nn.functional.pad(filled, ends), weight, None, stride, 0, dilation)
        whole = torch.nn.functional.conv1d(x, weight, None, stride, padding, dilation)
        start = compute_start_index(P_x.shape, P_x.index, whole.shape)
        stop = compute_stop_index(P_x.shape, P_x.index, whole.shape)
        assert torch.equal(y[..., : (stop - start)[2]], whole[assemble_slices(start, stop)]), (extent, P.rank)
