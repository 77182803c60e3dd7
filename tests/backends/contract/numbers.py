"""Numbers: what is promised of the bits of results, and of overflows."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import distdl
from contract.bits import SUMS, bits, late
from contract.common import on_threads, same_everywhere


def check_sums_in_the_order_of_workers_have_the_same_bits_as_on_threads():
    """Of a training by 2, 3 and 4 workers, whoever comes late; and of sums as they have always been."""
    P = distdl.world()
    for workers in (2, 3, 4) if P.size == 4 else (1,):
        expected = on_threads(partial(bits, workers), P.size)[P.rank]
        with late(seed=workers):
            found = bits(workers)
        assert found == expected, f"{workers} workers: {found} here, {expected} on threads"
        assert P.size == 1 or P.rank or found[0] == SUMS[workers]
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
