"""Normalisation: what batch, instance, group, layer and RMS normalisation have in common.

All compute ``y = (x - mean) / sqrt(variance + eps) * weight + bias``, with means over other dims. Two things move:

    rows      weight and bias, from the workers at place 0 of the axes along which they do not vary, as one tensor
    entries   what workers have measured, to those that merge it: see ``distdl.nn.moments``
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from math import nan, prod
from operator import or_
from typing import Any, ClassVar

import torch

from distdl.agreement import Agreement
from distdl.agreement.header import Carried, Headers
from distdl.exchange.route import Route, move
from distdl.geometry.boxes import Interval, Shape, balanced, shape
from distdl.nn.affine import affine, less
from distdl.nn.module import Module, Option, local, stay
from distdl.nn.moments import Moments
from distdl.nn.placement import keep_sequential_keys
from distdl.partition import Partition
from distdl.partition.groups import dims
from distdl.partition.layout import Layout, Lookup
from distdl.plan import Plan
from distdl.plan.planners import broadcast, copy
from distdl.tensors.connection import outside
from distdl.tensors.dtypes import carries_gradients
from distdl.transport.label import Label


@dataclass(frozen=True)
class Arrangement:
    """How a layer sees this worker's block of x.

    Attributes:
        cells: shape of the block, in the dims that the moments have.
        block: shape of the weights that belong to it.
        moments: what is measured; None where running statistics stand for it.
    """

    cells: Shape
    block: Shape
    moments: Moments | None


@dataclass(frozen=True)
class Movements:
    """What follows from the headers: routes (None where nothing has to move), and the dtypes of x and of the rows.

    Attributes:
        gather: the entries of the moments.
        spread: the rows.
        stored: shape of the rows that this worker has to give; None where it stores none.
        running: whether the running statistics come along as two more rows.
    """

    arrangement: Arrangement
    gather: Route | None
    spread: Route | None
    stored: Shape | None
    running: bool
    dtypes: tuple[torch.dtype, torch.dtype]


class Normalisation(Module):
    """Base of the normalisations.

    Args:
        P_x: the partition of x and y, one axis for each dim.
        eps: what is added to the variance; None for the smallest step of the dtype in which it is used. It may be
            changed, on all workers alike.
        extents: global extents of x along the dims in which weight and bias vary.
        parameters: how many of these there are: none, a weight, or both.
        options: what else tells one layer of this class from another.
    """

    names: ClassVar[tuple[str, str]] = ("weight", "bias")
    centred: ClassVar[bool] = True  # whether a mean is subtracted
    published: ClassVar[bool] = False  # whether parameters have all dims of x, and none stand in where none are stored
    shown: ClassVar[tuple[str, ...]] = ("eps",)  # attributes that a repr shows
    P_x = Option[Partition]()

    def __init__(
        self,
        P_x: Partition,
        eps: float | None,
        extents: Mapping[int, int],
        parameters: int,
        options: object = (),
    ) -> None:
        super().__init__()
        places = P_x.workers.shape
        self.P_x, self._extents = P_x, dict(extents)
        self._eps = None if eps is None else float(eps)
        self._blocks = {dim: balanced(extent, places[dim]) for dim, extent in extents.items()}
        self._stored = P_x[tuple(slice(None if dim in extents else 1) for dim in range(len(places)))]
        self.label = Label(f"{type(self).__name__} (P_x: {P_x}; {dims(list(extents.values()))})")
        identity = (eps, self._extents, parameters, options, places)
        self._agreement = Agreement.among(P_x, self.label, identity, self._derive)
        self._given = self.names[:parameters]
        for name, value in zip(self.names, (1.0, 0.0), strict=True):
            self.register_parameter(name, self._parameter(value) if name in self._given else None)
        keep_sequential_keys(self)

    @property
    def eps(self) -> float | None:
        return self._eps

    @eps.setter
    def eps(self, eps: float | None) -> None:
        self._eps = None if eps is None else float(eps)

    def step(self, x: torch.Tensor) -> float:
        """What is added to the variance of x."""
        return torch.finfo(x.dtype).eps if self._eps is None else self._eps

    def numbers(self) -> dict[str, float | None]:
        """The options that may be changed. They are in every header, so that a change on one worker is an error."""
        return {"eps": self._eps}

    @abstractmethod
    def arrange(self, owned: Layout, training: bool) -> Arrangement:
        """What is measured on an x that is cut up so.

        Raises: ValueError, a function of the layout's extents and the mode only.
        """

    def running(self) -> tuple[torch.Tensor, ...]:
        """The running mean and variance, of this worker's balanced block of channels, if there are any."""
        return ()

    def track(self, moments: Moments, means: torch.Tensor) -> None:
        """Take note of what a batch in training mode has brought."""

    @abstractmethod
    def operate(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: Sequence[torch.Tensor],
        tracked: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """torch's operator, on a block that has all cells behind each of its means.

        It checks nothing, for what torch's functions check on a block would raise on some workers only. Its result is
        no view.

        Args:
            running: the mean and variance to use, where running statistics stand for those of x.
            tracked: the running mean and variance that take note of x, if there are any.
        """

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Where the blocks of each parameter live, and which part of the sequential layer's parameter they are."""
        return dict.fromkeys(self._given, self._parameter_layout)

    @property
    def _parameter_layout(self) -> Layout:
        return self._over(self._stored, self._blocks) if self.published else self._flat_layout

    @property
    def _flat_layout(self) -> Layout:
        """Of a parameter that has only the dims in which it varies."""
        places = [len(along) for along in self._blocks.values()]
        return Layout.of(self._stored.reshape(places), [*self._blocks.values()])

    def _parameter(self, value: float) -> torch.nn.Parameter | None:
        layout, me = self._parameter_layout, self.P_x.comm.rank
        if me in layout.partition:
            return torch.nn.Parameter(torch.full(shape(layout[me]), value))
        return None if self.published else torch.nn.Parameter(torch.empty(0))

    @staticmethod
    def _over(P: Partition, blocks: Mapping[int, Sequence[Interval]], rows: int = 0) -> Layout:
        """A row over the workers of P: cut up in the dims in which it varies; or, in dim 0, several rows."""
        along = [blocks.get(dim, [(0, 1)] * places) for dim, places in enumerate(P.workers.shape)]
        return Layout.of(P.reshape(1, *P.workers.shape), [[(0, rows)], *along]) if rows else Layout.of(P, along)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.P_x.comm.rank not in self.P_x:
            return outside(x, *self.parameters())
        found = (getattr(self, name) for name in self._given)
        stored = [torch.empty(0) if one is None else one for one in found]
        mode = (int(self.training), len(self.running()), *map(_bits, self.numbers().values()))
        decision = self._agreement.reach((x, *stored), mode)
        go, carried = decision.outcome, decision.carried
        block = x
        if not x.numel():  # where this worker's result has to be, and what it has to be
            block = x.to(next(chain(self.parameters(), self.buffers()), x).device, go.dtypes[0])
        block = block.to(torch.promote_types(go.dtypes[0], torch.float32))
        asked = reduce(or_, carried[1:], Carried(False))
        if self.published and go.stored is None and asked.gradient and block.requires_grad:
            absent = torch.empty(0, dtype=go.dtypes[1], device=block.device, requires_grad=True)
            block = _Tied.apply(block, _Absent(absent))  # type: ignore[no-untyped-call]
            stored = [absent] * len(stored)
        rows = self._spread(go, block, stored, asked)
        if go.gather is None:
            block = stay(block, reduce(or_, carried))
        cells = block.reshape(go.arrangement.cells)
        if go.gather is None and all(row.dtype is block.dtype for row in self.running()):
            # not of the cells: where a reshape changes the strides of dims of extent 1, torch's derivative goes wrong
            y = self._by_torch(block, rows)
        elif go.arrangement.moments is None:
            centre, variance = (row.to(cells.dtype) for row in rows[len(stored) :])
            y = self._standardise(cells - centre, variance, None, rows[: len(stored)], x.shape)
        else:
            y = self._by_moments(go.arrangement.moments, go.gather, cells, carried[0], rows, x.shape)
        return y.to(go.dtypes[0])

    def _by_torch(self, x: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Nothing that is measured moves, so torch's own operator does it faster."""
        given = len(self._given)
        flat = [row.flatten().to(x.dtype) for row in rows]
        flat[given:] = [row.detach() for row in flat[given:]]
        tracked = self.running() if self.training and x.numel() else ()

        def operator(x: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
            weight, bias = [*rows[:given], None, None][:2]
            return self.operate(x, weight, bias, rows[given:], tracked)

        return local(operator, x.shape, (x, [1] * x.dim()), *((row, [1]) for row in flat))

    def _by_moments(
        self,
        moments: Moments,
        gather: Route | None,
        x: torch.Tensor,
        carried: Carried,
        rows: Sequence[torch.Tensor],
        shape: Shape,
    ) -> torch.Tensor:
        centre = moments.centre(x) if self.centred else None
        rest = x if centre is None else less(x, centre)
        entries = moments.measure(rest, centre)
        if gather is not None:
            entries = move(gather, entries, entries.dtype, (0,), carried)
        means = moments.merge(entries)
        if self.training:
            with torch.no_grad():
                self.track(moments, means)
        own = moments.of(means)
        if centre is None:
            return self._standardise(rest, own[0], None, rows, shape)
        return self._standardise(rest, own[1] / max(moments.count, 1), (own[0] - centre).to(x.dtype), rows, shape)

    def _standardise(
        self,
        rest: torch.Tensor,
        variance: torch.Tensor,
        offset: torch.Tensor | None,
        rows: Sequence[torch.Tensor],
        shape: Shape,
    ) -> torch.Tensor:
        """``(rest - offset) / sqrt(variance + eps) * weight + bias``, in one pass over the block, or in two."""
        scale = (variance + self.step(rest)).rsqrt().to(rest.dtype)
        rows = [row.to(rest.dtype) for row in rows]
        if rows and prod(torch.broadcast_shapes(scale.shape, rows[0].shape)) < rest.numel():
            scale = scale * rows[0]
            shifts = rows[1:] + ([] if offset is None else [-offset * scale])
            return affine(rest, scale, sum(shifts[1:], shifts[0]) if shifts else None, shape)
        shift = None if offset is None else -offset * scale
        if not rows:
            return affine(rest, scale, shift, shape)
        return affine(affine(rest, scale, shift), rows[0], rows[1] if len(rows) > 1 else None, shape)

    def _spread(
        self, go: Movements, x: torch.Tensor, stored: Sequence[torch.Tensor], carried: Carried
    ) -> list[torch.Tensor]:
        """Weight, bias and, where they are used instead of moments, the running mean and variance."""
        running = self.running() if go.arrangement.moments is None else ()
        rows = [*stored, *running] if go.running else [*stored]
        if go.spread is not None:
            given = [row.reshape(-1)[:0] if go.stored is None else row.reshape(go.stored) for row in rows]
            rows = [*move(go.spread, torch.stack(given).to(x.device, go.dtypes[1]), go.dtypes[1], (0,), carried)]
        if not go.running:
            rows += running
        return [row.reshape(go.arrangement.block) for row in rows]

    def _derive(self, headers: Headers) -> Movements:
        P_x, me = self.P_x, self.P_x.comm.rank
        owned = Layout.tiled(P_x, headers.shapes(P_x, type(self).__name__, P_x.workers.ndim))
        if any(owned.extents[dim] != extent for dim, extent in self._extents.items()):
            raise ValueError(
                f"{self.label} needs an input whose extents are {dims(list(self._extents.values()))} in dims "
                f"{', '.join(map(str, self._extents))}; the global shape of the input is {dims(owned.extents)}"
            )
        training = self._agreed_mode(headers)
        arrangement = self.arrange(owned, training)
        gather = None if arrangement.moments is None else arrangement.moments.plan()
        needed = {dim: owned.intervals[dim] for dim in self._extents}
        running = arrangement.moments is None and needed != self._blocks
        dtypes = self._dtypes(headers)
        return Movements(
            arrangement,
            self._route(headers, gather),
            self._route(headers, self._row_plan(needed, len(self._given) + 2 * running, me)),
            shape(self._over(self._stored, self._blocks)[me]) if me in self._stored else None,
            running,
            (dtypes[0], torch.float64) if running else dtypes,
        )

    def _agreed_mode(self, headers: Headers) -> bool:
        """Whether all workers are in training mode.

        Raises: ValueError if workers differ in their mode, in whether they have running statistics, or in a number.
        """
        P_x = self.P_x
        training, running, *numbers = headers.extras(P_x).reshape(P_x.workers.size, -1).T
        if training.any() != training.all():
            raise ValueError(f"{self.label} needs to be in training or in evaluation mode on all workers alike")
        said = {"a number of running statistics": running, **dict(zip(self.numbers(), numbers, strict=True))}
        for what, values in said.items():
            differ = (values != values[0]).nonzero()[0]
            if len(differ):
                show = (lambda value: _number(int(value))) if what in self.numbers() else int
                workers, other = P_x.workers.ravel(), differ[0]
                raise ValueError(
                    f"{self.label} needs {what} that is equal on all workers; worker {workers[0]} has "
                    f"{show(values[0])} and worker {workers[other]} has {show(values[other])}"
                )
        return bool(training.all())

    def _route(self, headers: Headers, plan: Plan | None) -> Route | None:
        return None if plan is None else Route(plan, self.P_x.comm, headers.members, self.label)

    def _row_plan(self, needed: Mapping[int, Sequence[Interval]], rows: int, me: int) -> Plan | None:
        if not rows or (needed == self._blocks and self._stored == self.P_x):
            return None
        if needed != self._blocks:
            return copy(self._over(self._stored, self._blocks, rows), self._over(self.P_x, needed, rows), me)
        blocks = self._over(self._stored, self._blocks)
        return broadcast(self._stored, self.P_x, Lookup(tuple(blocks), lambda w: (rows, *shape(blocks[w]))), me)

    def _dtypes(self, headers: Headers) -> tuple[torch.dtype, torch.dtype]:
        kind = type(self).__name__
        dtype = headers.dtype(self.P_x, kind)
        if not (dtype.is_floating_point and carries_gradients(dtype)):
            raise ValueError(f"{kind} needs an input of a floating-point dtype; got {dtype}")
        found = [headers.dtype(self._stored, kind, tensor=1 + number) for number in range(len(self._given))]
        for number, name in enumerate(self._given):
            headers.check_blocks(self._parameter_layout, f"{self.label}: {name}", tensor=1 + number)
        for name, other in zip(self._given, found, strict=True):
            if other not in (dtype, torch.float32 if dtype.itemsize < 4 else dtype) or other != found[0]:
                raise ValueError(
                    f"{self.label} needs {name} of the input's dtype, {dtype}, or float32 for less; got {other}"
                )
        return dtype, found[0] if found else dtype

    def extra_repr(self) -> str:
        return f"P_x: {self.P_x}; {', '.join(f'{name}={getattr(self, name)}' for name in self.shown)}"


class _Tied(torch.autograd.Function):
    """x, whose gradient depends on that of the weights of a worker which has not even empty ones.

    The gradients of weights are summed on every worker, and once more where they are themselves differentiated. Nobody
    can ask for the gradient of a weight that is not there. So if the sum has run, which the gradient of the empty
    tensor in its place tells, the gradient of x depends on it. This backward comes after the sum's, for it is that of
    an older node.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, absent: _Absent) -> torch.Tensor:
        ctx.absent = absent
        alias: torch.Tensor = torch.ops.aten.alias(x)  # view_as changes strides of extent 1, and then torch errs
        return alias

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed, ctx.absent.weight.grad = ctx.absent.weight.grad, None
        if summed is None or not torch.is_grad_enabled():
            return dx, None
        return dx + summed.sum(), None

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, _: None) -> torch.Tensor:
        return dx.view_as(dx)


@dataclass(frozen=True, eq=False)
class _Absent:
    """The empty tensor in the place of weights that a worker does not have."""

    weight: torch.Tensor


def _bits(number: float | None) -> int:
    """A float, or None, as an integer for a header."""
    bits: int = struct.unpack("<q", struct.pack("<d", nan if number is None else number))[0]
    return bits


def _number(bits: int) -> float | None:
    """The float, or None, of such an integer."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return None if number != number else number
