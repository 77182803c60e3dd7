"""What may change between two calls of the same primitive, and what a call costs."""

from __future__ import annotations

import torch

import distdl
from contract.common import expect_repartition, pair, raises, repartition_rows_to_columns
from distdl.nn import AllSumReduce, Broadcast, SumReduce
from distdl.testing import Counting
from distdl.utilities.torch import zero_volume_tensor


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
