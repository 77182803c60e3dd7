"""Checkpoints, double backward, forward mode, and copies of what is differentiated."""

from __future__ import annotations

import copy
import functools

import numpy as np
import torch
from checks import forward_mode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import distdl
from contract.common import pair
from distdl.agreement.rows import along_axes
from distdl.exchange import Operator, Together
from distdl.geometry.boxes import runs
from distdl.nn import AllSumReduce, Broadcast, Repartition, SumReduce
from distdl.partition.layout import Layout
from distdl.plan.planners import broadcast as broadcast_plan
from distdl.plan.planners import copy as copy_plan
from distdl.tensors.derivatives import Derivatives
from distdl.testing import Counting
from distdl.transport.label import Label
from distdl.utilities.torch import zero_volume_tensor


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
    gather = copy_plan(widths, widths.gathered([0]), P.rank)
    spread = broadcast_plan(line[:1], line, dict.fromkeys(members, (3,)), P.rank)
    weights = torch.arange(1.0, 1 + widths.extents[0]).double() * (1 + P.rank)
    results = []
    for together in (True, False):
        for carried in [(True, True), (True, False), (False, True)]:
            x = torch.full((2 + P.rank,), 2.0 + P.rank).double()
            v = torch.full((3,), 5.0).double()
            wanted = [one.requires_grad_() for one, asked in zip((x, v), carried, strict=True) if asked]
            bring, copy_over = (
                Operator(
                    plan, P.comm, members, Label(name), x.dtype, Derivatives(c), [one.shape], [plan.outputs[P.rank]]
                )
                for name, plan, one, c in zip(("gather", "spread"), (gather, spread), (x, v), carried, strict=True)
            )
            if together:
                y, w = Together(bring, copy_over)(x, v)
            else:
                y, w = bring(x), copy_over(v)
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
