"""The difference between the clocks of workers, measured by messages."""

from __future__ import annotations

import time

import torch

from distdl.transport.communicator import Communicator

_ROUNDS = 16


def align(comm: Communicator) -> tuple[float, float]:
    """Seconds to add to this worker's ``time.perf_counter`` so that it shows worker 0's; and how far off that may be.

    Each worker asks worker 0 for its time some times, one worker after another. The answer was given between the
    question and its arrival, so half of the shortest round trip is the largest error. Workers that are threads have one
    clock. Every worker of the world calls it.
    """
    if comm.threads or comm.size == 1:
        return 0.0, 0.0
    best = 0.0, float("inf")
    for other in range(1, comm.size):
        for _ in range(_ROUNDS):
            if comm.rank == 0:
                _receive(comm, other)
                _send(comm, other, time.perf_counter())
            elif comm.rank == other:
                asked = time.perf_counter()
                _send(comm, 0, asked)
                answer = _receive(comm, 0)
                arrived = time.perf_counter()
                best = min(best, (answer - (asked + arrived) / 2, (arrived - asked) / 2), key=lambda one: one[1])
    return (0.0, 0.0) if comm.rank == 0 else best


def _send(comm: Communicator, to: int, value: float) -> None:
    comm.exchange([(to, torch.tensor([value], dtype=torch.float64))], []).wait()


def _receive(comm: Communicator, source: int) -> float:
    buffer = torch.empty(1, dtype=torch.float64)
    comm.exchange([], [(source, buffer)]).wait()
    return float(buffer)
