"""Agreement: what the members of a primitive or a layer decide together before they plan.

A plan follows from the headers of all members and never from one worker's view, so that it cannot happen that some plan
anew and others do not. In the steady state this costs one maximum over a short vector of fixed length; only if that
says that something has changed on some worker do the headers themselves come together.

No check raises before the members have spoken: what is wrong on one of them is the same error on all of them.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.autograd import forward_ad

from distdl.boxes import Shape
from distdl.comm import CommunicationError, Communicator, Group, LongGroup
from distdl.encoding import dtype_code
from distdl.groups import IntArray
from distdl.header import Carried, Headers
from distdl.memory import kind_without_memory
from distdl.partition import Partition
from distdl.rows import bring_together
from distdl.sharing import gather_values

Outcome = TypeVar("Outcome")
Structure = tuple[tuple[tuple[torch.dtype, Shape], ...], tuple[int, ...]]

MOST_TENSORS = 4
_NUMBER = 5  # where in that vector the number of the exchange stands, and behind it its negative
WORDS = 9 + 3 * MOST_TENSORS  # length of the vector of every agreement, whatever the layer
_PLANS_KEPT = 8


class _Local(threading.local):
    fixed: int = 0  # how many fixed_shapes() this thread is in


_local = _Local()


class fixed_shapes(ContextDecorator):
    """Leave out the agreements: the caller promises that no worker's shapes, dtypes or requires_grad change inside.

    It holds for this thread, for the forwards made inside and their backward; it can be nested. The first call of a
    layer still agrees. A change raises RuntimeError on the worker that sees it; the others then end as for any failed
    worker. Messages between two workers still bear the number of the exchange and a mark of the layer, so that crossed
    calls of different layers wait instead of delivering to each other; collectives over a larger group bear neither.
    """

    def __enter__(self) -> None:
        _local.fixed += 1

    def __exit__(self, *error: object) -> None:
        _local.fixed -= 1


@dataclass(frozen=True)
class Decision(Generic[Outcome]):
    """What the members have decided.

    Attributes:
        outcome: what follows from the headers; the same object until a header changes.
        carried: for each tensor, what it carries on any member.
    """

    outcome: Outcome
    carried: tuple[Carried, ...]


@dataclass(frozen=True)
class _Agreed(Generic[Outcome]):
    """What one call came to, for the next one to be the same.

    Attributes:
        key: all that this worker brought; a call with an equal key brings the same.
        words: what this worker then says, and ``heard`` what it then hears, the number of the call apart.
    """

    key: object
    structure: Structure
    carried: tuple[Carried, ...]
    words: IntArray
    heard: IntArray
    decision: Decision[Outcome]


class Agreement(Generic[Outcome]):
    """How the members of one primitive or layer agree, call after call.

    Args:
        comm: their communicator.
        members: all workers that take part, the same tuple on each.
        name: the layer and its partitions, for messages to people.
        identity: bytes that are equal on all members and differ from layer to layer.
        options: the part of them that people read where nothing else differs; tuples are shown item by item.
        derive: what follows from the headers, a pure function. All members raise what it raises, so no check may depend
            on the worker.
        grid: a Cartesian partition of all members; a large group's headers come together along its axes.
        parts: for each tensor the partition whose headers ``derive`` looks up; all members if not given.
    """

    def __init__(
        self,
        comm: Communicator,
        members: Group,
        name: str,
        identity: bytes,
        derive: Callable[[Headers], Outcome],
        grid: Partition | None = None,
        parts: Sequence[Partition] = (),
        options: object = (),
    ) -> None:
        self._comm = comm
        self._members = members
        self._name = name
        self._identity = zlib.crc32(identity)
        self._options = options
        self._derive = derive
        self._grid = grid
        self._read = [comm.rank in part for part in parts] or [True] * MOST_TENSORS
        self._calls = comm.calls(members)
        self._agreed: dict[bool, _Agreed[Outcome]] = {}
        self._outcomes: dict[bytes, Outcome] = {}

    @classmethod
    def among(
        cls,
        team: Partition,
        name: str,
        options: object,
        derive: Callable[[Headers], Outcome],
        along: Sequence[Partition] = (),
        parts: Sequence[Partition] = (),
    ) -> Agreement[Outcome]:
        """The agreement of a team of workers, about a layer that is told from others by its name and options.

        Args:
            along: partitions along whose axes shapes may change; the first that has the whole team is the grid.
        """
        identity = repr((name, options)).encode() + team.workers.tobytes()
        grids = (P for P in (*along, team) if P.cartesian and P.workers.size == team.workers.size)
        members = LongGroup(team.workers.ravel().tolist())
        return cls(team.comm, members, name, identity, derive, next(grids, None), parts, options)

    def reach(self, tensors: Sequence[Any], extra: tuple[int, ...] = ()) -> Decision[Outcome]:
        """Agree on this call's tensors. Every member calls it, in the same order as its other calls.

        Args:
            tensors: this worker's tensors, at most four; None in place of one is an empty tensor.
            extra: more integers for the header, equally many on each member.
        Raises: the same error on every member: ValueError if an argument is no tensor or grad mode differs between
            members, CommunicationError if the members are in different calls, and what ``derive`` raises.
        """
        self._comm.where = self._name
        mode = torch.is_grad_enabled()
        agreed = self._agreed.get(mode)
        if agreed is None or agreed.key is None or agreed.key != _key(tensors, extra):
            return self._reach(mode, agreed, tensors, extra)
        if _local.fixed:
            return agreed.decision
        heard = self._speak(agreed.words)
        agreed.heard[_NUMBER], agreed.heard[_NUMBER + 1] = self._calls.number, -self._calls.number
        if heard.tobytes() == agreed.heard.tobytes():
            return agreed.decision
        return self._settle(mode, heard, agreed.structure, agreed.carried, agreed.key, agreed.words)

    def _reach(
        self, mode: bool, agreed: _Agreed[Outcome] | None, tensors: Sequence[Any], extra: tuple[int, ...]
    ) -> Decision[Outcome]:
        """The same, where this worker brings something else than before."""
        problem = _problem_of(tensors, self._name)
        present = () if problem else tuple(tensors)
        structure: Structure = (tuple((t.dtype, tuple(t.shape)) for t in present), extra)
        carried = tuple(Carried.by(tensor, mode) for tensor in present)
        if agreed is not None and _local.fixed:
            self._check_fixed(agreed, structure, carried, problem)
            return agreed.decision
        changed = agreed is None or agreed.structure != structure
        dims = max((len(shape) for _, shape in structure[0]), default=0)
        marks = [mark for one in carried for mark in one]
        words = np.zeros(WORDS, dtype=np.int64)
        said = [changed, dims, len(problem), mode, -mode, 0, 0, self._identity, -self._identity, *marks]
        words[: len(said)] = said
        key = None if problem else _key(tensors, extra)
        return self._settle(mode, self._speak(words), structure, carried, key, words, problem)

    def _speak(self, words: IntArray) -> IntArray:
        words[_NUMBER], words[_NUMBER + 1] = self._calls.number, -self._calls.number
        return self._comm.all_max(self._members, words)

    def _settle(
        self,
        mode: bool,
        heard: IntArray,
        structure: Structure,
        carried: tuple[Carried, ...],
        key: object,
        words: IntArray,
        problem: str = "",
    ) -> Decision[Outcome]:
        """Decide from what all members together have said."""
        changed, dims, *_ = heard.tolist()
        self._check_heard(heard.tolist(), mode, problem)
        agreed = self._agreed.get(mode)
        if changed or agreed is None:
            self._agreed.pop(mode, None)
            outcome = self._plan(structure, dims)
        else:
            outcome = agreed.decision.outcome
        marks = heard[WORDS - 3 * MOST_TENSORS :].astype(bool).reshape(-1, 3).tolist()
        decision = Decision(outcome, tuple(Carried(*marks[i]) for i in range(len(structure[0]))))
        words[0] = heard[0] = False  # the next call with this key changes nothing
        self._agreed[mode] = _Agreed(key, structure, carried, words, heard, decision)
        return decision

    def _check_heard(self, words: list[int], mode: bool, problem: str) -> None:
        number = self._calls.number
        if words[5] != -words[6] or words[7] != -words[8]:
            call = (f"{self._name} (exchange {number})", [repr(option) for option in _leaves(self._options)])
            calls = gather_values(self._comm, self._members, call)
            raise CommunicationError(f"workers make different calls together: {_show_calls(self._members, calls)}")
        if words[2]:
            problems = gather_values(self._comm, self._members, problem)
            raise ValueError("; ".join(f"worker {w}: {p}" for w, p in zip(self._members, problems, strict=True) if p))
        if words[3] != -words[4]:
            modes = gather_values(self._comm, self._members, "on" if mode else "off")
            raise ValueError(
                f"{self._name} needs grad mode to be the same on all workers; it is {_by_worker(self._members, modes)}"
            )

    def _plan(self, structure: Structure, dims: int) -> Outcome:
        row: list[int] = []
        read: list[bool] = []
        for (dtype, shape), looked_up in zip(structure[0], self._read, strict=False):
            row += [dtype_code(dtype), len(shape), *shape, *[-1] * (dims - len(shape))]
            read += [looked_up] * (2 + dims)
        mine, extra = np.array([*row, *structure[1]], dtype=np.int64), [True] * len(structure[1])
        rows = bring_together(self._comm, self._members, mine, np.array([*read, *extra], dtype=bool), self._grid)
        key = rows.key
        if key not in self._outcomes:
            with torch.inference_mode(False):  # the outcome serves calls that record gradients, too
                self._outcomes[key] = self._derive(Headers(self._members, rows, len(structure[0]), dims))
            if len(self._outcomes) > _PLANS_KEPT:
                self._outcomes.pop(next(iter(self._outcomes)))
        return self._outcomes[key]

    def _check_fixed(
        self, agreed: _Agreed[Outcome], structure: Structure, carried: tuple[Carried, ...], problem: str
    ) -> None:
        if problem or structure != agreed.structure or carried != agreed.carried:
            raise RuntimeError(
                f"{self._name} was promised fixed shapes; worker {self._comm.rank} had agreed on "
                f"{_show(agreed.structure, agreed.carried)} and now has {problem or _show(structure, carried)}"
            )


def _key(tensors: Sequence[Any], extra: tuple[int, ...]) -> object:
    """Equal keys mean that a worker brings the same. None if that is not clear at a glance."""
    if forward_ad._current_level >= 0:  # tangents are not to be seen so quickly
        return None
    try:
        if len(tensors) == 1:
            t = tensors[0]
            return extra, type(t), t.dtype, t.shape, t.requires_grad, t.layout, t.device
        return extra, [(type(t), t.dtype, t.shape, t.requires_grad, t.layout, t.device) for t in tensors]
    except (AttributeError, RuntimeError):  # not a tensor, or a nested one, which has no shape
        return None


def can_be_read(tensor: Any) -> bool:
    """Whether an agreement takes this for a tensor, so that a layer may read its elements before it agrees on it."""
    return not _problem_of((tensor,), "")


def _problem_of(tensors: Sequence[Any], name: str) -> str:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            return f"{name} needs a tensor; got {type(tensor).__name__}"
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
            return f"{name} needs a dense tensor that has data; got one that is {kind}"
        if kind := kind_without_memory(tensor):
            return f"{name} needs a tensor that has data of its own; got one that is {kind}"
        try:
            dtype_code(tensor.dtype)
        except ValueError as problem:
            return f"{name}: {problem}"
    return ""


def _show_calls(members: Group, calls: Sequence[tuple[str, list[str]]]) -> str:
    """The calls; or if these are all alike, the call and those of its options that differ."""
    names, options = zip(*calls, strict=True)
    differ = [values for values in zip(*options, strict=False) if len(set(values)) > 1]
    if len(set(names)) > 1 or not differ:
        return _by_worker(members, names)
    return f"{names[0]} has options that differ: {'; and '.join(_by_worker(members, values) for values in differ)}"


def _leaves(options: object) -> list[object]:
    return [leaf for one in options for leaf in _leaves(one)] if type(options) is tuple else [options]


def _by_worker(members: Group, texts: Sequence[str]) -> str:
    named: dict[str, list[int]] = {}
    for worker, text in zip(members, texts, strict=True):
        named.setdefault(text, []).append(worker)
    return "; ".join(f"{text} on {', '.join(map(str, sorted(workers)))}" for text, workers in named.items())


def _show(structure: Structure, carried: tuple[Carried, ...]) -> str:
    listed = [
        f"{list(shape)} {str(dtype).removeprefix('torch.')}"
        + "".join(f" with {name}" for name, mark in (("gradient", one.gradient), ("tangent", one.tangent)) if mark)
        for (dtype, shape), one in zip(structure[0], carried, strict=True)
    ]
    return ", ".join(listed)
