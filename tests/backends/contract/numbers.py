"""Numbers: what is promised of the bits of results, and of overflows."""

from __future__ import annotations

import zlib

import torch
from torch import nn

import distdl
from contract.common import same_everywhere


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_noise(module):
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = noise(*parameter.shape, seed=seed)
    return module


def train():
    """The bits that three steps leave on this worker, in float32: sums over all workers, over two, short and long."""
    P = distdl.world()
    side = 2 if P.size == 4 else 1
    found = []
    with distdl.reproducible():
        model = with_noise(
            nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3))
        )
        model = distdl.distribute(model, P.reshape(1, 1, P.size, 1))
        P_w = P.reshape(side, side)
        linear = with_noise(distdl.nn.DistributedLinear(P_w[:1], P_w[:, -1:].reshape(1, side), P_w, 14, 10))
        optimiser = torch.optim.SGD([*model.parameters(), *linear.parameters()], lr=0.1)
        x = noise(3, 2, 9, 7, seed=1)
        block = noise(6, 7, seed=2)[:, : 14 // side] if P.rank in P_w[:1] else torch.zeros(6, 0)
        for _ in range(3):
            optimiser.zero_grad()
            model(x).square().mean().backward()
            linear(noise(6, 14 // side, seed=P.rank) if block.numel() else block).square().sum().backward()
            optimiser.step()
        three = P[-3:]
        for count in (100, 30_000):
            parts = noise(count, seed=P.rank) if P.rank in three else torch.zeros(0)
            found += [distdl.nn.AllSumReduce(three, (0,))(parts), distdl.nn.SumReduce(three, three[:1])(parts)]
    found += [*model.state_dict().values(), *linear.parameters()]
    return zlib.crc32(b"".join(one.detach().numpy().tobytes() for one in found))


def check_reproducible_sums_have_the_same_bits_as_on_threads():
    P = distdl.world()
    assert P.allgather_data(train()) == distdl.run_workers(train, P.size)
    assert not P.comm.ordered


def check_an_overflow_on_one_worker_skips_the_step_of_all():
    """Also where a worker has no gradient; and scales stay the same on all."""
    P = distdl.world()
    last, stores = P.rank == P.size - 1, P.rank > 0 or P.size == 1
    weight = nn.Parameter(torch.ones(2 if stores else 0))
    optimiser = torch.optim.SGD([weight], lr=1.0)
    scaler = distdl.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for overflows, scale in ((True, 4.0), (False, 8.0)):
        optimiser.zero_grad()
        before = weight.detach().clone()
        loss = scaler.scale((weight * (float("inf") if last and overflows else 1.0)).sum())
        if stores:
            loss.backward()
        scaler.step(optimiser)
        scaler.update()
        assert torch.equal(weight, before if overflows else before - 1)
        assert scaler.get_scale() == scale
    same_everywhere(P, scaler.state_dict())
