"""Programs: what a worker does to execute its part of a plan, for tensors of one layout.

All that follows from shapes and strides is worked out once, above all where in memory each message lies. So a short
message costs little more than its transport takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from itertools import count
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from distdl.boxes import Shape
from distdl.comm import Communicator, Part, Pending, Traffic, contiguous, fold, fold_into, wait_all
from distdl.memory import SMALLEST, empty
from distdl.parcels import by_worker, packed, room, unpack
from distdl.plan import Index, Pattern, Role, Schedule

_SHORT_COPY = 1 << 15  # bytes; up to here torch takes longer to make views than to copy
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
_CPU = torch.device("cpu")
_X, _Y, _ROOMS = 0, 1, 2  # where a program's tensors stand: x, y, and rooms of their own for what is to be added


class Program:
    """What a worker does with each x of one layout.

    Args:
        comm, pattern, schedule: who executes the plan, how it is written, and this worker's part of it.
        x: a tensor of the layout.
        shape: of y.
        blank: whether the plan has no y for this worker: then it is zeros.
        dtype: of y, and of x where the plan reads it.
        channels_last: whether y is.
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
    ) -> None:
        self._comm, self._pattern, self._roles = comm, pattern, schedule.roles
        self._shape, self._dtype, self._channels_last = shape, dtype, channels_last
        self._rooms = [extents for _, index, extents in schedule.receives if index is None]
        largest = max(map(prod, (shape, *self._rooms))) * dtype.itemsize
        self._plain = x.is_cpu and not channels_last and largest < SMALLEST
        self._zeros: tuple[Index, ...] = ((),) if blank else schedule.blank
        self._packs, self._moves = schedule.packs, bool(schedule.sends or schedule.receives)
        given = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")
        made = empty(shape, dtype, given, channels_last)
        places = _places(schedule)
        laid = (given, made, *[empty(extents, dtype, given) for extents in self._rooms])
        self._traffic = Traffic(
            [Part.of(worker, _X, index, given) for worker, index in schedule.sends],
            [
                Part.of(worker, at, index or (), laid[at])
                for at, (worker, index, _) in zip(places, schedule.receives, strict=True)
            ],
        )
        self._short: list[_Copy] = []
        self._long: list[tuple[Index, Index]] = []
        for to, own in schedule.kept:
            copy = _Copy.of(made[to], given[own])
            if x.is_cpu and copy.is_short:
                self._short.append(copy)
            else:
                self._long.append((to, own))
        sums = [_Sum(to, [_addend(term, places) for term in terms], schedule.adds) for to, terms in schedule.sums]
        self._sums = [self._begun(one, made, given) if x.is_cpu else one for one in sums]

    def _begun(self, one: _Sum, made: torch.Tensor, given: torch.Tensor) -> _Sum:
        """A sum of a short part of x and something that arrives: a copy and a sum in place, without a view of x."""
        own = [index for place, index in one.addends if place == _X]
        arrived = [addend for addend in one.addends if addend[0] != _X]
        if one.in_place or len(own) != 1 or len(arrived) != 1 or own == [()]:
            return one
        copy = _Copy.of(made[one.to], given[own[0]])
        if not copy.is_short:
            return one
        self._short.append(copy)
        return _Sum(one.to, arrived, in_place=True)

    def begin(self, x: torch.Tensor, tag: int) -> tuple[torch.Tensor, Pending]:
        """Do all that needs no message. The result, which is there after the wait; x is only read."""
        if self._plain:  # ``empty`` comes to the same, more slowly
            y = torch.empty(self._shape, dtype=self._dtype, device=_CPU)
            rooms = [torch.empty(extents, dtype=self._dtype, device=_CPU) for extents in self._rooms]
        else:
            y = empty(self._shape, self._dtype, x, self._channels_last)
            rooms = [empty(extents, self._dtype, x) for extents in self._rooms]
        for index in self._zeros:
            (y[index] if index else y).zero_()  # (an empty index stands for all; taking it would still make a view)
        tensors = (x, y, *rooms)
        if self._packs:
            pending = _exchange_packed(self._comm, self._traffic, tensors, tag)
        elif self._moves:
            pending = self._comm.exchange_parts(self._traffic, tensors, tag)
        else:
            pending = Pending()
        if self._short:
            target, source = y.data_ptr(), x.data_ptr()
            for copy in self._short:
                copy.execute(target, source)
        for to, own in self._long:
            (y[to] if to else y).copy_(x[own] if own else x)
        if self._roles:
            plays = [_play(self._comm, self._pattern, role, x, y) for role in self._roles]
            pending = Pending(partial(wait_all, [pending, *plays]))
        return y, Pending(partial(self._add, pending, tensors)) if self._sums else pending

    def _add(self, pending: Pending, tensors: Sequence[torch.Tensor]) -> None:
        pending.wait()
        for to, addends, in_place in self._sums:
            total = tensors[_Y][to] if to else tensors[_Y]
            terms = [tensors[place][index] if index else tensors[place] for place, index in addends]
            if in_place:
                total.add_(fold(terms, torch.add))
            else:
                fold_into(total, terms)


class _Sum(NamedTuple):
    """A sum into a part of y.

    Attributes:
        to: where in y.
        addends: which tensor, and where in it.
        in_place: whether they are added to what y has there, instead of written.
    """

    to: Index
    addends: list[tuple[int, Index]]
    in_place: bool


def _places(schedule: Schedule) -> list[int]:
    """The tensor in which each receive arrives: y, or the next room."""
    rooms = count(_ROOMS)
    return [next(rooms) if index is None else _Y for _, index, _ in schedule.receives]


def _addend(term: int | Index, places: Sequence[int]) -> tuple[int, Index]:
    return (places[term], ()) if isinstance(term, int) else (_X, term)


class _Copy(NamedTuple):
    """A copy of a few bytes from one tensor to another by their addresses, through NumPy.

    Attributes:
        shape, word: extents in elements, and a NumPy dtype as wide as one.
        to, own: where the parts lie in y and in x: offset, strides, and a type as long as from first to last element.
        run: bytes, if both lie in one run; else 0.
    """

    shape: Shape
    word: np.dtype[Any]
    to: tuple[int, Shape, Any]
    own: tuple[int, Shape, Any]
    run: int

    @classmethod
    def of(cls, to: torch.Tensor, own: torch.Tensor) -> _Copy:
        run = to.nbytes if to.is_contiguous() and own.is_contiguous() else 0
        return cls(tuple(to.shape), np.dtype(_WORDS[to.element_size()]), _lie(to), _lie(own), run)

    @property
    def is_short(self) -> bool:
        return prod(self.shape) * self.word.itemsize <= _SHORT_COPY

    def execute(self, target: int, source: int) -> None:
        """Copy, given the addresses of both tensors."""
        if self.run:
            ctypes.memmove(target + self.to[0], source + self.own[0], self.run)
            return
        offset, strides, block = self.to
        to: NDArray[Any] = np.ndarray(self.shape, self.word, block.from_address(target + offset), 0, strides)
        offset, strides, block = self.own
        to[...] = np.ndarray(self.shape, self.word, block.from_address(source + offset), 0, strides)


def _lie(part: torch.Tensor) -> tuple[int, Shape, Any]:
    width = part.element_size()
    strides = tuple(stride * width for stride in part.stride())
    reach = width + sum((n - 1) * stride for n, stride in zip(part.shape, strides, strict=True))
    return int(part.storage_offset()) * width, strides, ctypes.c_char * reach


def _exchange_packed(comm: Communicator, traffic: Traffic, tensors: Sequence[torch.Tensor], tag: int) -> Pending:
    """The same messages, as one for each worker."""
    outgoing, incoming = map(by_worker, traffic.messages(tensors))
    rooms = [(worker, room(parts)) for worker, parts in incoming.items()]
    pending = comm.exchange([(worker, packed(parts)) for worker, parts in outgoing.items()], rooms, tag)

    def finish() -> None:
        pending.wait()
        for (_, arrived), parts in zip(rooms, incoming.values(), strict=True):
            unpack(arrived, parts)

    return Pending(finish)


def _play(comm: Communicator, pattern: Pattern, role: Role, x: torch.Tensor, y: torch.Tensor) -> Pending:
    group = role.group
    if pattern is Pattern.BROADCAST:
        pending = comm.broadcast(group, contiguous(x) if role.root else y)
        if role.root and role.member:
            y.copy_(x)
        return pending
    if pattern is Pattern.ALL_SUM:
        return comm.all_sum(group, contiguous(x), y)
    return comm.sum(group, contiguous(x) if role.member else None, y if role.root else None)
