"""Primitives: values, adjoints, dtypes, and what each kind of worker gets."""

from __future__ import annotations

import numpy as np
import torch
from cases import MAKERS
from checks import assert_derivatives, assert_value, my_input

import distdl
from contract.common import pair, raises, same_everywhere
from distdl.nn import AllGather, AllSumReduce, Broadcast, Repartition, SumReduce
from distdl.testing import assert_adjoint
from distdl.utilities.torch import zero_volume_tensor


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
