"""The published partition names under MPI, checked by all processes of one job; prints the name of each check."""

import numpy as np
import torch
from mpi4py import MPI

import distdl
from distdl.backends.mpi.buffer import MPIBufferManager
from distdl.backends.mpi.partition import MPICartesianPartition, MPIPartition
from distdl.comm import CommunicationError
from distdl.nn import AllSumReduce, Broadcast, Repartition, SumReduce


def refused(call, kind, words):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def check_the_world_is_one_duplicate_however_it_is_opened():
    P = MPIPartition(MPI.COMM_WORLD)
    again = MPIPartition(MPI.COMM_WORLD)
    assert P.comm is again.comm is distdl.world().comm is distdl.world(MPI.COMM_WORLD).comm
    assert P == again == distdl.world("mpi") and hash(P) == hash(again)
    assert distdl.world() is distdl.world("mpi") and distdl.world("mpi").comm is P.comm
    assert P.rank == MPI.COMM_WORLD.rank and P.size == MPI.COMM_WORLD.size == 4


def check_children_keep_their_kind_and_mpi_objects():
    P = MPIPartition(MPI.COMM_WORLD)
    team = P.create_partition_inclusive([3, 1])
    grid = team.create_cartesian_topology_partition([2, 1])
    assert type(team) is MPIPartition and type(grid) is MPICartesianPartition
    assert grid == distdl.world().create_partition_inclusive([3, 1]).reshape(2, 1)
    assert P._comm == MPI.COMM_WORLD and grid._root == MPI.COMM_WORLD
    assert grid._group.Get_size() == 2
    if grid.active:
        assert grid._comm.Get_size() == 2 and grid._comm.Get_rank() == grid.rank == (0 if P.rank == 3 else 1)
        grid._comm.Barrier()
        total = np.zeros(1)
        grid._comm.Reduce(np.array([P.rank + 1.0]), total, MPI.SUM, 0)
        assert total[0] == (6.0 if grid.rank == 0 else 0.0)
        assert grid._comm.gather(P.rank, root=0) == ([3, 1] if grid.rank == 0 else None)
    else:
        assert grid._comm == MPI.COMM_NULL and (grid.rank, grid.size) == (MPI.PROC_NULL, -1)
        assert grid.index is None and grid.shape.tolist() == [2, 1]
        assert grid.create_partition_inclusive([0]).rank == MPI.PROC_NULL
    line = P.create_cartesian_topology_partition([4])
    assert line.neighbor_ranks(0) == [(MPI.PROC_NULL, 1)] and line.neighbor_ranks(3) == [(2, MPI.PROC_NULL)]


def check_an_empty_partition():
    P = MPIPartition()
    assert not P.active and P.size == -1 and P._comm == MPI.COMM_NULL


def check_a_split_of_the_users():
    rank = MPI.COMM_WORLD.rank
    half = MPI.COMM_WORLD.Split(rank % 2, -rank)
    P = MPIPartition(half)
    assert P.size == 2 and P.rank == (0 if rank >= 2 else 1)
    y = AllSumReduce(P.reshape(2), [0])(torch.tensor([float(rank)]))
    assert y.item() == (4.0 if rank % 2 else 2.0)
    refused(lambda: P | MPIPartition(MPI.COMM_WORLD), ValueError, "different worlds")
    line = P.reshape(2)
    P.deactivate()
    P.deactivate()
    assert half == MPI.COMM_NULL and not P.active
    refused(lambda: line.allgather_data(1), CommunicationError, "deactivated")


def check_communicators_are_cached_by_group():
    P = MPIPartition(MPI.COMM_WORLD)
    before = len(P.comm._groups)
    for k in range(50):
        grid = P.create_cartesian_topology_partition([2, 2])
        AllSumReduce(grid, [k % 2])(torch.ones(1))
        SumReduce(grid, P.create_partition_inclusive([0, 1]).reshape(1, 2))(torch.ones(1))
    assert len(P.comm._groups) - before <= 2


def check_deactivation_in_any_order_with_layers_alive():
    P = MPIPartition(MPI.COMM_WORLD.Dup())
    base = P.create_partition_inclusive([0, 1, 2])
    P_x = base.create_cartesian_topology_partition([1, 3])
    P_y = P.create_cartesian_topology_partition([1, 4])
    first, second = Repartition(P_x, P_y, buffer_manager=MPIBufferManager()), Repartition(P_y, P_y)
    third = Broadcast(P_x, P_x)
    x = torch.ones(2, 4) if P_x.active else torch.zeros(0)
    assert first(x).shape == (2, 3)
    for partition in (P, base, P_x, P_y, P, base):
        partition.deactivate()
        assert not partition.active and partition.rank == MPI.PROC_NULL and partition.index is None
    refused(lambda layer=second: layer(torch.ones(2, 3)), CommunicationError, "deactivated")
    del first, second, third
    world = MPIPartition(MPI.COMM_WORLD)
    world.deactivate()
    assert MPI.COMM_WORLD.allreduce(1) == 4 and distdl.world().active
    assert distdl.world().allgather_data(distdl.world().rank) == [0, 1, 2, 3]


def check_large_messages_go_in_pieces():
    from distdl.backends.mpi import messages

    P = distdl.world("mpi")
    whole = messages.PIECE_BYTES
    messages.PIECE_BYTES = 64
    try:
        x = torch.arange(1001.0).double() + P.rank
        total = AllSumReduce(P.reshape(4), [0])(x)
        assert torch.equal(total, 4 * torch.arange(1001.0).double() + 6)
        y = Repartition(P.reshape(4), P.create_partition_inclusive([2]).reshape(1))(x)
        assert P.rank != 2 or torch.equal(y, torch.cat([torch.arange(1001.0).double() + w for w in range(4)]))
        z = Broadcast(P[1:2].reshape(1), P.reshape(4))(x if P.rank == 1 else torch.zeros(0))
        assert torch.equal(z, torch.arange(1001.0).double() + 1)
    finally:
        messages.PIECE_BYTES = whole


def main():
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            MPI.COMM_WORLD.Barrier()
            if MPI.COMM_WORLD.rank == 0:
                print(name, flush=True)


if __name__ == "__main__":
    main()
