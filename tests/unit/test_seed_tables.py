"""The worked examples of the founding document on back-ends: which workers form which team, to the number."""

import pytest

P0, P1, P2 = [1, 0, 6, 7], [2, 3, 8, 9], [3, 4, 5, 10, 11]
# worker: (the team that it leads, the team in which it is one of many)
TABLE = {
    0: (None, P0), 1: (P0, P0), 2: (P1, P1), 3: (P2, P1), 4: (None, P2), 5: (None, P2),
    6: (None, P0), 7: (None, P0), 8: (None, P1), 9: (None, P1), 10: (None, P2), 11: (None, P2),
}  # fmt: skip


def teams(world, rank, method):
    P = world(12, rank)
    small = P.create_partition_inclusive([1, 2, 3]).reshape(1, 3, 1)
    large = P.reshape(2, 3, 2)
    if method == "broadcast":
        return small.create_broadcast_partition_to(large)
    return large.create_reduction_partition_to(small)


@pytest.mark.parametrize("rank", range(12))
def test_all_reduction_of_2x3x2_over_the_first_and_last_axis(world, rank):
    groups = [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    team = world(12, rank).reshape(2, 3, 2).create_allreduction_partition((0, 2))
    assert team.workers.tolist() == next(group for group in groups if rank in group)
    assert team.active and team.workers.ndim == 1


@pytest.mark.parametrize("rank", range(12))
def test_broadcast_of_1x3x1_to_2x3x2(world, rank):
    P_send, P_recv = teams(world, rank, "broadcast")
    send, receive = TABLE[rank]
    assert P_send.workers.tolist() == (send or []) and P_send.active == (send is not None)
    assert P_recv.workers.tolist() == receive and P_recv.active
    assert P_send.rank == (0 if send else -1)


@pytest.mark.parametrize("rank", range(12))
def test_sum_reduction_of_2x3x2_to_1x3x1(world, rank):
    P_send, P_recv = teams(world, rank, "sum")
    receive, send = TABLE[rank]
    assert P_send.workers.tolist() == send and P_send.active
    assert P_recv.workers.tolist() == (receive or []) and P_recv.active == (receive is not None)


def test_transposed_partitions_form_teams_of_the_reversed_shape(world):
    P = world(12, rank=5)
    row = P.create_partition_inclusive([0, 1, 2]).reshape(1, 3)
    grid = P.reshape(3, 4)
    assert row.create_broadcast_partition_to(grid, transpose_src=True)[1].workers.tolist() == [1, 4, 5, 6, 7]
    assert grid.create_reduction_partition_to(row, transpose_dest=True)[0].workers.tolist() == [1, 4, 5, 6, 7]
    column = P.create_partition_inclusive([0, 1, 2, 3]).reshape(4, 1)
    assert column.create_broadcast_partition_to(grid, transpose_dest=True)[1].workers.tolist() == [1, 5, 9]
