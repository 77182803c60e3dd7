"""Worlds, and the data that partitions send."""

from __future__ import annotations

import numpy as np
import torch

import distdl
from contract.common import raises, same_everywhere


def check_world():
    P = distdl.world()
    assert distdl.world() is P and type(P) is distdl.Partition
    assert P.active and P.rank == P.comm.rank == P.index and P.size == P.comm.size
    assert P.create_partition_inclusive([0]).rank == (0 if P.rank == 0 else P.comm.absent)
    assert P.allgather_data(P.rank) == list(range(P.size))


def check_broadcast_data_within_a_partition():
    P = distdl.world()
    for value in (np.arange(6.0).reshape(2, 3).T, torch.ones(3, dtype=torch.bfloat16), "text", 2**80, (1, "a", None)):
        for root in range(P.size):
            got = P.broadcast_data(value if P.rank == root else None, root=root)
            assert type(got) is type(value) and str(got) == str(value)


def check_broadcast_data_from_a_subpartition():
    P = distdl.world()
    team = P.create_partition_inclusive(range(P.size - 1, -1, -1))[: max(P.size - 1, 1)]
    got = P.broadcast_data(("shape", 3, 4) if team.rank == 0 else "ignored", P_data=team)
    assert got == ("shape", 3, 4)
    got = P.broadcast_data(np.array([P.rank]), root=team.workers.size - 1, P_data=team)
    assert got.tolist() == [team.workers[-1]]
    if not team.active:
        raises(ValueError, lambda: team.broadcast_data(1), "is for the members")
        assert team.broadcast_data(1, P_data=team[:1]) is None
    else:
        assert team.broadcast_data("inside", P_data=team[:1]) == "inside"


def check_allgather_and_allreduce_data():
    P = distdl.world()
    assert P.allgather_data("x" * P.rank) == ["x" * rank for rank in range(P.size)]
    ranks = np.arange(1, P.size + 1)
    assert P.allreduce_data(P.rank + 1) == ranks.sum() and P.allreduce_data(P.rank + 1, op="prod") == ranks.prod()
    for value, total in ((True, P.size), (2**62, P.size * 2**62), (-(3**99), -P.size * 3**99)):
        found = P.allreduce_data(value)
        assert type(found) is int and found == total, found
    assert P.allreduce_data(2**62, op="prod") == 2 ** (62 * P.size)
    assert P.allreduce_data(2**70 + P.rank, op="max") == 2**70 + P.size - 1
    assert P.allreduce_data(P.rank == 0, op="min") is (P.size == 1) and P.allreduce_data(P.rank == 0) == 1
    for kind in (np.int8, np.uint64):  # in their own dtype
        found = P.allreduce_data(np.full(1, 2, kind), op="sum")
        assert found.dtype == kind and found.tolist() == [2 * P.size]
    assert P.allreduce_data(np.True_) == P.size and P.allreduce_data(np.array([True, False])).tolist() == [P.size, 0]
    assert torch.equal(P.allreduce_data(torch.tensor([True, False])), torch.tensor([P.size, 0]))
    assert P.allreduce_data(np.array([P.rank == 0, True]), op="max").tolist() == [True, True]
    assert P.allreduce_data(0.5) == P.size / 2
    assert P.allreduce_data(np.array([P.rank, -P.rank]), op="max").tolist() == [P.size - 1, 0]
    assert torch.equal(P.allreduce_data(torch.tensor([P.rank]), op="min"), torch.tensor([0]))
    grid = P.reshape(-1, 1)
    assert grid.allgather_data(P.rank) == list(range(P.size))


def check_what_cannot_be_sent_is_the_same_error_everywhere():
    P = distdl.world()
    last = P.size - 1
    text = raises(
        ValueError, lambda: P.allgather_data(object() if P.rank == last else 1), "type object", f"worker {last}"
    )
    same_everywhere(P, text)
    same_everywhere(P, raises(ValueError, lambda: P.broadcast_data(object(), root=last), "type object"))
    if P.size > 1:
        same_everywhere(P, raises(ValueError, lambda: P.allreduce_data(np.zeros(P.rank)), "one shape"))
