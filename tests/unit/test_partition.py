"""Partitions as values. The world here sends no message: every message is an error."""

import copy
import pickle

import numpy as np
import pytest

from distdl.partition import CartesianPartition, Partition
from distdl.partition.groups import check_spread


def test_unstructured_attributes(world):
    P = world(4, rank=2)
    assert (P.size, P.rank, P.active, P.index, P.dim) == (4, 2, True, 2, 1)
    assert P.shape.tolist() == [4]


def test_inclusive_keeps_the_order_given(world):
    P = world(6, rank=1).create_partition_inclusive(np.array([4, 1, 3]))
    assert P.workers.tolist() == [4, 1, 3] and (P.rank, P.index, P.size) == (1, 1, 3)
    assert P.create_partition_inclusive([2, 0]).workers.tolist() == [3, 4]


def test_inactive_attributes(world):
    P = world(6, rank=0)
    team = P.create_partition_inclusive([4, 1, 3])
    assert (team.active, team.rank, team.size, team.index) == (False, -1, -1, None)
    grid = team.create_cartesian_topology_partition([3, 1])
    assert (grid.active, grid.rank, grid.size, grid.index, grid.dim) == (False, -1, -1, None, 2)
    assert grid.shape.tolist() == [3, 1]


def test_cartesian_attributes(world):
    P = world(12, rank=8).create_cartesian_topology_partition((2, 3, 2))
    assert isinstance(P, CartesianPartition)
    assert P.shape.tolist() == [2, 3, 2] and P.dim == 3 and P.size == 12 and P.rank == 8
    assert P.index.tolist() == list(np.unravel_index(8, (2, 3, 2)))
    assert P.index[-1] == 0 and np.issubdtype(P.index.dtype, np.integer)
    assert (P.index == 0).tolist() == [False, False, True]


@pytest.mark.parametrize("shape", [[2, 3, 2], [12], [1, 12], [3, 1, 4]])
def test_cartesian_index_is_row_major(world, shape):
    P = world(12).create_cartesian_topology_partition(shape)
    for rank in range(12):
        assert P.cartesian_index(rank).tolist() == list(np.unravel_index(rank, shape))


def test_neighbor_ranks(world):
    P = world(12).reshape(2, 3, 2)
    assert P.neighbor_ranks(0) == [(-1, 6), (-1, 2), (-1, 1)]
    assert P.neighbor_ranks(9) == [(3, -1), (7, 11), (8, -1)]
    team = world(14).create_partition_inclusive(np.arange(2, 14)).reshape(2, 3, 2)
    assert team.workers[1, 1, 1] == 11
    with pytest.raises(ValueError, match="worker 0 is not active"):
        team.neighbor_ranks(9)


def test_subtopology(world):
    P = world(12, rank=9).reshape(2, 3, 2)
    assert P.create_cartesian_subtopology_partition([True, False, True]).workers.tolist() == [[2, 3], [8, 9]]
    assert P.create_cartesian_subtopology_partition([0, 1, 0]).workers.tolist() == [7, 9, 11]
    assert P.create_cartesian_subtopology_partition([0, 0, 0]).workers.tolist() == 9
    outside = world(13, rank=12).create_partition_inclusive(range(12)).reshape(2, 3, 2)
    sub = outside.create_cartesian_subtopology_partition([True, False, True])
    assert not sub.active and sub.shape.tolist() == [2, 2]
    with pytest.raises(ValueError, match="one mark for each axis"):
        P.create_cartesian_subtopology_partition([True])


def test_union_lists_the_callers_workers_first(world):
    P = world(6, rank=5)
    a, b = P.create_partition_inclusive([3, 1]), P.create_partition_inclusive([0, 1, 2]).reshape(3, 1)
    assert (a | b).workers.tolist() == [3, 1, 0, 2]
    assert a.create_partition_union(b) == a | b and (b | a).workers.tolist() == [0, 1, 2, 3]
    assert type(b | a) is Partition


def test_slices_keep_their_axes(world):
    P = world(12, rank=7).reshape(2, 3, 2)
    assert P[:, :1].workers.tolist() == [[[0, 1]], [[6, 7]]]
    assert P[1].workers.shape == (1, 3, 2) and P[..., -1].workers.shape == (2, 3, 1)
    assert P[0, 1:, ...].workers.tolist() == [[[2, 3], [4, 5]]]
    assert P[1].active and not P[0].active and P[0].index is None
    with pytest.raises(IndexError):
        P[2]
    with pytest.raises(TypeError, match="sliced by integers"):
        P[[0, 1]]


def test_transpose_and_reshape(world):
    P = world(6).reshape(2, 3)
    assert P.T.workers.tolist() == [[0, 3], [1, 4], [2, 5]] and P.T.T == P
    assert P.reshape(3, -1).workers.tolist() == [[0, 1], [2, 3], [4, 5]] == P.reshape([3, 2]).workers.tolist()
    team = world(6).create_partition_inclusive([2, 0])
    assert team == team.T


@pytest.mark.parametrize(
    "method", ["slice", "T", "reshape", "union", "equal", "inclusive", "cartesian", "all", "send", "sub"]
)
def test_inactive_partitions_make_the_same_values_as_active_ones(world, method):
    def make(rank):
        P = world(8, rank)
        grid = P.create_partition_inclusive([1, 2, 3, 4]).reshape(2, 2)
        few = P.create_partition_inclusive([2, 5]).reshape(1, 2)
        return {
            "slice": lambda: grid[:, :1],
            "T": lambda: grid.T,
            "reshape": lambda: grid.reshape(4, 1),
            "union": lambda: few | grid,
            "equal": lambda: grid == grid[:],
            "inclusive": lambda: grid.create_partition_inclusive([3, 0]),
            "cartesian": lambda: few.create_cartesian_topology_partition([2]),
            "all": lambda: grid.create_allreduction_partition([0]).active,
            "send": lambda: [team.active for team in few.create_broadcast_partition_to(grid)],
            "sub": lambda: grid.create_cartesian_subtopology_partition([True, False]).shape.tolist(),
        }[method]()

    inactive, active = make(7), make(2)
    if isinstance(active, Partition):
        assert inactive.workers.tolist() == active.workers.tolist() and not inactive.active
    elif method in ("all", "send"):
        assert inactive == ([False, False] if method == "send" else False)
    else:
        assert inactive == active


@pytest.mark.parametrize(
    "method", ["broadcast_data", "allgather_data", "allreduce_data", "cartesian_index", "neighbor_ranks"]
)
def test_inactive_partitions_refuse_what_only_members_can_do(world, method):
    P = world(4, rank=3).create_partition_inclusive([0, 1]).reshape(1, 2)
    with pytest.raises(
        ValueError, match=f"{method if 'ranks' not in method else 'cartesian_index'} is for the members"
    ):
        getattr(P, method)(0)


def test_broadcast_data_from_a_subpartition_passes_workers_outside_by(world):
    P = world(4, rank=3)
    team = P.create_partition_inclusive([0, 1])
    assert team.broadcast_data(None, P_data=team[:1]) is None


def test_equality_and_hash_are_by_value(world):
    P = world(6)
    a, b = (P.create_partition_inclusive([0, 1, 2, 3]).reshape(2, 2) for _ in range(2))
    assert a == b and hash(a) == hash(b) and a is not b
    assert a != P.create_partition_inclusive([0, 1, 3, 2]).reshape(2, 2)
    assert a != a.reshape(4, 1) and a.reshape(4) != P.create_partition_inclusive([0, 1, 2, 3])
    assert a != world(6).create_partition_inclusive([0, 1, 2, 3]).reshape(2, 2)
    assert a != 4 and len({a, b, a.T}) == 2


def test_workers_cannot_be_written(world):
    with pytest.raises(ValueError, match="read-only"):
        world(4).workers[0] = 2


def test_partitions_copy_to_themselves_and_refuse_pickling(world):
    P = world(4)
    assert copy.deepcopy(P) is P
    with pytest.raises(TypeError, match=r"distdl\.save"):
        pickle.dumps(P)


def test_deactivate_is_idempotent_and_leaves_children_alone(world):
    P = world(4, rank=1)
    team = P.create_partition_inclusive([0, 1])
    P.deactivate()
    P.deactivate()
    assert (P.active, P.rank, P.size, P.index) == (False, -1, -1, None)
    assert team.active and team.reshape(1, 2).active
    assert P.create_partition_inclusive([1]).active


@pytest.mark.parametrize(("make", "message"), [
    (lambda P: P.create_partition_inclusive([0, 0]), "different workers"),
    (lambda P: P.create_partition_inclusive([4]), "from 0 to 3"),
    (lambda P: P.create_cartesian_topology_partition([2, 3]), "2x3 has 6 places, and there are 4 workers"),
    (lambda P: P.reshape(-1, 3), "as many places as there are workers"),
    (lambda P: P.create_allreduction_partition([1]), "0 to 0"),
    (lambda P: P.reshape(2, 2).create_allreduction_partition([0, -2]), "at most once"),
    (lambda P: P.broadcast_data(0, root=4), "root from 0 to 3"),
    (lambda P: P.broadcast_data(0, root=True), "root from 0 to 3 in 4 on workers 0..3; got True"),
    (lambda P: P[:2].broadcast_data(0, P_data=P), "sub-partition"),
    (lambda P: CartesianPartition(P.comm, [[0, 9]]), "from 0 to 3"),
])  # fmt: skip
def test_bad_input_is_a_value_error_that_names_the_rule(world, make, message):
    with pytest.raises(ValueError, match=message):
        make(world(4))


@pytest.mark.parametrize(("make", "message"), [
    (lambda P: P | 1, "other to be a Partition; got 1"),
    (lambda P: P.create_partition_union("x"), "other to be a Partition; got 'x'"),
    (lambda P: P.create_broadcast_partition_to(None), "P to be a Partition; got None"),
    (lambda P: P.create_reduction_partition_to(None), "P to be a Partition; got None"),
    (lambda P: P.create_broadcast_partition_to(P, transpose_src=2), "transpose_src to be True or False; got 2"),
    (lambda P: P.broadcast_data(P_data=3), "P_data to be a Partition or None; got 3"),
    (lambda P: P.broadcast_data(0, root="a"), "root to be a whole number; got 'a'"),
    (lambda P: P[True], "sliced by integers, slices and '...'; got True"),
    (lambda P: P.create_partition_inclusive([True, False, True, False]), r"needs whole numbers; got \[True, False, "),
])  # fmt: skip
def test_what_is_no_partition_is_a_type_error_that_names_the_argument(world, make, message):
    with pytest.raises(TypeError, match=message):
        make(world(4))


def test_partitions_of_two_worlds_do_not_mix(world):
    with pytest.raises(ValueError, match="different worlds"):
        world(4) | world(4)


def test_repr_shows_shape_and_workers(world):
    assert repr(world(12).reshape(2, 6)) == "2x6 on workers 0..11"
    assert repr(world(12).create_partition_inclusive([3, 1])) == "2 on workers 3, 1"
    assert len(repr(world(10000).create_partition_inclusive(range(0, 10000, 2)))) < 100


def test_check_spread_names_axis_and_shapes():
    with pytest.raises(ValueError, match=r"axis 2 is 3 in P_x and 2 in P_y \(P_x: 1x1x3, P_y: 3x3x2\)"):
        check_spread((1, 1, 3), (3, 3, 2))
    with pytest.raises(ValueError, match=r"at most as many axes as P_y; P_x has 2 and P_y has 1"):
        check_spread((1, 3), (3,))
