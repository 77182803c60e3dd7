"""The one executor of plans, and the one autograd Function that moves data.

Every member of a movement records the same node, so that each also takes part in its backward: a worker whose own
tensor needs no gradient is tied in through an *anchor*, a tensor of zero volume that does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.profiler import record_function

from distdl.boxes import Shape
from distdl.comm import Communicator, Group, Pending
from distdl.encoding import carries_gradients
from distdl.header import Carried
from distdl.memory import is_channels_last
from distdl.plan import Plan, Schedule
from distdl.program import Program

_TAGS = 32768
_LOADS_KEPT = _PROGRAMS_KEPT = 8


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
    """

    plan: Plan
    comm: Communicator
    members: Group
    where: str
    keeps_format: bool = False
    _loads: dict[Any, Load] = field(default_factory=dict, init=False, repr=False)

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

    def load(self, dtype: torch.dtype, blank: tuple[int, ...], carried: Carried) -> Load:
        """How a tensor moves along this route; see :class:`Load`. Kept, for it keeps what it has worked out."""
        key = (dtype, blank, carried)
        load = self._loads.get(key)
        if load is None:
            if len(self._loads) == _LOADS_KEPT:
                self._loads.clear()
            load = self._loads[key] = Load(self, dtype, blank, carried)
        return load


class Load:
    """How one tensor moves along a route.

    Attributes:
        route: the plan, and who executes it.
        dtype: the dtype that moves, as agreed.
        blank: shape of the result where the plan has no output for this worker.
        carried: what the tensor carries on any member.
        recorded: whether the movement is recorded for differentiation, on every member.
    """

    def __init__(self, route: Route, dtype: torch.dtype, blank: tuple[int, ...], carried: Carried) -> None:
        self.route, self.dtype, self.blank, self.carried = route, dtype, blank, carried
        self.recorded = (carried.gradient or carried.tangent) and carries_gradients(dtype)
        self._comm, self._calls = route.comm, route.comm.calls(route.members)
        self._mark = zlib.crc32(route.where.encode())
        self._programs: dict[Any, Program] = {}

    def execute(self, x: torch.Tensor) -> torch.Tensor:
        """Do this worker's part of the plan. Neither x nor anything that shares its memory is written or returned."""
        if torch._C._autograd._profiler_enabled():
            return execute_together((self,), (x,))[0]
        y, pending = self.begin(x)
        pending.wait()
        return y

    def begin(self, x: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Begin to execute the plan. The result is there after the wait."""
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()  # transports read memory, and these views are conjugated when read
        layout = x.shape, x.stride(), x.is_cpu
        program = self._programs.get(layout) or self._program(layout, x)
        self._comm.where = self.route.where
        calls = self._calls
        calls.number += 1
        # the tag of its messages follows from how many exchanges the members have begun, and from the layer
        return program.begin(x, (calls.number + self._mark) % _TAGS)

    def _program(self, layout: Any, x: torch.Tensor) -> Program:
        route = self.route
        shape = route.extents
        channels_last = route.keeps_format and shape is not None and len(shape) == x.dim() and is_channels_last(x)
        if len(self._programs) == _PROGRAMS_KEPT:
            self._programs.clear()
        program = self._programs[layout] = Program(
            route.comm, route.plan.pattern, route.schedule, x, self.blank if shape is None else shape, shape is None,
            self.dtype, channels_last,
        )  # fmt: skip
        return program


def move(route: Route, x: torch.Tensor, dtype: torch.dtype, blank: tuple[int, ...], carried: Carried) -> torch.Tensor:
    """Execute a plan on this worker's tensor, and record it for differentiation if the members agreed to.

    Args:
        x: the local tensor; where the plan has no input for this worker, any tensor of zero volume.
        dtype, blank, carried: see :class:`Load`.
    Returns: a new tensor, in the shape of ``plan.outputs``; connected to x wherever a gradient is recorded.
    """
    return _move(route.load(dtype, blank, carried), x)


def _move(load: Load, x: torch.Tensor) -> torch.Tensor:
    if not load.recorded:
        return load.execute(x.detach())
    carried = load.carried
    bare = (carried.gradient and not x.requires_grad) or (carried.tangent and not Carried.by(x, False).tangent)
    y: torch.Tensor = Apply.apply(load, _anchor(x, carried) if bare else None, x)  # type: ignore[no-untyped-call]
    return y


def move_together(loads: Sequence[Load], xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Move several tensors at once, both ways: their messages are under way at the same time.

    Every member passes loads of the same routes in the same order. Routes may differ in their members.
    """
    if len(loads) == 1:
        return (_move(loads[0], xs[0]),)
    recorded = [load.recorded for load in loads]
    if not any(recorded):
        return execute_together(loads, [x.detach() for x in xs])
    carried = reduce(or_, [load.carried for load, noted in zip(loads, recorded, strict=True) if noted])
    bare = (carried.gradient and not any(x.requires_grad for x in xs)) or (
        carried.tangent and not any(Carried.by(x, False).tangent for x in xs)
    )
    anchor = _anchor(xs[0], carried) if bare else None
    ys: tuple[torch.Tensor, ...] = ApplyTogether.apply(loads, anchor, *xs)  # type: ignore[no-untyped-call]
    return ys


def _anchor(beside: torch.Tensor, carried: Carried) -> torch.Tensor:
    anchor = torch.empty(0, device=beside.device, requires_grad=carried.gradient)
    return forward_ad.make_dual(anchor, torch.empty(0, device=beside.device)) if carried.tangent else anchor


class Apply(torch.autograd.Function):
    """``y = plan x``. Its backward is ``plan.T``, its tangent map the plan itself."""

    @staticmethod
    def forward(ctx: Any, load: Load, anchor: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        ctx.load, ctx.source = load, Source(x.shape, x.dtype, x.device)
        ctx.save_for_backward(_NOTHING)  # so that checkpointing recomputes this node, on every member alike
        ctx.set_materialize_grads(False)
        return load.execute(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # before any message: this is where a checkpoint computes its forward again
        source = ctx.source
        dx = _move(_adjoint(ctx.load, source), _or_zeros(dy, ctx.load, source)) if ctx.load.carried.gradient else None
        return (
            None,
            _anchored(ctx, source.device),
            dx if dx is None or dx.dtype is source.dtype else dx.to(source.dtype),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        return _move(_tangent_map(ctx.load), _tangent(tangents[2], ctx.source))


class ApplyTogether(torch.autograd.Function):
    """The same for several tensors that move at the same time. Those of which nothing is recorded move, too."""

    @staticmethod
    def forward(
        ctx: Any, loads: Sequence[Load], anchor: torch.Tensor | None, *xs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.loads, ctx.sources = loads, [Source(x.shape, x.dtype, x.device) for x in xs]
        ctx.save_for_backward(_NOTHING)
        ctx.set_materialize_grads(False)
        ys = execute_together(loads, xs)
        ctx.mark_non_differentiable(*(y for y, load in zip(ys, loads, strict=True) if not load.recorded))
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        places = [place for place, load in enumerate(ctx.loads) if load.recorded and load.carried.gradient]
        given = [(ctx.loads[place], ctx.sources[place], dys[place]) for place in places]
        found = move_together(
            [_adjoint(load, source) for load, source, _ in given],
            [_or_zeros(dy, load, source) for load, source, dy in given],
        )
        dxs: list[torch.Tensor | None] = [None] * len(ctx.loads)
        for place, (_, source, _), dx in zip(places, given, found, strict=True):
            dxs[place] = dx if dx.dtype is source.dtype else dx.to(source.dtype)
        return None, _anchored(ctx, ctx.sources[0].device), *dxs

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        places = [place for place, load in enumerate(ctx.loads) if load.recorded]
        loads = [_tangent_map(ctx.loads[place]) for place in places]
        moved = move_together(loads, [_tangent(tangents[2 + place], ctx.sources[place]) for place in places])
        found = dict(zip(places, moved, strict=True))
        return tuple(found.get(place) for place in range(len(ctx.loads)))


class Source(NamedTuple):
    """What is to be known of a tensor that has moved, for its gradient."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _adjoint(load: Load, source: Source) -> Load:
    mode, forward_mode = torch.is_grad_enabled(), _differentiates_forward()
    carried = Carried(mode, forward_mode, mode and forward_mode) if mode or forward_mode else _NOTHING_CARRIED
    return load.route.T.load(load.dtype, source.shape, carried)


def _anchored(ctx: Any, device: torch.device) -> torch.Tensor | None:
    """The gradient of the anchor."""
    return torch.zeros(0, device=device) if ctx.needs_input_grad[1] else None


def _tangent_map(load: Load) -> Load:
    return load.route.load(load.dtype, load.blank, Carried(load.carried.tangent_gradient))


def _tangent(given: torch.Tensor | None, source: Source) -> torch.Tensor:
    return torch.zeros(source.shape, dtype=source.dtype, device=source.device) if given is None else given


def _or_zeros(dy: torch.Tensor | None, load: Load, source: Source) -> torch.Tensor:
    """The gradient of a result; zeros if nothing depends on it on this worker, for the others may wait for it."""
    if dy is not None:
        return dy
    extents = load.route.extents
    return torch.zeros(load.blank if extents is None else extents, dtype=load.dtype, device=source.device)


_NOTHING = torch.empty(0)
_NOTHING_CARRIED = Carried(False)


def _differentiates_forward() -> bool:
    # whether a level of forward-mode differentiation is open: unlike a tangent, that is the same on every worker
    return forward_ad._current_level >= 0


def execute_together(loads: Sequence[Load], xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Do this worker's part of several plans at once; see :meth:`Load.execute`."""
    if torch._C._autograd._profiler_enabled():
        with record_function(loads[0].route.where):
            return _execute_together(loads, xs)
    return _execute_together(loads, xs)


def _execute_together(loads: Sequence[Load], xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    begun = [load.begin(x) for load, x in zip(loads, xs, strict=True)]
    for _, pending in begun:
        pending.wait()
    return tuple(y for y, _ in begun)
