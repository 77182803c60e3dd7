"""What every primitive has to satisfy, checked against the matrix of its plan. Every worker calls these together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from cases import Case
from torch.autograd import forward_ad

from distdl.backends.threaded import ThreadCommunicator
from distdl.partition import Partition


def world_of(case: Case) -> Partition:
    return Partition(case.layer.P_x.comm)


def my_input(case: Case) -> torch.Tensor:
    return case.xs[case.layer.P_x.comm.rank].clone()


def join(shapes: dict[int, tuple[int, ...]], pieces: list[torch.Tensor]) -> np.ndarray:
    """The vector on which a plan's matrix acts: the tensors of all workers that have one, end to end."""
    return np.concatenate([np.zeros(0), *(pieces[worker].detach().numpy().ravel() for worker in sorted(shapes))])


@contextmanager
def forward_mode(P: Partition) -> Iterator[None]:
    """A level of forward-mode differentiation. It belongs to the process, so of threads one opens it for all."""
    P.allgather_data("finished with all that came before")
    opens = not isinstance(P.comm, ThreadCommunicator) or P.rank == 0
    if opens:
        level = forward_ad.dual_level()
        level.__enter__()
    P.allgather_data("open")
    try:
        yield
    finally:
        P.allgather_data("done")
        if opens:
            level.__exit__(None, None, None)
        P.allgather_data("closed")


def assert_value(case: Case) -> None:
    """The output is what was computed another way, on every worker; the input is neither written nor returned."""
    me = case.layer.P_x.comm.rank
    x = my_input(case)
    before = x.clone()
    y = case.layer(x)
    expected = case.expected(case.xs)
    if me in expected:
        assert torch.equal(y, expected[me]), f"{case.name}: worker {me} got {y}, not {expected[me]}"
        assert y.dtype == torch.float64
    else:
        assert y.shape == (x.shape[0], 0), f"{case.name}: worker {me} got a tensor of shape {y.shape}"
    assert torch.equal(x, before)
    y.add_(1)
    assert torch.equal(x, before), f"{case.name}: the output shares memory with the input"


def assert_derivatives(case: Case, tolerance: float = 1e-12) -> None:
    """y, dx, the gradient of <dx, v> with respect to dy, and the tangent are the products with the plan's matrix."""
    P, me = world_of(case), case.layer.P_x.comm.rank
    matrix = case.plan.matrix()
    generator = torch.Generator().manual_seed(me)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, dtype=torch.float64, generator=generator)

    def near(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        scale = max(np.abs(theirs).max(initial=0), 1)
        assert ours.shape == theirs.shape and np.abs(ours - theirs).max(initial=0) <= tolerance * scale, (
            f"{case.name}: {name}"
        )

    x = noise(my_input(case)).requires_grad_()
    y = case.layer(x)
    dy = noise(y).requires_grad_()
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    v = noise(x)
    (ddy,) = torch.autograd.grad((dx * v).sum(), dy)
    with forward_mode(P):
        dual = case.layer(forward_ad.make_dual(x.detach(), v))
        tangent = forward_ad.unpack_dual(dual).tangent
    assert dx.shape == x.shape and dx.dtype == x.dtype
    xs, ys, dxs, dys, vs, ddys, tangents = zip(*P.allgather_data((x, y, dx, dy, v, ddy, tangent)), strict=True)
    inputs, outputs = case.plan.inputs, case.plan.outputs
    near("y", join(outputs, ys), matrix @ join(inputs, xs))
    near("dx", join(inputs, dxs), matrix.T @ join(outputs, dys))
    near("the second derivative", join(outputs, ddys), matrix @ join(inputs, vs))
    near("the tangent", join(outputs, tangents), matrix @ join(inputs, vs))
