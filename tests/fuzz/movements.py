"""Random sequences of primitives, each called several times, against the matrices of their plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cases import MAKERS, Case
from faults import Fault, damaged
from hypothesis import strategies as st
from partitions import WORKERS
from programs import assert_close
from team import Failed

from distdl.partition import Partition
from distdl.testing import Silent

_FAULTS = ("grad mode", "no tensor", "without data")  # the others are allowed for some primitives


@dataclass(frozen=True)
class Movements:
    """Primitives, by the names and seeds of their makers, and the order in which they are called.

    Attributes:
        calls: which primitive, and what one worker does otherwise.
    """

    primitives: tuple[tuple[str, int], ...]
    calls: tuple[tuple[int, Fault | None], ...]

    def cases(self, world: Partition) -> list[Case]:
        return [MAKERS[name](world, np.random.default_rng(seed)) for name, seed in self.primitives]

    def distributed(self, world: Partition) -> Any:
        """For each call y and the gradient of x on this worker; or the failure."""
        cases = self.cases(world)
        return [_called(cases[number], fault, world) for number, fault in self.calls]


def _called(case: Case, fault: Fault | None, world: Partition) -> Any:
    x = case.xs[world.rank].clone().requires_grad_()
    faulty = fault is not None and fault.worker == world.rank
    try:
        with torch.set_grad_enabled(not (faulty and fault is not None and fault.kind == "grad mode")):
            y = case.layer(damaged(x, fault) if faulty and fault is not None else x)
        (y / 64).sin().sum().backward()
    except Exception as error:
        return Failed(type(error).__name__, str(error))
    return y.detach(), x.grad


def assert_moved(case: Case, found: Sequence[Any]) -> None:
    """Compare y with what was computed another way, and the gradient of x with that of the transposed matrix."""
    expected = case.expected(case.xs)
    for worker, (y, _) in enumerate(found):
        if worker in expected:
            assert_close(y, expected[worker], f"y of {case.name} on worker {worker}", 1e-12)
        else:
            assert not y.numel(), f"y of {case.name} on worker {worker}, outside, is {y}"
    dy = _joined({worker: (expected[worker] / 64).cos() / 64 for worker in case.plan.outputs})
    dx = torch.from_numpy(case.plan.matrix().T @ dy)
    place = 0
    for worker in sorted(case.plan.inputs):
        x = case.xs[worker]
        theirs = dx[place : place + x.numel()].reshape(x.shape)
        place += x.numel()
        assert_close(found[worker][1], theirs, f"the gradient of {case.name} on worker {worker}", 1e-12)


def _joined(tensors: dict[int, torch.Tensor]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(tensors[worker].numpy().ravel() for worker in sorted(tensors))])


def imagined() -> Partition:
    """A world of the same size, in which nothing can be sent."""
    return Partition(Silent(0, WORKERS))


@st.composite
def movements(draw: st.DrawFn) -> Movements:
    names = sorted(MAKERS)
    made = draw(st.lists(st.tuples(st.sampled_from(names), st.integers(0, 2**16)), min_size=1, max_size=3))
    calls = []
    for number in draw(st.lists(st.integers(0, len(made) - 1), min_size=1, max_size=4)):
        fault = None
        members = members_of(Movements((made[number],), ()).cases(imagined())[0])
        if draw(st.integers(0, 2)) == 2:
            fault = Fault(draw(st.sampled_from(members)), draw(st.sampled_from(_FAULTS)), draw(st.integers(0, 9)))
        calls.append((number, fault))
    return Movements(tuple(made), tuple(calls))


def members_of(case: Case) -> list[int]:
    """The workers that take part in a primitive."""
    layer = case.layer
    return sorted({int(w) for P in (layer.P_x, getattr(layer, "P_y", layer.P_x)) for w in P.workers.ravel()})
