"""Errors that are the same on every member."""

from __future__ import annotations

import time

import torch

import distdl
from contract.common import expect_repartition, raises, repartition_rows_to_columns, same_everywhere
from distdl.nn import AllSumReduce, DistributedBatchNorm, DistributedLinear, Repartition, SumReduce
from distdl.nn.layer import Layer
from distdl.nn.primitive import Movement
from distdl.plan import Plan
from distdl.testing import Counting
from distdl.transport.communicator import CommunicationError

# (torch imports modules for the first one, which two threads must not do at the same time)
RAGGED = torch.nested.as_nested_tensor([torch.ones(2)], layout=torch.jagged)


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
        raises(ValueError, with_last(RAGGED), "dense"),
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


def check_one_worker_in_inference_mode_gets_data_like_the_others():
    P = distdl.world()
    for late in range(P.size):
        time.sleep(0.02 * (P.rank == late))
        with torch.inference_mode() if P.rank == 0 else torch.no_grad():
            assert [one.item() for one in P.allgather_data(torch.tensor(P.rank))] == list(range(P.size))
            assert P.allreduce_data(torch.ones(2)).tolist() == [P.size] * 2


def check_mixed_grad_mode_is_an_agreed_error():
    P = distdl.world()
    if P.size == 1:
        return
    layer = AllSumReduce(P.reshape(P.size), [0])
    with torch.set_grad_enabled(P.rank != 1):
        text = raises(ValueError, lambda: layer(torch.ones(2)), "grad mode", "off on 1")
    same_everywhere(P, text)
    assert torch.equal(layer(torch.ones(2)), torch.full((2,), float(P.size)))


class _Masked(Layer):
    """A layer that may get a second tensor."""

    def __init__(self, P):
        super().__init__("Masked", P, Movement(P, P, lambda headers, me: Plan({me: (2,)}, {me: (2,)})))
        self.P_x = P

    def forward(self, *tensors):
        return self.agree(*tensors)(*tensors)


def check_a_tensor_that_some_workers_leave_out_is_an_agreed_error():
    P = distdl.world()
    if P.size == 1:
        return
    layer, x = _Masked(P), torch.ones(2)
    text = raises(ValueError, lambda: layer(x, x) if P.rank == 1 else layer(x), "as many tensors", "2 tensors on 1")
    same_everywhere(P, text)
    assert layer(x).tolist() == [0, 0]


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
        calls = P.comm.calls(tuple(range(P.size)))
        calls.number, calls.history = calls.number + 1, calls.history + 1  # as after one that the others did not make
    raises(CommunicationError, lambda: layer(torch.ones(2)), "exchange 1", "exchange 0")
    raises(CommunicationError, lambda: P.allgather_data(0), "out of step since an earlier error", "different calls")


def check_layers_of_one_kind_in_another_order_raise_on_every_member():
    P = distdl.Partition(Counting(distdl.world().comm))
    if P.size == 1:
        return
    row, column, one = P.reshape(1, P.size), P.reshape(P.size, 1), P[:1].reshape(1, 1)
    kinds = {
        "AllSumReduce": (lambda: AllSumReduce(P.reshape(P.size), [0]), torch.ones(2)),
        "DistributedLinear": (lambda: DistributedLinear(one, row, column, 4, 6), torch.ones(2, 4 * (P.rank == 0))),
        "DistributedBatchNorm": (lambda: DistributedBatchNorm(column, 2), torch.ones(2, 2)),
    }
    texts = []
    for name, (make, x) in kinds.items():
        first, second = make(), make()
        texts.append(raises(CommunicationError, lambda: (second if P.rank == 1 else first)(x), name))  # noqa: B023  # (called at once)
        assert texts[-1].count("[layer ") == 2, texts[-1]
    layer = AllSumReduce(P.reshape(P.size), [0])
    texts.append(raises(CommunicationError, lambda: P.allgather_data(0) if P.rank == 1 else layer(x), "allgather_data"))
    if P.rank == 1:
        AllSumReduce(P.reshape(P.size), [0])  # so this worker's model has a layer more than the others'
    layer = AllSumReduce(P.reshape(P.size), [0])
    texts.append(raises(CommunicationError, lambda: layer(torch.ones(2)), "[layer "))
    same_everywhere(P, texts)  # and the world is usable


def check_data_calls_that_differ_raise_on_every_member():
    P = distdl.Partition(Counting(distdl.world().comm))
    if P.size == 1:
        return
    different = {
        ("op='max'", "op='sum'"): lambda: P.allreduce_data(P.rank, "max" if P.rank == 1 else "sum"),
        ("allgather_data", "allreduce_data"): lambda: P.allgather_data(1) if P.rank == 1 else P.allreduce_data(1),
        ("from worker 0", "from worker 1"): lambda: P.broadcast_data(1, int(P.rank == 1)),
    }
    same_everywhere(P, [raises(CommunicationError, call, *words) for words, call in different.items()])
    assert P.allgather_data(P.rank) == list(range(P.size))
