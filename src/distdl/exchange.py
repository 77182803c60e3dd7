"""The one executor of plans, and the one autograd Function that moves data.

Every member of a movement records the same node, so that each also takes part in its backward: a worker whose own
tensor needs no gradient is tied in through an *anchor*, a tensor of zero volume that does.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from distdl.comm import Communicator, Group, Pending, contiguous, fold, wait_all
from distdl.encoding import carries_gradients
from distdl.header import Carried
from distdl.memory import empty
from distdl.plan import Pattern, Plan, Role, Schedule

_TAGS = 32768


@dataclass(frozen=True)
class Route:
    """A plan together with those who execute it.

    Attributes:
        comm, members: who takes part; every one of them executes the plan.
        where: the layer and its partitions, for messages to people, and to tell its messages from another layer's.
    """

    plan: Plan
    comm: Communicator
    members: Group
    where: str

    @property
    def T(self) -> Route:
        return Route(self.plan.T, self.comm, self.members, self.where)

    def tag(self, number: int) -> int:
        """The tag of the messages of this layer's exchange number so-and-so."""
        return (number + zlib.crc32(self.where.encode())) % _TAGS


def move(route: Route, x: torch.Tensor, dtype: torch.dtype, blank: tuple[int, ...], carried: Carried) -> torch.Tensor:
    """Execute a plan on this worker's tensor, and record it for differentiation if the members agreed to.

    Args:
        x: the local tensor; where the plan has no input for this worker, any tensor of zero volume.
        dtype: the dtype that moves, as agreed.
        blank: shape of the result where the plan has no output for this worker.
        carried: what x carries on any member.
    Returns: a new tensor, in the shape of ``plan.outputs``; connected to x wherever a gradient is recorded.
    """
    if not (carries_gradients(dtype) and (carried.gradient or carried.tangent)):
        return execute(route, x.detach(), dtype, blank)
    own = Carried.by(x, carried.gradient)
    anchor = None
    if own.gradient < carried.gradient or own.tangent < carried.tangent:
        anchor = torch.empty(0, device=x.device, requires_grad=carried.gradient)
        if carried.tangent:
            anchor = forward_ad.make_dual(anchor, torch.empty(0, device=x.device))
    y: torch.Tensor = Apply.apply(route, dtype, blank, carried, x, anchor)  # type: ignore[no-untyped-call]
    return y


class Apply(torch.autograd.Function):
    """``y = plan x``. Its backward is ``plan.T``, its tangent map the plan itself."""

    @staticmethod
    def forward(
        ctx: Any,
        route: Route,
        dtype: torch.dtype,
        blank: tuple[int, ...],
        carried: Carried,
        x: torch.Tensor,
        anchor: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.route, ctx.dtype, ctx.blank, ctx.carried = route, dtype, blank, carried
        ctx.source = (x.shape, x.dtype, x.device)
        ctx.save_for_backward(x.new_empty(0))  # so that checkpointing recomputes this node, on every member alike
        return execute(route, x, dtype, blank)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # before any message: this is where a checkpoint computes its forward again
        shape, dtype, device = ctx.source
        mode, forward_mode = torch.is_grad_enabled(), _differentiates_forward()
        dx = move(ctx.route.T, dy, ctx.dtype, shape, Carried(mode, forward_mode, mode and forward_mode))
        anchored = torch.zeros(0, device=device) if ctx.needs_input_grad[5] else None
        return None, None, None, None, dx.to(dtype), anchored

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        shape, dtype, device = ctx.source
        tangent = tangents[4]
        if tangent is None:
            tangent = torch.zeros(shape, dtype=dtype, device=device)
        return move(ctx.route, tangent, ctx.dtype, ctx.blank, Carried(ctx.carried.tangent_gradient))


def _differentiates_forward() -> bool:
    # whether a level of forward-mode differentiation is open: unlike a tangent, that is the same on every worker
    return forward_ad._current_level >= 0


def execute(route: Route, x: torch.Tensor, dtype: torch.dtype, blank: tuple[int, ...]) -> torch.Tensor:
    """Do this worker's part of a plan. Neither x nor anything that shares its memory is written or returned."""
    comm, plan = route.comm, route.plan
    x = x.resolve_conj().resolve_neg()  # transports read memory, and these views are conjugated when they are read
    comm.where = route.where
    number = comm.calls[route.members]
    comm.calls[route.members] += 1
    schedule = plan.schedule(comm.rank)
    if comm.rank in plan.outputs:
        y = empty(plan.outputs[comm.rank], dtype, x.device)
    else:
        y = torch.zeros(blank, dtype=dtype, device=x.device)
    if plan.pattern is Pattern.MOVES:
        _run_moves(comm, schedule, x, y, route.tag(number))
    else:
        wait_all([_play(comm, plan.pattern, role, x, y) for role in schedule.roles if 0 not in role.team.shape])
    return y


def _run_moves(comm: Communicator, schedule: Schedule, x: torch.Tensor, y: torch.Tensor, tag: int) -> None:
    for index in schedule.blank:
        y[index].zero_()
    rooms = [empty(shape, y.dtype, y.device) if index is None else y[index] for _, index, shape in schedule.receives]
    arrivals = [(source, room) for (source, _, _), room in zip(schedule.receives, rooms, strict=True)]
    sends = [(target, x[index]) for target, index in schedule.sends]
    pending = comm.exchange(sends, arrivals, tag) if sends or arrivals else Pending()
    for to, own in schedule.kept:
        y[to].copy_(x[own])
    pending.wait()
    for to, terms in schedule.sums:
        total = fold([rooms[term] if isinstance(term, int) else x[term] for term in terms], torch.add)
        if schedule.adds:
            y[to].add_(total)
        else:
            y[to].copy_(total)


def _play(comm: Communicator, pattern: Pattern, role: Role, x: torch.Tensor, y: torch.Tensor) -> Pending:
    group = role.team.group
    if pattern is Pattern.BROADCAST:
        pending = Pending() if len(group) == 1 else comm.broadcast(group, contiguous(x) if role.root else y)
        if role.root and role.member:
            y.copy_(x)
        return pending
    if len(group) == 1:
        y.copy_(x)
        return Pending()
    own = contiguous(x) if role.member else None
    if pattern is Pattern.SUM:
        return comm.sum(group, own, y if role.root else None)
    return comm.all_sum(group, contiguous(x), y)
