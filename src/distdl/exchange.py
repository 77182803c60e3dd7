"""The one executor of plans, and the one autograd Function that moves data.

Every member of a movement records the same node, so that each also takes part in its backward: a worker whose own
tensor needs no gradient is tied in through an *anchor*, a tensor of zero volume that does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.profiler import record_function

from distdl.boxes import Shape
from distdl.comm import Calls, Communicator, Group, Message, Pending, contiguous, fold, fold_into, wait_all
from distdl.encoding import carries_gradients
from distdl.header import Carried
from distdl.memory import empty, is_channels_last
from distdl.parcels import by_worker, packed, room, unpack
from distdl.plan import Pattern, Plan, Role, Schedule

_TAGS = 32768


@dataclass(frozen=True, eq=False)
class Route:
    """A plan together with those who execute it.

    Attributes:
        comm, members: who takes part; every one of them executes the plan.
        where: the layer and its partitions, for messages to people, and to tell its messages from another layer's.
        keeps_format: y is channels_last where x is. Otherwise it is contiguous.
        T: the adjoint.
        schedule: what this worker does.
        extents: shape of this worker's part of y; None where it has none.
        calls: how many exchanges the members have begun.
    """

    plan: Plan
    comm: Communicator
    members: Group
    where: str
    keeps_format: bool = False

    @cached_property
    def T(self) -> Route:
        transposed = Route(self.plan.T, self.comm, self.members, self.where, self.keeps_format)
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


class Load(NamedTuple):
    """How one tensor moves.

    Attributes:
        route: the plan, and who executes it.
        dtype: the dtype that moves, as agreed.
        blank: shape of the result where the plan has no output for this worker.
        carried: what the tensor carries on any member.
    """

    route: Route
    dtype: torch.dtype
    blank: tuple[int, ...]
    carried: Carried

    @property
    def recorded(self) -> bool:
        """Whether the movement is recorded for differentiation, on every member."""
        return (self.carried.gradient or self.carried.tangent) and carries_gradients(self.dtype)


def move(route: Route, x: torch.Tensor, dtype: torch.dtype, blank: tuple[int, ...], carried: Carried) -> torch.Tensor:
    """Execute a plan on this worker's tensor, and record it for differentiation if the members agreed to.

    Args:
        x: the local tensor; where the plan has no input for this worker, any tensor of zero volume.
        dtype, blank, carried: see :class:`Load`.
    Returns: a new tensor, in the shape of ``plan.outputs``; connected to x wherever a gradient is recorded.
    """
    load = Load(route, dtype, blank, carried)
    if not load.recorded:
        return execute((load,), (x.detach(),))[0]
    bare = (carried.gradient and not x.requires_grad) or (carried.tangent and not Carried.by(x, False).tangent)
    y: torch.Tensor = Apply.apply((load,), _anchor(x, carried) if bare else None, x)[0]  # type: ignore[no-untyped-call]
    return y


def move_together(loads: tuple[Load, ...], xs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Move several tensors at once, both ways: their messages are under way at the same time.

    Every member passes loads of the same routes in the same order. Routes may differ in their members.
    """
    recorded = [load.recorded for load in loads]
    if not any(recorded):
        return execute(loads, tuple(x.detach() for x in xs))
    carried = reduce(or_, [load.carried for load, noted in zip(loads, recorded, strict=True) if noted])
    bare = (carried.gradient and not any(x.requires_grad for x in xs)) or (
        carried.tangent and not any(Carried.by(x, False).tangent for x in xs)
    )
    anchor = _anchor(xs[0], carried) if bare else None
    ys: tuple[torch.Tensor, ...] = Apply.apply(loads, anchor, *xs)  # type: ignore[no-untyped-call]
    return ys


def _anchor(beside: torch.Tensor, carried: Carried) -> torch.Tensor:
    anchor = torch.empty(0, device=beside.device, requires_grad=carried.gradient)
    return forward_ad.make_dual(anchor, torch.empty(0, device=beside.device)) if carried.tangent else anchor


class Apply(torch.autograd.Function):
    """``y = plan x``, for one or several tensors. Its backward is ``plan.T``, its tangent map the plan itself."""

    @staticmethod
    def forward(
        ctx: Any, loads: tuple[Load, ...], anchor: torch.Tensor | None, *xs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.loads = loads
        ctx.sources = [(x.shape, x.dtype, x.device) for x in xs]
        ctx.save_for_backward(_NOTHING)  # so that checkpointing recomputes this node, on every member alike
        ctx.set_materialize_grads(False)
        ys = execute(loads, xs)
        if len(loads) > 1:
            ctx.mark_non_differentiable(*(y for y, load in zip(ys, loads, strict=True) if not load.recorded))
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # before any message: this is where a checkpoint computes its forward again
        mode, forward_mode = torch.is_grad_enabled(), _differentiates_forward()
        carried = Carried(mode, forward_mode, mode and forward_mode) if mode or forward_mode else _NOTHING_CARRIED
        places = [place for place, load in enumerate(ctx.loads) if load.recorded and load.carried.gradient]
        loads = tuple(
            Load(ctx.loads[place].route.T, ctx.loads[place].dtype, ctx.sources[place][0], carried) for place in places
        )
        cotangents = tuple(_or_zeros(dys[place], ctx.loads[place], ctx.sources[place]) for place in places)
        found = move_together(loads, cotangents) if mode or forward_mode else execute(loads, cotangents)
        dxs: list[torch.Tensor | None] = [None] * len(ctx.loads)
        for place, dx in zip(places, found, strict=True):
            own = ctx.sources[place][1]
            dxs[place] = dx if own is dx.dtype else dx.to(own)
        anchored = torch.zeros(0, device=ctx.sources[0][2]) if ctx.needs_input_grad[1] else None
        return None, anchored, *dxs

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        places = [place for place, load in enumerate(ctx.loads) if load.recorded]
        loads, given = [], []
        for place in places:
            (shape, own, device), load = ctx.sources[place], ctx.loads[place]
            tangent = tangents[2 + place]
            given.append(torch.zeros(shape, dtype=own, device=device) if tangent is None else tangent)
            loads.append(load._replace(carried=Carried(load.carried.tangent_gradient)))
        found = dict(zip(places, move_together(tuple(loads), tuple(given)), strict=True))
        return tuple(found.get(place) for place in range(len(ctx.loads)))


def _or_zeros(dy: torch.Tensor | None, load: Load, source: tuple[Any, ...]) -> torch.Tensor:
    """The gradient of a result; zeros if nothing depends on it on this worker, for the others may wait for it."""
    if dy is not None:
        return dy
    extents = load.route.extents
    return torch.zeros(load.blank if extents is None else extents, dtype=load.dtype, device=source[2])


_NOTHING = torch.empty(0)
_NOTHING_CARRIED = Carried(False)


def _differentiates_forward() -> bool:
    # whether a level of forward-mode differentiation is open: unlike a tangent, that is the same on every worker
    return forward_ad._current_level >= 0


def execute(loads: Sequence[Load], xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Do this worker's part of plans. No x, nor anything that shares its memory, is written or returned."""
    if torch._C._autograd._profiler_enabled():
        with record_function(loads[0].route.where):
            return _execute(loads, xs)
    return _execute(loads, xs)


def _execute(loads: Sequence[Load], xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if len(loads) == 1:  # as nearly always
        y, pending = _begin(loads[0], xs[0])
        pending.wait()
        return (y,)
    begun = [_begin(load, x) for load, x in zip(loads, xs, strict=True)]
    for _, pending in begun:
        pending.wait()
    return tuple(y for y, _ in begun)


def _begin(load: Load, x: torch.Tensor) -> tuple[torch.Tensor, Pending]:
    """The result, which is there after the wait."""
    route, dtype = load.route, load.dtype
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()  # transports read memory, and these views are conjugated when they are read
    comm, schedule, pattern, extents = route.comm, route.schedule, route.plan.pattern, route.extents
    comm.where = route.where
    tag = route.next_tag()
    if extents is None:
        y = torch.zeros(load.blank, dtype=dtype, device=x.device)
    else:
        y = empty(extents, dtype, x, route.keeps_format and len(extents) == x.dim() and is_channels_last(x))
    if pattern is Pattern.MOVES:
        return y, _begin_moves(comm, schedule, x, y, tag)
    plays = [_play(comm, pattern, role, x, y) for role in schedule.roles]
    return y, plays[0] if len(plays) == 1 else Pending(partial(wait_all, plays))


def _begin_moves(comm: Communicator, schedule: Schedule, x: torch.Tensor, y: torch.Tensor, tag: int) -> Pending:
    # (an empty index stands for all of a tensor; taking it would still make a view)
    for index in schedule.blank:
        y[index].zero_()
    arrivals = [
        (source, empty(shape, y.dtype, y) if index is None else y[index] if index else y)
        for source, index, shape in schedule.receives
    ]
    sends = [(target, x[index] if index else x) for target, index in schedule.sends]
    rooms: Sequence[Message] = arrivals
    if schedule.packs:
        sends = [(target, packed(parts)) for target, parts in by_worker(sends).items()]
        rooms = [(source, room(parts)) for source, parts in by_worker(arrivals).items()]
    pending = comm.exchange(sends, rooms, tag) if sends or rooms else Pending()
    for to, own in schedule.kept:
        (y[to] if to else y).copy_(x[own] if own else x)
    if not (schedule.packs or schedule.sums):
        return pending
    return Pending(partial(_finish_moves, pending, schedule, x, y, arrivals, rooms))


def _finish_moves(
    pending: Pending,
    schedule: Schedule,
    x: torch.Tensor,
    y: torch.Tensor,
    arrivals: Sequence[Message],
    rooms: Sequence[Message],
) -> None:
    pending.wait()
    if schedule.packs:
        for (_, arrived), parts in zip(rooms, by_worker(arrivals).values(), strict=True):
            unpack(arrived, parts)
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
