"""The published partitions under MPI."""

import gc
import weakref
from contextlib import redirect_stdout
from functools import partial
from io import StringIO

import numpy as np
import torch
from mpi4py import MPI
from mpi_movements import refused_everywhere

import distdl
from distdl.backends.mpi.buffer import MPIBufferManager
from distdl.backends.mpi.partition import MPICartesianPartition, MPIPartition
from distdl.nn import AllSumReduce, Broadcast, Repartition, SumReduce
from distdl.transport.communicator import CommunicationError
from distdl.utilities.debug import print_sequential
from distdl.utilities.tensor_decomposition import compute_subtensor_shapes_unbalanced
from distdl.utilities.torch import TensorStructure


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


def check_wrong_arguments_are_refused_everywhere():
    comm, no_link = distdl.world().comm, (3, "a", (1, 2), 2.5, torch.zeros(2))
    for wrong in no_link:
        for name in ("comm", "group", "root"):
            refused_everywhere(lambda name=name, wrong=wrong: MPIPartition(**{name: wrong}), TypeError)
        refused_everywhere(lambda wrong=wrong: MPICartesianPartition(wrong, [[0, 1]]), TypeError)
    for wrong in (None, "a", [2.5], [None], {"a": 1}):
        refused_everywhere(lambda wrong=wrong: MPICartesianPartition(comm, wrong), TypeError)
    for wrong in ([4], [-7], [2**62], [0, 0]):
        refused_everywhere(lambda wrong=wrong: MPICartesianPartition(comm, wrong), ValueError)


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
    world = distdl.world(MPI.COMM_WORLD.Split(rank % 2))
    assert distdl.distribute_tensor(torch.arange(4.0), world).sum().item() == 6.0
    communicator = weakref.ref(world.comm)
    world.deactivate()
    del world
    assert distdl.world().size == 4
    gc.collect()
    assert communicator() is None


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


def check_large_strided_messages_are_packed():
    """MPI is given the bytes of buffers. Smaller strided messages it reads and writes where they lie."""
    from distdl.backends.mpi import messages

    P = distdl.world("mpi")
    world, after, before, kinds = P.comm._world, (P.rank + 1) % 4, (P.rank - 1) % 4, []

    class Watched:
        """The MPI communicator, and the datatypes of what it is given to send and to receive."""

        def __getattr__(self, name):
            if name in ("Isend", "Irecv"):
                return lambda message, *rest: kinds.append(message[2]) or getattr(world, name)(message, *rest)
            return getattr(world, name)

    P.comm._world = Watched()
    try:
        for nbytes, packed in ((messages.LARGEST_STRIDED, False), (messages.LARGEST_STRIDED + 512, True)):
            columns = nbytes // 512
            rows = torch.arange(512.0 * 4 * columns).reshape(512, -1)
            x = rows.chunk(4)[P.rank].clone()
            for _ in range(2):
                kinds.clear()
                y = Repartition(P.reshape(4, 1), P.reshape(1, 4))(x)
                assert torch.equal(y, rows.chunk(4, 1)[P.rank])
                assert torch.equal(Repartition(P.reshape(1, 4), P.reshape(4, 1))(y), x)
                assert len(kinds) == 12
                assert all(kind == MPI.BYTE for kind in kinds) == packed
            kinds.clear()
            found = torch.zeros_like(x)
            P.comm.exchange([(after, x[:, :columns])], [(before, found[:, columns : 2 * columns])]).wait()
            assert torch.equal(found[:, columns : 2 * columns], rows.chunk(4)[before][:, :columns])
            assert not found[:, :columns].any()
            assert not found[:, 2 * columns :].any()
            assert [kind == MPI.BYTE for kind in kinds] == [packed, packed]
    finally:
        P.comm._world = world


def check_inclusive_partitions_of_every_kind():
    P = MPIPartition(MPI.COMM_WORLD)
    for parent in (P, P.create_partition_inclusive(np.arange(4)), P.create_cartesian_topology_partition((2, 2))):
        for ranks in ([2, 0], np.array([2, 0])):
            child = parent.create_partition_inclusive(ranks)
            assert child.workers.tolist() == [2, 0] and child.active == (P.rank in (0, 2))
            assert not child.active or child.rank == {2: 0, 0: 1}[P.rank]
    last = P.create_partition_inclusive([3]).create_partition_inclusive([0])
    assert last.active == (P.rank == 3)


def check_topologies_are_row_major_and_independent():
    P = MPIPartition(MPI.COMM_WORLD)
    base = P.create_partition_inclusive([3, 0, 2])
    base.deactivate()
    first, second = base.create_cartesian_topology_partition([1, 3]), base.create_cartesian_topology_partition((3, 1))
    assert first.workers.tolist() == [[3, 0, 2]] and first.active == (P.rank in (3, 0, 2))
    if first.active:
        assert first.index.tolist() == list(np.unravel_index(first.rank, (1, 3)))
        first.deactivate()
        assert second.active and second.index.tolist() == [[3, 0, 2].index(P.rank), 0]
        assert second._comm.Get_size() == 3
    assert not first.active and first.shape.tolist() == [1, 3]


def check_the_attributes_of_active_and_inactive_partitions():
    P = MPIPartition(MPI.COMM_WORLD)
    team = P.create_partition_inclusive([1, 2])
    grid = team.create_cartesian_topology_partition([1, 2])
    assert isinstance(P.rank, int) and isinstance(P.size, int) and P.active is True
    assert P.shape.tolist() == [4] and P.dim == 1 and P.index == P.rank
    assert P._comm == P._root == MPI.COMM_WORLD and P._group.Get_size() == 4
    for one in (team, grid):
        assert one.active is (P.rank in (1, 2)) and one._root == MPI.COMM_WORLD
        assert MPI.Group.Translate_ranks(one._group, [0, 1], MPI.COMM_WORLD.group) == [1, 2]
    if grid.active:
        assert isinstance(grid.rank, int) and grid.size == 2 and isinstance(grid.shape, np.ndarray) and grid.dim == 2
        assert isinstance(grid.index, np.ndarray) and grid.index.dtype.kind == grid.shape.dtype.kind == "i"
        assert len(np.where(grid.index == 0)[0]) == (2 if P.rank == 1 else 1) and grid.index[-1] == P.rank - 1
        gathered = grid._comm.gather(torch.full((2,), float(P.rank)), root=0)
        assert grid.rank != 0 or torch.stack(gathered).tolist() == [[1.0, 1.0], [2.0, 2.0]]
    else:
        for one in (team, grid):
            assert (one.rank, one.size, one.index) == (MPI.PROC_NULL, -1, None) and one._comm == MPI.COMM_NULL
    assert grid.shape[0] == 1 and grid.shape[1:].tolist() == [2]


def check_equality_is_by_value():
    P = MPIPartition(MPI.COMM_WORLD)
    one, same = P.create_partition_inclusive([1, 2]), P.create_partition_inclusive([1, 2])
    assert one == same and one is not same and one != P.create_partition_inclusive([2, 1])
    assert one.reshape(1, 2) == same.reshape(1, 2) != same.reshape(2, 1) and one != one.reshape(2)
    grid = P.create_cartesian_topology_partition([2, 2])
    x = torch.ones(2, 2)
    assert torch.equal(Repartition(grid, grid)(x), x) and torch.equal(Broadcast(grid, grid)(x), x)


def check_teams_of_broadcasts_and_reductions():
    P = MPIPartition(MPI.COMM_WORLD)
    few = P.create_partition_inclusive([2, 3]).create_cartesian_topology_partition([1, 2])
    grid = P.create_cartesian_topology_partition([2, 2])
    send, receive = few.create_broadcast_partition_to(grid)
    assert send.active == few.active and receive.active
    assert receive.workers.tolist()[0] == 2 + P.rank % 2  # the root comes first
    up, down = grid.create_reduction_partition_to(few)
    assert up.active and down.active == few.active and up.workers.tolist() == receive.workers.tolist()
    send, receive = grid.create_broadcast_partition_to(grid, transpose_src=True)
    assert receive.workers[0] == [0, 2, 1, 3][P.rank]
    rows = grid.create_allreduction_partition((1,))
    assert sorted(rows.workers.tolist()) == [[0, 1], [2, 3]][P.rank // 2]
    assert few.create_partition_union(P.create_partition_inclusive([0, 3])).workers.tolist() == [2, 3, 0]


def check_values_are_shared():
    P = MPIPartition(MPI.COMM_WORLD)
    assert P.broadcast_data({"n": P.rank}, root=2) == {"n": 2}
    inner = P.create_partition_inclusive([3, 1])
    assert P.broadcast_data(P.rank if inner.active else None, root=0, P_data=inner) == 3
    assert P.allgather_data((P.rank, "x")) == [(w, "x") for w in range(4)]
    assert P.allreduce_data(P.rank + 1) == 10 and P.allreduce_data(np.array([P.rank, 1]), op="sum").tolist() == [6, 4]
    assert P.allreduce_data(P.rank, op="max") == 3


def check_cartesian_methods():
    P = MPIPartition(MPI.COMM_WORLD)
    grid = P.create_cartesian_topology_partition([2, 2])
    assert grid.cartesian_index(2).tolist() == [1, 0]
    assert grid.neighbor_ranks(3) == [(1, MPI.PROC_NULL), (2, MPI.PROC_NULL)]
    row = grid.create_cartesian_subtopology_partition([False, True])
    assert row.shape.tolist() == [2] and row.workers.tolist() == [[0, 1], [2, 3]][P.rank // 2]


def check_layers_end_on_some_workers_first():
    P = MPIPartition(MPI.COMM_WORLD)
    grid = P.create_cartesian_topology_partition([2, 2])
    layer = Repartition(grid, grid.T)
    layer(torch.ones(1, 1))
    if P.rank % 2:  # no clean-up is collective
        del layer
        gc.collect()
    assert MPI.COMM_WORLD.allreduce(1) == 4


def check_values_are_printed_in_order():
    P = distdl.backend.backend.Partition(MPI.COMM_WORLD)
    assert isinstance(P, MPIPartition)
    for show in (P.print_sequential, lambda value: print_sequential(P._comm, value), partial(print_sequential, P)):
        with redirect_stdout(StringIO()) as text:
            show(f"worker {P.rank}")
        assert text.getvalue().split("\n")[:-1] == [f"worker {w}" for w in range(4) if P.rank == 0]


def check_shapes_of_uneven_blocks_are_collected():
    P = MPIPartition(MPI.COMM_WORLD)
    P_x = P.create_partition_inclusive([2, 1]).create_cartesian_topology_partition([1, 2])
    x = torch.ones(2, P.rank) if P_x.active else torch.zeros(0)
    shapes = compute_subtensor_shapes_unbalanced(TensorStructure(x), P_x)
    assert shapes.tolist() == [[[2, 2], [2, 1]]] if P_x.active else shapes is None
    told = compute_subtensor_shapes_unbalanced(TensorStructure(x), P_x, P.create_partition_inclusive([0]))
    assert told is None if P.rank == 3 else told.tolist() == [[[2, 2], [2, 1]]]
