"""Routes: plans together with those who execute them, and how tensors move along them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch.profiler import record_function

from distdl.boxes import Shape
from distdl.comm import Communicator, Group, Pending
from distdl.encoding import carries_gradients
from distdl.header import Carried
from distdl.memory import is_channels_last, readable
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Route:
        return self  # a value, and what it keeps follows from it

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

    def load(
        self, dtype: torch.dtype, blank: tuple[int, ...], carried: Carried, parts: tuple[Shape, ...] | None = None
    ) -> Load:
        """How a tensor moves along this route; see :class:`Load`. Kept, for it keeps what it has worked out."""
        key = (dtype, blank, carried, parts)
        load = self._loads.get(key)
        if load is None:
            if len(self._loads) == _LOADS_KEPT:
                self._loads.clear()
            load = self._loads[key] = Load(self, dtype, blank, carried, parts)
        return load


class Load:
    """How a tensor moves along a route, or several tensors as one vector.

    Attributes:
        route: the plan, and who executes it.
        dtype: the dtype that moves, as agreed.
        blank: shape of the result where the plan has no output for this worker.
        carried: what the tensor carries on any member.
        parts: of several tensors, the shapes of this worker's results; None if it is one tensor.
        recorded: whether the movement is recorded for differentiation, on every member.
    """

    def __init__(
        self,
        route: Route,
        dtype: torch.dtype,
        blank: tuple[int, ...],
        carried: Carried,
        parts: tuple[Shape, ...] | None = None,
    ) -> None:
        self.route, self.dtype, self.blank, self.carried, self.parts = route, dtype, blank, carried, parts
        self.recorded = (carried.gradient or carried.tangent) and carries_gradients(dtype)
        self._comm, self._calls = route.comm, route.comm.calls(route.members)
        self._mark = zlib.crc32(route.where.encode())
        self._programs: dict[Any, Program] = {}
        self._cuts, start = [], 0
        for part in parts or ():
            self._cuts.append((part, torch.empty(part, device="meta").stride(), start))
            start += prod(part)

    def cut(self, y: torch.Tensor) -> Sequence[torch.Tensor]:
        """The results, as views of the vector that they moved as, which begins its memory."""
        return (y,) if self.parts is None else [y.as_strided(*cut) for cut in self._cuts]

    def execute(self, x: torch.Tensor) -> torch.Tensor:
        """Do this worker's part of the plan. Neither x nor anything that shares its memory is written or returned."""
        if torch._C._autograd._profiler_enabled():
            return execute_together((self,), (x,))[0]
        y, pending = self.begin(x)
        pending.wait()
        return y

    def begin(self, x: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Begin to execute the plan. The result is there after the wait."""
        if type(x) is not torch.Tensor or x.is_conj() or x.is_neg() or x._is_zerotensor():
            x = readable(x)  # transports read memory
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
