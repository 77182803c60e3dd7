"""Messages and collectives: what the communicator itself promises."""

from __future__ import annotations

import copy

import numpy as np
import torch

import distdl
from contract.common import raises
from distdl.tensors.dtypes import DTYPES
from distdl.transport.communicator import SMALL_SUM


def check_exchange_around_a_ring():
    comm = distdl.world().comm
    if comm.size == 1:
        raises(ValueError, lambda: comm.exchange([(0, torch.ones(1))], []), "nobody")
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype in DTYPES[:-3]:
        wide, expected = (torch.full((4, 6), n + 1, dtype=torch.uint8).to(dtype) for n in (comm.rank, before))
        buffer = torch.zeros(6, 4, dtype=dtype).T
        comm.exchange([(after, wide)], [(before, buffer)]).wait()
        assert torch.equal(buffer, expected), dtype


def check_strided_messages():
    comm = distdl.world().comm
    if comm.size == 1:
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    base = torch.arange(48.0).reshape(2, 4, 6) + 100 * comm.rank
    views = {
        "transposed": base.transpose(0, 2), "strided": base[:, ::2, 1:5], "expanded": base[:, :1, :1].expand(2, 3, 4),
        "0-d": base[0, 0, 0], "one expanded element": base[0, 0, 0].expand(1, 1),
    }  # fmt: skip
    for name, view in views.items():
        buffer = torch.zeros(view.shape[::-1]).permute(tuple(range(view.dim()))[::-1])
        comm.exchange([(after, view)], [(before, buffer)]).wait()
        assert torch.equal(buffer, view + 100 * (before - comm.rank)), name


def check_messages_from_and_to_any_strides_touch_nothing_beside():
    comm, rng = distdl.world().comm, np.random.default_rng(3)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype in (torch.float32, torch.int16, torch.complex128) if comm.size > 1 else ():
        for _ in range(40):
            extents = rng.integers(1, 6, 4).tolist()
            steps, starts = rng.integers(1, 3, (2, 4)), rng.integers(0, 3, (2, 4))
            orders = [rng.permutation(4).tolist() for _ in range(2)]
            spaces = [torch.zeros([3 + 2 * extents[dim] for dim in order], dtype=dtype) for order in orders]
            views = [
                space[tuple(slice(a[d], a[d] + s[d] * extents[d], s[d]) for d in order)].permute(*np.argsort(order))
                for space, order, s, a in zip(spaces, orders, steps.tolist(), starts.tolist(), strict=True)
            ]
            numbers = torch.arange(views[0].numel()).reshape(extents)
            views[0].copy_(numbers + 1 + 7 * comm.rank)
            comm.exchange([(after, views[0])], [(before, views[1])]).wait()
            assert torch.equal(views[1], (numbers + 1 + 7 * before).to(dtype))
            assert spaces[1].count_nonzero() == numbers.numel()


def check_messages_of_a_pair_keep_their_order_and_tags_find_each_other():
    comm = distdl.world().comm
    if comm.size == 1:
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffers = [torch.zeros(2) for _ in range(4)]
    sends = [(after, torch.full((2,), float(k))) for k in range(4)]
    first = comm.exchange(sends[:2], [], tag=7)
    second = comm.exchange(sends[2:], [(before, buffers[2]), (before, buffers[3])], tag=32767)
    third = comm.exchange([], [(before, buffers[0]), (before, buffers[1])], tag=7)
    for pending in (second, third, first, first):
        pending.wait()
    assert [buffer[0].item() for buffer in buffers] == [0, 1, 2, 3]


def check_collectives_over_groups():
    comm = distdl.world().comm
    groups = [tuple(range(comm.size)), tuple(range(comm.size))[::-1], (comm.size - 1, 0), (0, comm.size - 1)]
    for group in groups:
        if comm.rank not in group or len(set(group)) < len(group) or len(group) < 2:
            continue
        total = sum(worker + 1 for worker in group)
        for dtype in DTYPES[:-6]:
            mine = torch.full((3, 2), comm.rank + 1, dtype=dtype)
            copied = mine.clone()
            comm.broadcast(group, copied).wait()
            assert torch.equal(copied, torch.full_like(mine, group[0] + 1))
            added, reduced, others = (torch.empty_like(mine) for _ in range(3))
            comm.all_sum(group, mine, added).wait()
            assert torch.equal(added, torch.full_like(mine, total)), (dtype, added)
            leads = comm.rank == group[0]
            comm.sum(group, mine, reduced if leads else None).wait()
            assert not leads or torch.equal(reduced, torch.full_like(mine, total)), (dtype, reduced)
            comm.sum(group, None if leads else mine, others if leads else None).wait()
            assert not leads or torch.equal(others, torch.full_like(mine, total - comm.rank - 1)), (dtype, others)
            assert torch.equal(mine, torch.full_like(mine, comm.rank + 1))
            gathered = comm.all_gather(group, mine)
            assert torch.equal(gathered, torch.stack([torch.full_like(mine, w + 1) for w in group]))
        highest = comm.all_max(group, np.array([comm.rank, -comm.rank]))
        assert highest.tolist() == [max(group), -min(group)]


def check_sums_and_copies_of_large_tensors():
    """Up to the size at which members send parts, and beyond; not a multiple of their number."""
    comm = distdl.world().comm
    for group in (tuple(range(comm.size)), tuple(range(comm.size))[:2]):
        if comm.rank not in group or len(group) < 2:
            continue
        for count in (SMALL_SUM // 8 - 3, SMALL_SUM // 8 + 1, 3 * SMALL_SUM + 7):
            mine = torch.arange(count, dtype=torch.float64) * (comm.rank + 1)
            expected = torch.arange(count, dtype=torch.float64) * sum(worker + 1 for worker in group)
            y = torch.empty_like(mine)
            comm.all_sum(group, mine, y).wait()
            assert torch.equal(y, expected)
            leads = comm.rank == group[0]
            y.zero_()
            comm.sum(group, mine, y if leads else None).wait()
            assert torch.equal(y, expected if leads else torch.zeros_like(y))
            comm.sum(group, None if leads else mine, y if leads else None).wait()
            own = torch.arange(count, dtype=torch.float64) * (group[0] + 1)
            assert torch.equal(y, expected - own if leads else torch.zeros_like(y))
            copied = torch.stack([mine, mine], 1)[:, 0] if leads else mine.clone()  # (a root may read strides)
            comm.broadcast(group, copied).wait()
            assert torch.equal(copied, own)


def check_collectives_of_overlapping_groups_at_once():
    comm = distdl.world().comm
    if comm.size < 4:
        return
    groups = [(0, 1, 2), (2, 3), (3, 1)]
    tensors = {group: torch.full((5,), float(comm.rank)) for group in groups if comm.rank in group}
    pending = [comm.broadcast(group, tensors[group]) for group in sorted(tensors, key=sorted)]
    for one in reversed(pending):
        one.wait()
    assert all((tensor == group[0]).all() for group, tensor in tensors.items())


def check_communicators_copy_to_themselves():
    comm = distdl.world().comm
    assert copy.deepcopy(comm) is comm
    raises(TypeError, lambda: comm.__reduce__(), "distdl.save")
