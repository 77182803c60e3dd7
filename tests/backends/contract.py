"""The contract of a back-end: one suite that runs on all of them, on one worker or on four.

Every function whose name begins with ``check`` is run by all workers together, in the order in which they stand here.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import torch
from cases import MAKERS
from checks import assert_derivatives, assert_value, forward_mode, my_input
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.boxes import runs
from distdl.comm import SMALL_SUM, CommunicationError
from distdl.encoding import DTYPES
from distdl.exchange import move_together
from distdl.header import Carried
from distdl.layout import Layout
from distdl.nn import (
    AllGather,
    AllSumReduce,
    Broadcast,
    DistributedConv2d,
    DistributedCrossEntropyLoss,
    DistributedLinear,
    DistributedMaxPool2d,
    Repartition,
    SumReduce,
)
from distdl.planning import broadcast as broadcast_plan
from distdl.planning import copy as copy_plan
from distdl.route import Load, Route
from distdl.rows import along_axes
from distdl.testing import Counting, assert_adjoint, assert_matches_sequential
from distdl.utilities.torch import zero_volume_tensor


def raises(kind, call, *words):
    """What a call raises, on every worker; checked to be the same text on all of them."""
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
    assert all(word in text for word in words), text
    return text


def same_everywhere(P, value):
    values = P.allgather_data(value)
    assert all(one == values[0] for one in values), values


def pair(P):
    """Two partitions of which the first is copied to the second; with four workers, worker 0 is in neither."""
    if P.size == 1:
        return P.reshape(1, 1), P.reshape(1, 1)
    return P.create_partition_inclusive([2]).reshape(1, 1), P.create_partition_inclusive([3, 1]).reshape(2, 1)


# -- worlds and data


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
    found = P.allreduce_data(np.array([True, False]))
    assert found.dtype == bool and found.tolist() == [True, False]
    assert torch.equal(P.allreduce_data(torch.tensor([True, False])), torch.tensor([True, False]))
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


# -- messages


def check_exchange_around_a_ring():
    comm = distdl.world().comm
    if comm.size == 1:
        raises(ValueError, lambda: comm.exchange([(0, torch.ones(1))], []), "nobody")
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype in DTYPES[:-3]:
        wide, expected = (torch.full((4, 6), n + 1, dtype=torch.uint8).to(dtype) for n in (comm.rank, before))
        room = torch.zeros(6, 4, dtype=dtype).T
        comm.exchange([(after, wide)], [(before, room)]).wait()
        assert torch.equal(room, expected), dtype


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
        room = torch.zeros(view.shape[::-1]).permute(tuple(range(view.dim()))[::-1])
        comm.exchange([(after, view)], [(before, room)]).wait()
        assert torch.equal(room, view + 100 * (before - comm.rank)), name


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
    rooms = [torch.zeros(2) for _ in range(4)]
    sends = [(after, torch.full((2,), float(k))) for k in range(4)]
    first = comm.exchange(sends[:2], [], tag=7)
    second = comm.exchange(sends[2:], [(before, rooms[2]), (before, rooms[3])], tag=32767)
    third = comm.exchange([], [(before, rooms[0]), (before, rooms[1])], tag=7)
    for pending in (second, third, first, first):
        pending.wait()
    assert [room[0].item() for room in rooms] == [0, 1, 2, 3]


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


def check_sums_of_large_tensors():
    """Beyond the size at which members add up parts, and not a multiple of their number."""
    comm = distdl.world().comm
    for group in (tuple(range(comm.size)), tuple(range(comm.size))[:2]):
        if comm.rank not in group or len(group) < 2:
            continue
        for count in (SMALL_SUM // 8 + 1, 3 * SMALL_SUM + 7):
            mine = torch.arange(count, dtype=torch.float64) * (comm.rank + 1)
            expected = torch.arange(count, dtype=torch.float64) * sum(worker + 1 for worker in group)
            y = torch.empty_like(mine)
            comm.all_sum(group, mine, y).wait()
            assert torch.equal(y, expected)
            leads = comm.rank == group[0]
            y.zero_()
            comm.sum(group, mine, y if leads else None).wait()
            assert torch.equal(y, expected if leads else torch.zeros_like(y))


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
    raises(TypeError, lambda: comm.__reduce__(), "state_dict")


# -- primitives


def check_random_primitives():
    P = distdl.world()
    for make in MAKERS.values():
        for seed in range(6):
            case = make(P, np.random.default_rng(1000 + seed))
            assert_value(case)
            assert_adjoint(case.layer, my_input(case))


def check_primitives_between_the_same_workers_in_another_order():
    """A swap makes two teams of the same two workers, each the root of one."""
    P = distdl.world()
    line = P.reshape(P.size)
    swapped = P.create_partition_inclusive([worker ^ 1 if P.size > 1 else 0 for worker in range(P.size)]).reshape(-1)
    turned = P.create_partition_inclusive([(worker + 1) % P.size for worker in range(P.size)]).reshape(-1)
    for other in (swapped, turned):
        for P_x, P_y in ((line, other), (other, line)):
            for layer in (Broadcast(P_x, P_y), SumReduce(P_x, P_y), Repartition(P_x, P_y)):
                x = torch.full((2,), float(P.rank), requires_grad=True)
                y = layer(x)
                source = P_x.workers[P_y.workers == P.rank].item()
                target = P_y.workers[P_x.workers == P.rank].item()
                y.backward(torch.full((2,), float(P.rank)))
                assert y.tolist() == [source] * 2 and x.grad.tolist() == [target] * 2


def check_derivatives():
    P = distdl.world()
    for make in MAKERS.values():
        for seed in range(2):
            assert_derivatives(make(P, np.random.default_rng(2000 + seed)))


def check_what_each_kind_of_worker_gets():
    P = distdl.world()
    few, many = pair(P)
    for layer, P_in, P_out in ((Broadcast, few, many), (SumReduce, many, few)):
        for batch in (True, False):
            x = torch.ones(5, 3).double() if P_in.active else zero_volume_tensor(4)
            x.requires_grad_()
            y = layer(P_in, P_out, preserve_batch=batch)(x)
            if P_out.active:
                assert y.shape == (5, 3) and y.dtype == torch.float64
            elif P_in.active:
                assert y.shape == ((5, 0) if batch else (0,)) and y.dtype == torch.float64
            else:
                assert y.shape == (4, 0) and y.dtype == torch.float32 and y is not x
            assert y.requires_grad
            y.backward(torch.ones_like(y))
            assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
            x.grad.detach()


def check_any_tensor_moves():
    P = distdl.world()
    row = P.reshape(1, P.size, 1, 1)
    layers = [
        Repartition(row, P.reshape(1, 1, P.size, 1)),
        AllGather(row, [1]),
        Broadcast(P[:1].reshape(1, 1, 1, 1), row),
    ]
    base = torch.randn(2, 3, 2 * P.size, 5, generator=torch.Generator().manual_seed(P.rank)) * 4
    views = {
        "plain": base, "transposed": base.transpose(0, 3), "channels_last": base.to(memory_format=torch.channels_last),
        "expanded": base[:, :1, :, :1].expand(2, 3, 2 * P.size, 5), "empty": base[:, :0],
    }  # fmt: skip
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int32,
              torch.int16, torch.bool)  # fmt: skip
    for layer in layers:
        for name, view in views.items():
            shape = [2, view.shape[1], 2 * P.size, 5] if name != "transposed" else list(view.shape)
            for dtype in dtypes:
                x = view.to(dtype)
                given = x if layer.P_x.active else torch.zeros(0)
                y = layer(given)
                z = layer(given.contiguous().clone())
                assert torch.equal(y, z) and y.dtype == dtype, (layer, name, dtype, shape)


def check_tensors_stay_where_they_are_whatever_the_default_device():
    P = distdl.world()
    layers = [Repartition(P.reshape(P.size, 1), P.reshape(1, P.size)), AllSumReduce(P.reshape(1, P.size), [1])]
    for layer in layers:
        for rows in (2, 1 << 16):  # in new memory, and in recycled memory
            x = torch.arange(4.0 * P.size * rows).reshape(rows, 4 * P.size) + P.rank
            expected, gradients = layer(x), []
            for device in ("meta", "cpu"):
                given = x.clone().requires_grad_()
                with torch.device(device):
                    y = layer(given)
                    y.backward(expected)
                assert y.device.type == "cpu" and torch.equal(y, expected)
                gradients.append(given.grad)
            assert torch.equal(*gradients)


def check_views_that_are_conjugated_or_negated_when_they_are_read():
    P = distdl.world()
    z = torch.tensor([1 + 2j, 3 - 4j]) * (P.rank + 1)
    expected = torch.tensor([1 - 2j, 3 + 4j])
    scale = P.size * (P.size + 1) / 2
    assert torch.equal(AllSumReduce(P, [0])(z.conj()), scale * expected)
    assert torch.equal(AllSumReduce(P, [0])(z.conj().imag), scale * torch.tensor([-2.0, 4.0]))
    assert torch.equal(AllGather(P, [0])(z.conj())[:2], expected)
    got = Broadcast(P[-1:], P)(z.conj() if P.rank == P.size - 1 else torch.zeros(0))
    assert torch.equal(got, P.size * expected)
    assert all(torch.equal(one, (n + 1) * expected) for n, one in enumerate(P.allgather_data(z.conj())))


def check_dtypes_that_torch_does_not_add():
    P = distdl.world()
    for dtype in (torch.uint16, torch.float8_e5m2):
        x = torch.ones(2).to(dtype)
        assert torch.equal(Broadcast(P[:1], P)(x).float(), torch.ones(2))
        for layer in (AllSumReduce(P, [0]), SumReduce(P, P[:1])):
            same_everywhere(P, raises(ValueError, lambda layer=layer, x=x: layer(x), "adds tensors", str(dtype)))


def check_sums_of_any_dtype():
    P = distdl.world()
    row = P.reshape(1, P.size)
    total = P.size * (P.size + 1) // 2
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int16, torch.uint8):
        x = torch.full((2, 3), P.rank + 1, dtype=dtype)
        y = AllSumReduce(row, [1])(x)
        assert y.dtype == dtype and torch.equal(y, torch.full_like(x, total))
        z = SumReduce(row, P[:1].reshape(1, 1))(x.T)
        assert torch.equal(z, torch.full_like(x.T, total)) if P.rank == 0 else z.shape == (3, 0)
    y = AllSumReduce(row, [1])(torch.tensor([P.rank == 0, False]))
    assert y.tolist() == [True, False] and y.dtype == torch.bool


def check_integers_carry_no_gradient():
    P = distdl.world()
    few, many = pair(P)
    x = torch.arange(3) if few.active else zero_volume_tensor(requires_grad=True)
    y = Broadcast(few, many)(x)
    if P.size == 1 or many.active:
        assert y.tolist() == [0, 1, 2] and not y.requires_grad


def check_backward_straight_after_a_primitive():
    P = distdl.world()
    row = P.reshape(P.size, 1)
    for layer in (
        AllSumReduce(row, [0]),
        Repartition(row, row),
        AllGather(row, [0]),
        Broadcast(P[:1].reshape(1, 1), row),
    ):
        x = torch.ones(3, 2, requires_grad=True) if layer.P_x.active else zero_volume_tensor(requires_grad=True)
        layer(x).sum().backward()
        expected = {"AllSumReduce": P.size, "AllGather": P.size, "Broadcast": P.size}.get(type(layer).__name__, 1)
        assert torch.equal(x.grad, torch.full_like(x, expected))


def check_inputs_and_gradients_are_not_written():
    P = distdl.world()
    row = P.reshape(P.size, 1)
    for layer in (AllSumReduce(row, [0]), Repartition(row, row), SumReduce(row, P[:1].reshape(1, 1))):
        x = torch.ones(3, 2, requires_grad=True)
        y = layer(x)
        dy = torch.full_like(y, 2.0)
        y.backward(dy)
        assert torch.equal(x.detach(), torch.ones(3, 2)) and torch.equal(dy, torch.full_like(dy, 2.0))
        assert x.grad.data_ptr() != dy.data_ptr() and y.data_ptr() != x.data_ptr()


def check_any_subset_of_workers_may_require_a_gradient():
    P = distdl.world()
    few, many = pair(P)
    for layer, P_in, scale in ((Broadcast(few, many), few, many.workers.size), (SumReduce(many, few), many, 1)):
        for subset in range(2**P.size):
            x = torch.ones(2, 3) if P_in.active else zero_volume_tensor()
            x.requires_grad_(bool(subset >> P.rank & 1))
            y = layer(x)
            members = set((few | many).workers.tolist())
            anyone = any(subset >> w & 1 for w in (members if P.rank in members else {P.rank}))
            assert y.requires_grad == anyone
            if anyone:
                y.sum().backward()
            if x.requires_grad:
                assert torch.equal(x.grad, torch.full_like(x, scale))


# -- changes between calls


def repartition_rows_to_columns(P):
    return Repartition(P.reshape(P.size, 1), P.reshape(1, P.size))


def expect_repartition(P, layer, rows, columns, dtype=torch.float64):
    """Rows of the given heights, of a tensor with the given number of columns, repartitioned to columns."""
    whole = torch.arange(float(sum(rows) * columns)).reshape(sum(rows), columns).to(dtype)
    start = sum(rows[: P.rank])
    y = layer(whole[start : start + rows[P.rank]])
    stops = np.cumsum([0, *(columns // P.size + (w < columns % P.size) for w in range(P.size))])
    assert torch.equal(y, whole[:, stops[P.rank] : stops[P.rank + 1]]) and y.dtype == dtype


def check_shapes_may_change_on_any_worker():
    P = distdl.world()
    layer = repartition_rows_to_columns(P)
    even = [3] * P.size
    for rows in (even, even, [4, *even[1:]], [*even[:-1], 7], even, [0, *even[1:]], [1] * P.size):
        expect_repartition(P, layer, rows, 5)
    for columns in (4, 6, 9, 10):
        expect_repartition(P, layer, even, columns)
    ring = Broadcast(P[:1].reshape(1), P)
    for shape in ((1, 4), (1, 6), (1, 6), (2, 3), (4,), ()):
        x = torch.ones(shape) if P.rank == 0 else zero_volume_tensor()
        assert ring(x).shape == shape


def check_a_batch_that_shrinks():
    P = distdl.world()
    layer = repartition_rows_to_columns(P)
    for batch in (8, 8, 5, 8, 5):
        rows = [batch // P.size + (w < batch % P.size) for w in range(P.size)]
        expect_repartition(P, layer, rows, 4)


def check_dtype_may_change():
    P = distdl.world()
    layer = repartition_rows_to_columns(P)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.int32):
        expect_repartition(P, layer, [2] * P.size, 6, dtype)


def check_evaluate_then_train_then_evaluate():
    P = distdl.world()
    few, many = pair(P)
    layer = Broadcast(few, many)
    for train in (False, True, False, True, True):
        x = torch.ones(2, 3) if few.active else zero_volume_tensor()
        x.requires_grad_(train)
        with torch.set_grad_enabled(train):
            y = layer(x)
        assert y.requires_grad == train
        if train:
            y.sum().backward()
            assert not few.active or torch.equal(x.grad, torch.full((2, 3), float(many.workers.size)))
        else:
            y.requires_grad_()


def check_a_source_that_requires_grad_beside_zero_volume_inputs_that_do_not():
    P = distdl.world()
    few, many = pair(P)
    x = torch.ones(2, 3, requires_grad=True) if few.active else zero_volume_tensor()
    y = SumReduce(many, few)(Broadcast(few, many)(x))
    assert y.requires_grad or P.rank == 0
    if y.requires_grad:
        y.sum().backward()
    assert not few.active or torch.equal(x.grad, torch.full((2, 3), float(many.workers.size)))


def check_steady_state_is_one_agreement_and_the_payload():
    P = distdl.Partition(Counting(distdl.world().comm))
    layer = AllSumReduce(P.reshape(1, P.size), [1])
    x = torch.ones(2, 3, requires_grad=True)
    layer(x)
    P.comm.reset()
    for _ in range(3):
        layer(x).sum().backward()
    payload = [("all_sum", tuple(range(P.size)))] * 2 if P.size > 1 else []
    assert P.comm.log == [("all_max", tuple(range(P.size))), *payload] * 3
    P.comm.reset()
    with distdl.fixed_shapes(), distdl.fixed_shapes():
        layer(x).sum().backward()
    assert P.comm.log == payload
    layer(x)
    assert P.comm.log[len(payload)][0] == "all_max"


def check_fixed_shapes_may_decorate_a_function():
    P = distdl.Partition(Counting(distdl.world().comm))
    layer = AllSumReduce(P.reshape(1, P.size), [1])
    step = distdl.fixed_shapes()(layer)
    x = torch.ones(2, 3)
    layer(x)
    P.comm.reset()
    assert torch.equal(step(x), x * P.size)
    assert "all_max" not in [name for name, _ in P.comm.log]


def check_fixed_shapes_still_agrees_the_first_time():
    P = distdl.world()
    layer = repartition_rows_to_columns(P)
    with distdl.fixed_shapes():
        for _ in range(3):
            expect_repartition(P, layer, [2] * P.size, 6)
        with torch.no_grad():
            expect_repartition(P, layer, [3] * P.size, 6)
        expect_repartition(P, layer, [2] * P.size, 6)
        if P.size == 1:
            raises(RuntimeError, lambda: layer(torch.ones(3, 6)), "Repartition", "[2, 6]", "[3, 6]")


# -- errors that are the same on every member


def check_errors_of_forward_are_the_same_on_every_member():
    P = distdl.world()
    last = P.size - 1
    layer = repartition_rows_to_columns(P)
    expect_repartition(P, layer, [2] * P.size, 6)

    def with_last(x):
        return lambda: layer(x if P.rank == last else torch.ones(2, 6).double())

    texts = [
        raises(ValueError, with_last(torch.ones(2, 6, 1).double()), "2 dims", f"worker {last} has one with 3")
        if P.size > 1
        else raises(ValueError, lambda: layer(torch.ones(2, 6, 1)), "2 dims"),
        raises(ValueError, with_last([1.0]), "needs a tensor; got list"),
        raises(ValueError, with_last(torch.ones(2, 6).to_sparse()), "dense"),
        raises(ValueError, with_last(torch.ones(2, 6, device="meta")), "dense tensor that has data", "meta"),
        raises(ValueError, with_last(torch.nested.as_nested_tensor([torch.ones(2)], layout=torch.jagged)), "dense"),
    ]
    if P.size > 1:
        texts += [
            raises(ValueError, with_last(torch.ones(2, 5).double()), "form a grid", f"worker {last} has 5"),
            raises(ValueError, with_last(torch.ones(2, 6)), "one dtype", "float32"),
            raises(ValueError, lambda: layer(torch.ones(2, 1)), "global extent 1", "dim 1"),
            raises(ValueError, lambda: AllSumReduce(P.reshape(P.size), [0])(torch.ones(P.rank + 1)), "one shape"),
            raises(ValueError, lambda: SumReduce(P, P[:1])(torch.ones(P.rank + 1)), "one shape"),
        ]
    same_everywhere(P, texts)
    expect_repartition(P, layer, [2] * P.size, 6)


def check_mixed_grad_mode_is_an_agreed_error():
    P = distdl.world()
    if P.size == 1:
        return
    layer = AllSumReduce(P.reshape(P.size), [0])
    with torch.set_grad_enabled(P.rank != 1):
        text = raises(ValueError, lambda: layer(torch.ones(2)), "grad mode", "off on 1")
    same_everywhere(P, text)
    assert torch.equal(layer(torch.ones(2)), torch.full((2,), float(P.size)))


def check_crossed_calls_raise_on_every_member():
    if distdl.world().size == 1:
        return
    P = distdl.Partition(Counting(distdl.world().comm))  # its own count of calls, which this check disturbs
    one, other = AllSumReduce(P.reshape(P.size), [0]), Repartition(P, P)
    text = raises(
        CommunicationError, lambda: (other if P.rank == 1 else one)(torch.ones(2)), "AllSumReduce", "Repartition"
    )
    same_everywhere(P, text)
    P = distdl.Partition(Counting(distdl.world().comm))
    layer = AllSumReduce(P.reshape(P.size), [0])
    if P.rank == 0:
        P.comm.calls(tuple(range(P.size))).number += 1  # as after an exchange that the others did not make
    raises(CommunicationError, lambda: layer(torch.ones(2)), "exchange 1", "exchange 0")


# -- differentiation


def chain(P):
    """A chain of primitives in which, of four workers, one is idle in the middle."""
    few, many = pair(P)
    column = P.reshape(P.size, 1)
    return [Repartition(column, few), Broadcast(few, many), SumReduce(many, few), Repartition(few, column)]


def check_checkpointing_gives_the_same_gradients():
    P = distdl.world()
    layers = chain(P)

    def run(x):
        return functools.reduce(lambda y, layer: torch.tanh(layer(y)), layers, x)

    gradients = []
    for recompute in (False, True):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(P.rank)).double().requires_grad_()
        y = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
        (y * y).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0


def moves_of(P, differentiate):
    """The log of all calls when a chain of primitives is differentiated in some way."""
    team = distdl.Partition(Counting(P.comm))
    layers = chain(team)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(P.rank)).double()
    differentiate(lambda y: functools.reduce(lambda z, layer: torch.tanh(layer(z)), layers, y), x)
    return team.comm.log, dict(team.comm.sent), dict(team.comm.received)


def check_every_member_executes_the_same_moves():
    P = distdl.world()

    def backward(run, x):
        run(x.requires_grad_()).sum().backward()

    def gradient(run, x):
        torch.autograd.grad(run(x.requires_grad_()).sum(), x)

    def recompute(run, x):
        checkpoint(run, x.requires_grad_(), use_reentrant=False).sum().backward()

    def twice(run, x):
        (dx,) = torch.autograd.grad(run(x.requires_grad_()).sum(), x, create_graph=True)
        (dx * dx).sum().backward()

    def only_some(run, x):
        run(x.requires_grad_(P.rank == 0)).sum().backward()

    for differentiate in (backward, gradient, recompute, twice, only_some):
        everyone = P.allgather_data([(log, sent, received) for log, sent, received in [moves_of(P, differentiate)]])
        logs, sent, received = zip(*(one[0] for one in everyone), strict=True)
        for a in range(P.size):
            for b in range(P.size):
                assert sent[a].get(b, 0) == received[b].get(a, 0)
                shared = [
                    [call for call in log if call[0] != "exchange" and {a, b} <= set(call[1])]
                    for log in (logs[a], logs[b])
                ]
                assert shared[0] == shared[1], (differentiate.__name__, a, b)


def check_what_moves_together_is_differentiated_as_what_moves_alone():
    P = distdl.Partition(Counting(distdl.world().comm))
    line, members = P.reshape(P.size), tuple(range(P.size))
    widths = Layout.of(line, [runs([2 + worker for worker in range(P.size)])])
    gather = Route(copy_plan(widths, widths.gathered([0]), P.rank), P.comm, members, "gather")
    shapes = dict.fromkeys(members, (3,))
    spread = Route(broadcast_plan(line[:1], line, shapes, P.rank), P.comm, members, "spread")
    weights = torch.arange(1.0, 1 + widths.extents[0]).double() * (1 + P.rank)
    results = []
    for together in (True, False):
        for carried in [(True, True), (True, False), (False, True)]:
            x = torch.full((2 + P.rank,), 2.0 + P.rank).double()
            v = torch.full((3,), 5.0).double()
            wanted = [one.requires_grad_() for one, asked in zip((x, v), carried, strict=True) if asked]
            loads = tuple(Load(r, x.dtype, (0,), Carried(c)) for r, c in zip((gather, spread), carried, strict=True))
            if together:
                y, w = move_together(loads, (x, v))
            else:
                (y,), (w,) = move_together(loads[:1], (x,)), move_together(loads[1:], (v,))
            assert (y.requires_grad, w.requires_grad) == carried
            P.comm.reset()
            first = torch.autograd.grad((y**3 * weights).sum() * (w**2).sum(), wanted, create_graph=True)
            calls = {name for name, _ in P.comm.log}
            assert P.size == 1 or calls == {name for name, c in zip(("exchange", "sum"), carried, strict=True) if c}
            second = torch.autograd.grad(sum((one**2).sum() for one in first), wanted)
            results.append([y.detach(), w.detach(), *(one.detach() for one in first), *second])
    for one, other in zip(results[:3], results[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def check_gradient_penalty_through_a_network_with_idle_workers():
    P = distdl.world()
    layers = chain(P)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(P.rank)).double().requires_grad_()
    y = functools.reduce(lambda z, layer: torch.tanh(layer(z)), layers, x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (dx * dx).sum().backward()
    whole = torch.cat([torch.randn(2, 3, generator=torch.Generator().manual_seed(w)).double() for w in range(P.size)])
    whole.requires_grad_()
    copies = 2 if P.size > 1 else 1
    y = torch.tanh(torch.tanh(copies * torch.tanh(torch.tanh(whole))))
    (dx,) = torch.autograd.grad(y.sum(), whole, create_graph=True)
    (dx * dx).sum().backward()
    expected = whole.grad[2 * P.rank : 2 * P.rank + 2]
    assert torch.allclose(x.grad, expected, rtol=1e-12, atol=1e-14)


def check_a_tangent_on_one_worker_is_enough():
    P = distdl.world()
    few, many = pair(P)
    layer = Broadcast(few, many)
    with forward_mode(P):
        x = torch.ones(2, 3).double() if few.active else zero_volume_tensor()
        if few.active:
            x = forward_ad.make_dual(x, torch.full((2, 3), 5.0).double())
        tangent = forward_ad.unpack_dual(layer(x)).tangent
        if many.active:
            assert torch.equal(tangent, torch.full((2, 3), 5.0).double())
        z = SumReduce(many, few)(layer(x))
        if few.active:
            expected = torch.full((2, 3), 5.0 * many.workers.size).double()
            assert torch.equal(forward_ad.unpack_dual(z).tangent, expected)


def check_forward_over_reverse_and_reverse_over_forward():
    P = distdl.world()
    column = P.reshape(P.size, 1)
    layer = AllSumReduce(column, [0])
    x = torch.randn(2, generator=torch.Generator().manual_seed(P.rank)).double()
    v = torch.randn(2, generator=torch.Generator().manual_seed(10 + P.rank)).double()
    xs, vs = (torch.stack(P.allgather_data(one)).sum(0) for one in (x, v))
    with forward_mode(P):
        dual = forward_ad.make_dual(x.clone().requires_grad_(), v)
        (dx,) = torch.autograd.grad((layer(dual) ** 3).sum(), dual)
        second = forward_ad.unpack_dual(dx).tangent
    assert torch.allclose(second, P.size * 6 * xs * vs, rtol=1e-12)
    with forward_mode(P):
        w = v.clone().requires_grad_()
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, w)) ** 2).tangent
        (dw,) = torch.autograd.grad(tangent.sum(), w)
    assert torch.allclose(dw, P.size * 2 * xs, rtol=1e-12)


def check_layers_survive_copying_and_module_methods():
    P = distdl.world()
    layer = torch.nn.Sequential(AllSumReduce(P.reshape(P.size), [0]), torch.nn.Tanh()).double().train().eval()
    twin = copy.deepcopy(layer)
    x = torch.ones(2).double()
    assert torch.equal(twin(x), layer(x)) and twin[0].P_x == layer[0].P_x
    assert torch.equal(twin.to("cpu")(x), layer(x))


def check_headers_come_together_along_axes():
    P = distdl.world()
    side = 2 if P.size == 4 else 1
    grid, members = P.reshape(side, side), tuple(range(P.size))
    i, j = grid.index_of(P.rank)
    found = along_axes(P.comm, members, np.array([i, 7, -j]), grid)
    workers = np.arange(P.size)
    assert (found.of(workers) == np.stack([workers // side, 7 + 0 * workers, -(workers % side)], axis=1)).all()
    assert along_axes(P.comm, members, np.array([i + 2 * j]), grid) is None or P.size == 1


# -- layers


def check_layers_match_the_sequential_ones():
    P = distdl.world()
    seed = torch.Generator().manual_seed(3)

    def network(layer):
        layer = layer.double()
        for number, parameter in enumerate(layer.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).double()
        return layer

    side = 2 if P.size == 4 else 1
    square = P.reshape(1, 1, side, side)
    x = torch.randn(2, 2, 9, 7, generator=seed).double()
    uneven = [runs([2]), runs([2]), runs([1, 8] if side == 2 else [9]), runs([7, 0] if side == 2 else [7])]
    for blocks in (None, uneven):
        conv = DistributedConv2d(square, in_channels=2, out_channels=3, kernel_size=3, stride=2, padding=1).double()
        assert_matches_sequential(conv, network(torch.nn.Conv2d(2, 3, 3, 2, 1)), x, blocks)
        pool = DistributedMaxPool2d(square, 3, stride=2, padding=1)
        assert_matches_sequential(pool, torch.nn.MaxPool2d(3, 2, 1), x, blocks)
    P_w = P.reshape(side, side)
    rows, columns = P_w[:1], P_w[:, -1:].reshape(1, side)
    linear = DistributedLinear(rows, columns, P_w, 7, 5).double()
    assert_matches_sequential(linear, network(torch.nn.Linear(7, 5)), torch.randn(3, 7, generator=seed).double())


def check_cross_entropy_matches_the_sequential_one():
    P = distdl.world()
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(4)).double().requires_grad_()
    target = torch.tensor([0, 4, 2, 2, 1, 3])
    torch.nn.functional.cross_entropy(x, target).backward()
    grid = P.reshape(2, 2) if P.size == 4 else P.reshape(1, 1)
    rows = runs([4, 2]) if P.size == 4 else runs([6])
    columns = runs([3, 2]) if P.size == 4 else runs([5])
    row, column = (slice(*rows[grid.index[0]]), slice(*columns[grid.index[1]]))
    local = x.detach()[row, column].clone().requires_grad_()
    loss = DistributedCrossEntropyLoss(grid)(local, target[row] if grid.index[1] == 0 else None)
    expected = torch.nn.functional.cross_entropy(x, target).item() if P.rank == 0 else 0.0
    assert loss.dim() == 0 and abs(loss.item() - expected) < 1e-12
    loss.backward()
    assert torch.allclose(local.grad, x.grad[row, column], rtol=1e-12, atol=1e-14)


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}
