"""The one executor of plans, and the one autograd Function that moves data.

Every member of a movement records the same node, so that each also takes part in its backward: a worker whose own
tensor needs no gradient is tied in through an *anchor*, a tensor of zero volume that does.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.profiler import record_function

from distdl.boxes import Shape
from distdl.comm import Calls, Communicator, Group, Pending, contiguous, fold, fold_into, wait_all
from distdl.encoding import carries_gradients
from distdl.header import Carried
from distdl.memory import empty
from distdl.plan import Pattern, Plan, Role, Schedule

_TAGS = 32768


@dataclass(frozen=True, eq=False)
class Route:
    """A plan together with those who execute it.

    Attributes:
        comm, members: who takes part; every one of them executes the plan.
        where: the layer and its partitions, for messages to people, and to tell its messages from another layer's.
        T: the adjoint.
        schedule: what this worker does.
        extents: shape of this worker's part of y; None where it has none.
        calls: how many exchanges the members have begun.
    """

    plan: Plan
    comm: Communicator
    members: Group
    where: str

    @cached_property
    def T(self) -> Route:
        transposed = Route(self.plan.T, self.comm, self.members, self.where)
        transposed.__dict__["T"] = self
        return transposed

    @cached_property
    def schedule(self) -> Schedule:
        return self.plan.schedule(self.comm.rank)

    @cached_property
    def extents(self) -> Shape | None:
        return self.plan.outputs.get(self.comm.rank)

    @cached_property
    def calls(self) -> Calls:
        return self.comm.calls(self.members)

    @cached_property
    def _mark(self) -> int:
        return zlib.crc32(self.where.encode())

    def next_tag(self) -> int:
        """Count one more exchange of the members; the tag of its messages, which follows from number and layer."""
        number = self.calls.number
        self.calls.number = number + 1
        return (number + self._mark) % _TAGS


def move(route: Route, x: torch.Tensor, dtype: torch.dtype, blank: tuple[int, ...], carried: Carried) -> torch.Tensor:
    """Execute a plan on this worker's tensor, and record it for differentiation if the members agreed to.

    Args:
        x: the local tensor; where the plan has no input for this worker, any tensor of zero volume.
        dtype: the dtype that moves, as agreed.
        blank: shape of the result where the plan has no output for this worker.
        carried: what x carries on any member.
    Returns: a new tensor, in the shape of ``plan.outputs``; connected to x wherever a gradient is recorded.
    """
    if not ((carried.gradient or carried.tangent) and carries_gradients(dtype)):
        return execute(route, x.detach(), dtype, blank)
    anchor = None
    if (carried.gradient and not x.requires_grad) or (carried.tangent and not Carried.by(x, False).tangent):
        anchor = torch.empty(0, device=x.device, requires_grad=carried.gradient)
        if carried.tangent:
            anchor = forward_ad.make_dual(anchor, torch.empty(0, device=x.device))
    y: torch.Tensor = Apply.apply((route, dtype, blank, carried), x, anchor)  # type: ignore[no-untyped-call]
    return y


class Apply(torch.autograd.Function):
    """``y = plan x``. Its backward is ``plan.T``, its tangent map the plan itself."""

    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[Route, torch.dtype, tuple[int, ...], Carried],
        x: torch.Tensor,
        anchor: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.how = how
        ctx.source = (x.shape, x.dtype, x.device)
        ctx.save_for_backward(_NOTHING)  # so that checkpointing recomputes this node, on every member alike
        return execute(how[0], x, how[1], how[2])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # before any message: this is where a checkpoint computes its forward again
        (shape, own, device), (route, dtype, _, _) = ctx.source, ctx.how
        mode, forward_mode = torch.is_grad_enabled(), _differentiates_forward()
        if mode or forward_mode:
            dx = move(route.T, dy, dtype, shape, Carried(mode, forward_mode, mode and forward_mode))
        else:
            dx = execute(route.T, dy, dtype, shape)
        anchored = torch.zeros(0, device=device) if ctx.needs_input_grad[2] else None
        return None, dx if own is dtype else dx.to(own), anchored

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        (shape, own, device), (route, dtype, blank, carried) = ctx.source, ctx.how
        tangent = tangents[1]
        if tangent is None:
            tangent = torch.zeros(shape, dtype=own, device=device)
        return move(route, tangent, dtype, blank, Carried(carried.tangent_gradient))


_NOTHING = torch.empty(0)


def _differentiates_forward() -> bool:
    # whether a level of forward-mode differentiation is open: unlike a tangent, that is the same on every worker
    return forward_ad._current_level >= 0


def execute(route: Route, x: torch.Tensor, dtype: torch.dtype, blank: tuple[int, ...]) -> torch.Tensor:
    """Do this worker's part of a plan. Neither x nor anything that shares its memory is written or returned."""
    if torch._C._autograd._profiler_enabled():
        with record_function(route.where):
            return _execute(route, x, dtype, blank)
    return _execute(route, x, dtype, blank)


def _execute(route: Route, x: torch.Tensor, dtype: torch.dtype, blank: tuple[int, ...]) -> torch.Tensor:
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()  # transports read memory, and these views are conjugated when they are read
    comm, schedule, pattern, extents = route.comm, route.schedule, route.plan.pattern, route.extents
    comm.where = route.where
    tag = route.next_tag()
    y = torch.zeros(blank, dtype=dtype, device=x.device) if extents is None else empty(extents, dtype, x)
    if pattern is Pattern.MOVES:
        _run_moves(comm, schedule, x, y, tag)
    else:
        wait_all([_play(comm, pattern, role, x, y) for role in schedule.roles])
    return y


def _run_moves(comm: Communicator, schedule: Schedule, x: torch.Tensor, y: torch.Tensor, tag: int) -> None:
    # (an empty index stands for all of a tensor; taking it would still make a view)
    for index in schedule.blank:
        y[index].zero_()
    arrivals = [
        (source, empty(shape, y.dtype, y) if index is None else y[index] if index else y)
        for source, index, shape in schedule.receives
    ]
    sends = [(target, x[index] if index else x) for target, index in schedule.sends]
    pending = comm.exchange(sends, arrivals, tag) if sends or arrivals else None
    for to, own in schedule.kept:
        (y[to] if to else y).copy_(x[own] if own else x)
    if pending is not None:
        pending.wait()
    for to, terms in schedule.sums:
        total = y[to] if to else y
        tensors = [arrivals[term][1] if isinstance(term, int) else x[term] if term else x for term in terms]
        if schedule.adds:
            total.add_(fold(tensors, torch.add))
        else:
            fold_into(total, tensors)


def _play(comm: Communicator, pattern: Pattern, role: Role, x: torch.Tensor, y: torch.Tensor) -> Pending:
    group = role.group
    if pattern is Pattern.BROADCAST:
        pending = Pending() if len(group) == 1 else comm.broadcast(group, contiguous(x) if role.root else y)
        if role.root and role.member:
            y.copy_(x)
        return pending
    if len(group) == 1:
        y.copy_(x)
        return Pending()
    if pattern is Pattern.ALL_SUM:
        return comm.all_sum(group, contiguous(x), y)
    return comm.sum(group, contiguous(x) if role.member else None, y if role.root else None)
