"""Agreement: what the members of a primitive or a layer decide together before they plan.

A plan follows from the headers of all members and never from one worker's view, so either all plan anew or none does.
In the steady state this costs one maximum over a short vector of fixed length; only if that shows that something has
changed on some worker do the headers themselves come together.

No check raises before that exchange: what is wrong on one of the members is the same error on all of them.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.autograd import forward_ad

from distdl.agreement.header import Headers
from distdl.agreement.rows import Rows, bring_together
from distdl.environment.arguments import known
from distdl.geometry.boxes import Shape
from distdl.partition import Partition
from distdl.partition.groups import IntArray
from distdl.partition.meeting import (
    BROUGHT,
    CHANGED,
    FIELDS,
    LENGTH,
    MOST_TENSORS,
    Preamble,
    by_worker,
    different,
    gathered,
)
from distdl.tensors.derivatives import Derivatives
from distdl.tensors.dtypes import dtype_code
from distdl.tensors.function import TransformError
from distdl.tensors.memory import kind_without_memory
from distdl.transport.calls import Meeting
from distdl.transport.communicator import Communicator, Group, LongGroup
from distdl.transport.label import Label

Outcome = TypeVar("Outcome")
Structure = tuple[tuple[tuple[torch.dtype, Shape], ...], tuple[int, ...]]

_SETUPS_KEPT = 16
_COUNTED = MOST_TENSORS + 1  # more than there are tensors: what a number beside them counts in the preamble
_LARGEST = np.iinfo(np.int64).max
_bytes_of = struct.Struct("qq").pack  # of two int64


class _Local(threading.local):
    fixed: int = 0  # how many fixed_shapes() this thread is in


_local = _Local()


class fixed_shapes(ContextDecorator):
    """Leave out the agreements: the caller promises that no worker's shapes, dtypes or requires_grad change inside.

    It holds for this thread, for the forwards made inside and their backward; it can be nested. The first call of a
    layer still agrees. A change raises RuntimeError on the worker that sees it; the others then end as for any failed
    worker. Messages between two workers still carry a tag that follows from all exchanges so far, so that crossed calls
    wait instead of delivering to each other. MPI's and NCCL's own collectives carry none: if they crossed, the first
    agreement outside is an error.
    """

    def __enter__(self) -> None:
        _local.fixed += 1

    def __exit__(self, *error: object) -> None:
        _local.fixed -= 1


@dataclass(frozen=True)
class _Agreed(Generic[Outcome]):
    """What one call came to, for the next one to be the same.

    Attributes:
        key: all that this worker brought; a call with an equal key brings the same.
        sent, received: what this worker then sends; the bytes that it then receives, behind the history of exchanges.
        rows: what all members reported of their tensors.
        outcome: what follows from that; the same object until a header changes.
    """

    key: object
    structure: Structure
    derivatives: tuple[Derivatives, ...]
    sent: IntArray
    received: bytes
    rows: Rows
    outcome: Outcome


class Agreement(Generic[Outcome]):
    """How the members of one primitive or layer agree, call after call.

    Args:
        comm: their communicator.
        members: all workers that take part, the same tuple on each.
        label: the layer and its partitions, for messages to people.
        kind: bytes that are equal on all members; label and kind together tell the layer from all others.
        options: the part of them that people read where nothing else differs; tuples and dataclasses are shown item by
            item.
        derive: what follows from the headers, a pure function. All members raise what it raises, so no check may depend
            on the worker.
        grid: a Cartesian partition of all members; a large group's headers come together along its axes.
        read: for each tensor the partition whose headers ``derive`` looks up; all members if not given.
    Attributes:
        headers: what the members reported when something last changed; None before the first call.
    """

    def __init__(
        self,
        comm: Communicator,
        members: Group,
        label: Label,
        kind: bytes,
        derive: Callable[[Headers], Outcome],
        grid: Partition | None = None,
        read: Sequence[Partition] = (),
        options: object = (),
    ) -> None:
        self._comm = comm
        self._members = members
        self._label = label
        self._here = Meeting(members, label)
        self._kind = kind
        self._identity = _identity(label, kind)
        self._options = options
        self._derive = derive
        self._grid = grid
        self._read = [comm.rank in P for P in read] or [True] * MOST_TENSORS
        self._calls = comm.calls(members)
        self._agreed: dict[bool, _Agreed[Outcome]] = {}
        self._outcomes: dict[object, Outcome] = {}
        self.headers: Headers | None = None

    @classmethod
    def among(
        cls,
        P: Partition,
        label: Label,
        options: object,
        derive: Callable[[Headers], Outcome],
        along: Sequence[Partition] = (),
        read: Sequence[Partition] = (),
    ) -> Agreement[Outcome]:
        """The agreement of the workers of a partition about a layer, which its label and options tell from others.

        Args:
            along: partitions along whose axes shapes may change; the first that has all of the workers is the grid.
        """
        kind = repr(options).encode() + P.workers.tobytes()
        grids = (grid for grid in (*along, P) if grid.cartesian and grid.workers.size == P.workers.size)
        members = LongGroup(P.workers.ravel().tolist())
        return cls(P.comm, members, label, kind, derive, next(grids, None), read, options)

    def reach(self, tensors: Sequence[Any], extra: tuple[int, ...] = ()) -> Outcome:
        """Agree on this call's tensors. Every member calls it, in the same order as its other calls.

        Args:
            tensors: this worker's tensors, at most four, and as many on each member.
            extra: more integers for the header, equally many on each member.
        Returns: what follows from the headers.
        Raises: the same error on every member: ValueError if an argument is no tensor or no integer, or if grad mode or
            how many there are differs between members, CommunicationError if the members are in different calls, and
            what ``derive`` raises; TransformError inside a transform of ``torch.func``.
        """
        if torch._C._are_functorch_transforms_active():
            raise TransformError
        comm = self._comm
        if type(extra) is not tuple:  # a list could change its numbers and stay the same object
            extra = tuple(extra)
        if comm.waiting is not None:
            comm.refuse_thread(self._label)
        comm.where = self._here
        mode = torch.is_grad_enabled()
        agreed = self._agreed.get(mode)
        if agreed is None or agreed.key is None or agreed.key != _key(tensors, extra):
            return self._reach(mode, agreed, tensors, extra)
        if _local.fixed:
            return agreed.outcome
        received = self._exchange(agreed.sent)
        history = self._calls.history
        if received.tobytes() == _bytes_of(history, -history) + agreed.received:
            return agreed.outcome
        return self._settle(mode, received, agreed.structure, agreed.derivatives, agreed.key, agreed.sent)

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreement[Outcome]:
        """The agreement of a copied layer. It counts its calls together with the original, and decides anew: outcomes
        are made in the name of a layer, and the copy may get another path in its model.
        """
        twin = memo[id(self)] = copy(self)
        twin._label, twin._derive = deepcopy(self._label, memo), deepcopy(self._derive, memo)
        twin._here = Meeting(twin._members, twin._label)
        twin._identity = _identity(twin._label, twin._kind)
        twin._agreed, twin._outcomes = {}, {}
        return twin

    def _reach(
        self, mode: bool, agreed: _Agreed[Outcome] | None, tensors: Sequence[Any], extra: tuple[int, ...]
    ) -> Outcome:
        """The same, where this worker brings something else than before."""
        problem = _problem_of(tensors, str(self._label)) or _problem_beside(tensors, extra, str(self._label))
        present = () if problem else tuple(tensors)
        structure: Structure = (tuple((t.dtype, tuple(t.shape)) for t in present), extra)
        derivatives = tuple(Derivatives.of(tensor, mode) for tensor in present)
        if agreed is not None and _local.fixed:
            self._check_fixed(agreed, structure, derivatives, problem)
            return agreed.outcome
        brought = len(present) + _COUNTED * len(extra)
        message = Preamble(
            changed=agreed is None or agreed.structure != structure,
            dims=max((len(shape) for _, shape in structure[0]), default=0),
            problem=len(problem),
            mode=mode,
            mode_least=-mode,
            brought=brought,
            brought_least=-brought,
            identity=self._identity,
            identity_least=-self._identity,
        )
        sent = np.zeros(LENGTH, dtype=np.int64)
        flags = [flag for one in derivatives for flag in one]
        sent[: FIELDS + len(flags)] = [*message, *flags]
        key = None if problem else _key(tensors, extra)
        return self._settle(mode, self._exchange(sent), structure, derivatives, key, sent, problem)

    def _exchange(self, sent: IntArray) -> IntArray:
        comm, calls = self._comm, self._calls
        calls.agreed += 1
        sent[0], sent[1] = calls.history, -calls.history
        # ``comm.through`` without a call, as this runs in each forward
        return (comm.recorder or comm).all_max(self._members, sent)

    def _settle(
        self,
        mode: bool,
        received: IntArray,
        structure: Structure,
        derivatives: tuple[Derivatives, ...],
        key: object,
        sent: IntArray,
        problem: str = "",
    ) -> Outcome:
        """Decide from the maximum of what all members have sent."""
        message = Preamble(*received[:FIELDS].tolist())
        self._check(message, mode, int(sent[BROUGHT]), problem)
        agreed = self._agreed.pop(mode, None)
        together = received[FIELDS:].astype(bool).reshape(-1, 3).tolist()
        agreed_derivatives = tuple(Derivatives._make(together[i]) for i in range(len(structure[0])))
        rows = self._gather(structure, message.dims) if message.changed or agreed is None else agreed.rows
        outcome = self._outcome(rows, structure, message.dims, agreed_derivatives)
        sent[CHANGED] = received[CHANGED] = False  # the next call with this key changes nothing
        self._agreed[mode] = _Agreed(key, structure, derivatives, sent, received[2:].tobytes(), rows, outcome)
        return outcome

    def _check(self, message: Preamble, mode: bool, brought: int, problem: str) -> None:
        if not message.alike:
            call = self._label.numbered
            raise different(self._comm, self._members, message, call, self._options)
        if message.problem:
            problems = self._texts(problem)
            raise ValueError("; ".join(f"worker {w}: {p}" for w, p in zip(self._members, problems, strict=True) if p))
        if message.mode != -message.mode_least:
            modes = self._texts("on" if mode else "off")
            raise ValueError(
                f"{self._label} needs grad mode to be the same on all workers; it is {by_worker(self._members, modes)}"
            )
        if message.brought != -message.brought_least:
            texts = self._texts(_show_brought(brought))
            raise ValueError(
                f"{self._label} needs as many tensors on every worker, and as many numbers beside them; it got "
                f"{by_worker(self._members, texts)}"
            )

    def _texts(self, own: str) -> list[str]:
        return [one.decode() for one in gathered(self._comm, self._members, own.encode())]

    def _gather(self, structure: Structure, dims: int) -> Rows:
        """What all members report of their tensors."""
        row: list[int] = []
        read: list[bool] = []
        for (dtype, shape), looked_up in zip(structure[0], self._read, strict=False):
            row += [dtype_code(dtype), len(shape), *shape, *[-1] * (dims - len(shape))]
            read += [looked_up] * (2 + dims)
        mine, extra = np.array([*row, *structure[1]], dtype=np.int64), [True] * len(structure[1])
        return bring_together(self._comm, self._members, mine, np.array([*read, *extra], dtype=bool), self._grid)

    def _outcome(self, rows: Rows, structure: Structure, dims: int, derivatives: tuple[Derivatives, ...]) -> Outcome:
        own = tuple(shape for _, shape in structure[0])
        key = (rows.key, own, dims, derivatives)
        self.headers = headers = known(Headers, self._members, rows, len(own), dims, derivatives, own)
        if key not in self._outcomes:
            with torch.inference_mode(False):  # the outcome serves calls that record gradients, too
                self._outcomes[key] = self._derive(headers)
            if len(self._outcomes) > _SETUPS_KEPT:
                self._outcomes.pop(next(iter(self._outcomes)))
        return self._outcomes[key]

    def _check_fixed(
        self, agreed: _Agreed[Outcome], structure: Structure, derivatives: tuple[Derivatives, ...], problem: str
    ) -> None:
        if problem or structure != agreed.structure or derivatives != agreed.derivatives:
            raise RuntimeError(
                f"{self._label} was promised fixed shapes; worker {self._comm.rank} had agreed on "
                f"{_show(agreed.structure, agreed.derivatives)} and now has {problem or _show(structure, derivatives)}"
            )


def _identity(label: Label, kind: bytes) -> int:
    return zlib.crc32(repr(label.identity).encode() + kind)


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
            if not isinstance(tensor.layout, torch.layout):
                return f"{name} needs the tensors of blocks; got a {type(tensor).__name__}, so pass its to_local()"
            return f"{name} needs a dense tensor that has data; got one that is {kind}"
        if kind := kind_without_memory(tensor):
            return f"{name} needs a tensor that has data of its own; got one that is {kind}"
        try:
            dtype_code(tensor.dtype)
        except ValueError as problem:
            return f"{name}: {problem}"
    return ""


def _problem_beside(tensors: Sequence[Any], extra: tuple[Any, ...], name: str) -> str:
    if len(tensors) > MOST_TENSORS:
        return f"{name} needs at most {MOST_TENSORS} tensors to agree on; got {len(tensors)}"
    for number in extra:
        if not isinstance(number, (int, np.integer)) or not -_LARGEST <= number <= _LARGEST:
            return f"{name} needs integers of 64 bits beside its tensors; got {number!r}"
    return ""


def _show_brought(brought: int) -> str:
    numbers, tensors = divmod(brought, _COUNTED)
    return f"{tensors} tensor{'s' * (tensors != 1)}" + f" and {numbers} number{'s' * (numbers != 1)}" * (numbers > 0)


def _show(structure: Structure, derivatives: tuple[Derivatives, ...]) -> str:
    listed = [
        f"{list(shape)} {str(dtype).removeprefix('torch.')}"
        + "".join(f" with {name}" for name, flag in (("gradient", one.gradient), ("tangent", one.tangent)) if flag)
        for (dtype, shape), one in zip(structure[0], derivatives, strict=True)
    ]
    return ", ".join(listed)
