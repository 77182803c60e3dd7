"""Transfers: what a worker does to execute its part of a plan, for tensors of one layout.

All that follows from shapes and strides is worked out once, above all where in memory each message lies. So a short
message costs little more than its transport takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from distdl.exchange.packing import pack, unpack
from distdl.geometry.boxes import Shape
from distdl.plan.plan import Index, Pattern, Role, Schedule
from distdl.tensors.memory import SMALLEST, empty
from distdl.transport.communicator import Communicator, Pending, contiguous, wait_all
from distdl.transport.folding import fold, fold_into
from distdl.transport.view import Addressed, View

_SHORT_COPY = 1 << 15  # bytes; up to here torch takes longer to make views than to copy
_KINDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
_CPU = torch.device("cpu")
_X, _Y, _BUFFERS = 0, 1, 2  # where a transfer's tensors stand: x, y, and buffers for what is not written to y at once


class Transfer:
    """What a worker does with each x of one layout.

    Args:
        comm, pattern, schedule: who executes the plan, how it is written, and this worker's part of it.
        x: a tensor of the layout.
        shape: of y.
        blank: whether the plan has no y for this worker: then it is zeros.
        dtype: of y, and of x where the plan reads it.
        channels_last: whether y is.
        reuses: whether y may lie in the memory of x.
    """

    def __init__(
        self,
        comm: Communicator,
        pattern: Pattern,
        schedule: Schedule,
        x: torch.Tensor,
        shape: Shape,
        blank: bool,
        dtype: torch.dtype,
        channels_last: bool,
        reuses: bool = False,
    ) -> None:
        self._comm, self._pattern, self._roles = comm, pattern, schedule.roles
        self._shape, self._dtype, self._channels_last = shape, dtype, channels_last
        given = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")
        made = empty(shape, dtype, given, channels_last)
        self._reused: View | None = None
        if reuses and not blank and made.nbytes > _SHORT_COPY and given.is_contiguous():
            index = _all_of_y(schedule)
            if index is not None:
                self._reused, made = View.of(_X, given, index), given[index]
                schedule = replace(schedule, kept=())
        self._buffers = [extents for _, index, extents in schedule.receives if index is None]
        sums = iter(range(_BUFFERS, _BUFFERS + len(self._buffers)))
        receives = [
            (source, View.of(_Y, made, index) if index is not None else self._buffer(next(sums), extents))
            for source, index, extents in schedule.receives
        ]
        addends = [view for _, view in receives]
        sends = [(target, View.of(_X, given, index)) for target, index in schedule.sends]
        self._arriving: list[_Packed] = []
        self._leaving: list[_Packed] = []
        if schedule.packs:
            receives, self._arriving = self._packed(receives)
            self._buffers += [(packed.size,) for packed in self._arriving]
            sends, self._leaving = self._packed(sends)
        self._exchange = comm.prepare(sends, receives) if sends or receives else None
        largest = max(map(prod, (shape, *self._buffers))) * dtype.itemsize
        self._plain = x.is_cpu and not channels_last and largest < SMALLEST
        self._zeros = [View.of(_Y, made)] if blank else [View.of(_Y, made, index) for index in schedule.blank]
        self._short: list[_Copy] = []
        self._long: list[tuple[View, View]] = []
        for to, own in schedule.kept:
            target, source = View.of(_Y, made, to), View.of(_X, given, own)
            if x.is_cpu and source.nbytes <= _SHORT_COPY:
                self._short.append(_Copy.of(target, source))
            else:
                self._long.append((target, source))
        self._sums = []
        for to, terms in schedule.sums:
            views = [addends[term] if isinstance(term, int) else View.of(_X, given, term) for term in terms]
            self._sums.append(self._begun(_Sum(View.of(_Y, made, to), views, schedule.adds), x.is_cpu))

    def _buffer(self, number: int, extents: Shape) -> View:
        return View.of(number, torch.empty(extents, dtype=self._dtype, device="meta"))

    def _packed(self, messages: Sequence[Addressed]) -> tuple[list[Addressed], list[_Packed]]:
        """The same messages, as one for each worker; what goes to, or comes from, one worker shares a buffer."""
        by_worker: dict[int, list[View]] = {}
        for worker, view in messages:
            by_worker.setdefault(worker, []).append(view)
        number, single, packed = _BUFFERS + len(self._buffers), [], []
        for worker, views in by_worker.items():
            if len(views) == 1:
                single.append((worker, views[0]))
            else:
                packed.append(_Packed(number, views, sum(prod(view.shape) for view in views)))
                single.append((worker, self._buffer(number, (packed[-1].size,))))
                number += 1
        return single, packed

    def _begun(self, one: _Sum, on_cpu: bool) -> _Sum:
        """A sum of a short part of x and something that arrives: a copy and a sum in place, without a view of x."""
        own = [view for view in one.addends if view.tensor == _X]
        arrived = [view for view in one.addends if view.tensor != _X]
        if not on_cpu or one.in_place or len(own) != 1 or len(arrived) != 1 or own[0].whole:
            return one
        if own[0].nbytes > _SHORT_COPY:
            return one
        self._short.append(_Copy.of(one.to, own[0]))
        return _Sum(one.to, arrived, in_place=True)

    def begin(self, x: torch.Tensor, tag: int) -> tuple[torch.Tensor, Pending]:
        """Do all that needs no message. The result, which is there after the wait; x is only read."""
        if self._plain and self._reused is None:  # ``empty`` comes to the same, more slowly
            y = torch.empty(self._shape, dtype=self._dtype, device=_CPU)
            tensors = [x, y]
            for extents in self._buffers:
                tensors.append(torch.empty(extents, dtype=self._dtype, device=_CPU))
        else:
            reused = self._reused
            y = reused.take((x,)) if reused else empty(self._shape, self._dtype, x, self._channels_last)
            tensors = [x, y, *[empty(extents, self._dtype, x) for extents in self._buffers]]
        for view in self._zeros:
            view.take(tensors).zero_()
        if self._leaving:
            tensors += [pack([view.take(tensors) for view in packed.views]) for packed in self._leaving]
        comm = self._comm.recorder or self._comm  # as ``comm.through``, without a call
        pending = Pending() if self._exchange is None else comm.start(self._exchange, tensors, tag)
        if self._short:
            target, source = y.data_ptr(), x.data_ptr()
            for copy in self._short:
                copy.execute(target, source)
        for to, own in self._long:
            to.take(tensors).copy_(own.take(tensors))
        if self._roles:
            plays = [_play(comm, self._pattern, role, x, y, tag) for role in self._roles]
            pending = Pending(partial(wait_all, [pending, *plays]))
        return y, Pending(partial(self._finish, pending, tensors)) if self._sums or self._arriving else pending

    def _finish(self, pending: Pending, tensors: Sequence[torch.Tensor]) -> None:
        pending.wait()
        for packed in self._arriving:
            parts = unpack(tensors[packed.buffer], [view.shape for view in packed.views])
            for view, part in zip(packed.views, parts, strict=True):
                view.take(tensors).copy_(part)
        for to, addends, in_place in self._sums:
            total, terms = to.take(tensors), [view.take(tensors) for view in addends]
            if in_place:
                total.add_(fold(terms, torch.add))
            else:
                fold_into(total, terms)


def _all_of_y(schedule: Schedule) -> Index | None:
    """Where in x all of y stands, but for what arrives and is added to it; None if there is no such place."""
    arrives = all(index is None for _, index, _ in schedule.receives)
    added = schedule.adds or not schedule.sums
    own = any(not isinstance(term, int) for _, terms in schedule.sums for term in terms)
    if len(schedule.kept) != 1 or schedule.blank or schedule.roles or own or not (arrives and added):
        return None
    return schedule.kept[0][1]


class _Packed(NamedTuple):
    """Several regions that are one message.

    Attributes:
        buffer: which tensor holds the message.
        views: the regions, in their order.
        size: their elements.
    """

    buffer: int
    views: list[View]
    size: int


class _Sum(NamedTuple):
    """A sum into a region of y.

    Attributes:
        in_place: whether the addends are added to what y has there, instead of written.
    """

    to: View
    addends: list[View]
    in_place: bool


class _Copy(NamedTuple):
    """A copy of a few bytes from x to y by their addresses, through NumPy. (:class:`View` says why that is safe.)

    Attributes:
        shape, kind: extents in elements, and a NumPy dtype as wide as one.
        to, own: where the regions lie: offset, strides in bytes, and a type as long as from first to last element.
        nbytes: how many, if both are contiguous; else 0.
    """

    shape: Shape
    kind: np.dtype[Any]
    to: tuple[int, Shape, Any]
    own: tuple[int, Shape, Any]
    nbytes: int

    @classmethod
    def of(cls, to: View, own: View) -> _Copy:
        nbytes = to.nbytes if to.is_contiguous and own.is_contiguous else 0
        return cls(own.shape, np.dtype(_KINDS[own.dtype.itemsize]), _memory(to), _memory(own), nbytes)

    def execute(self, target: int, source: int) -> None:
        """Copy, given the addresses of both tensors."""
        if self.nbytes:
            ctypes.memmove(target + self.to[0], source + self.own[0], self.nbytes)
            return
        offset, strides, block = self.to
        to: NDArray[Any] = np.ndarray(self.shape, self.kind, block.from_address(target + offset), 0, strides)
        offset, strides, block = self.own
        to[...] = np.ndarray(self.shape, self.kind, block.from_address(source + offset), 0, strides)


def _memory(view: View) -> tuple[int, Shape, Any]:
    width = view.dtype.itemsize
    strides = tuple(stride * width for stride in view.strides)
    reach = width + sum((n - 1) * stride for n, stride in zip(view.shape, strides, strict=True))
    return view.offset, strides, ctypes.c_char * reach


def _play(comm: Communicator, pattern: Pattern, role: Role, x: torch.Tensor, y: torch.Tensor, tag: int) -> Pending:
    group = role.group
    if pattern is Pattern.BROADCAST:
        pending = comm.broadcast(group, contiguous(x) if role.root else y, tag)
        if role.root and role.member:
            y.copy_(x)
        return pending
    if pattern is Pattern.ALL_SUM:
        return comm.all_sum(group, contiguous(x), y, tag)
    return comm.sum(group, contiguous(x) if role.member else None, y if role.root else None, tag)
