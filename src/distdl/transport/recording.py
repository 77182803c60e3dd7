"""Recording: a communicator that passes everything on to another one and reports each call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distdl.transport.communicator import Addressed, Communicator, Group, IntArray, Message, Pending, Prepared


@dataclass
class Call:
    """A call of a communicator.

    Attributes:
        operation: the name of the method; of a prepared exchange ``exchange``.
        workers: the other ends of the messages, sends first; of a collective its group.
        where: what the worker did, usually the label of a layer.
        nbytes: of a collective: bytes of the tensor that this worker gave or took.
        sends, receives: point-to-point messages, also those of which the back-end makes a collective: the worker at the
            other end, and bytes.
        waited: seconds spent in waits.
    """

    operation: str
    workers: Group
    where: object
    nbytes: int = 0
    sends: list[tuple[int, int]] = field(default_factory=list)
    receives: list[tuple[int, int]] = field(default_factory=list)
    waited: float = 0.0


class Recording(Communicator):
    """A communicator that passes everything on to another one.

    Args:
        inner: what does the work.
        ended: gets each call, once the wait for it has ended.
        begun: gets each call as it begins.
    """

    def __init__(
        self,
        inner: Communicator,
        ended: Callable[[Call], None] = lambda call: None,
        begun: Callable[[Call], None] = lambda call: None,
    ) -> None:
        super().__init__()
        self.inner, self._ended, self._begun = inner, ended, begun
        self.rank, self.size, self.absent = inner.rank, inner.size, inner.absent
        self._collective: Call | None = None  # the collective that is being made of messages

    @property
    def where(self) -> object:
        return self.inner.where

    @where.setter
    def where(self, where: object) -> None:
        self.inner.where = where

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        given, taken = ([(worker, tensor.nbytes) for worker, tensor in one] for one in (sends, receives))
        return self._exchange(given, taken, lambda: self.inner.exchange(sends, receives, tag))

    def prepare(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Prepared:
        return self.inner.prepare(sends, receives)

    def start(self, prepared: Prepared, tensors: Sequence[torch.Tensor], tag: int = 0) -> Pending:
        given, taken = ([(w, view.nbytes) for w, view in one] for one in (prepared.sends, prepared.receives))
        return self._exchange(given, taken, lambda: self.inner.start(prepared, tensors, tag))

    def broadcast(self, group: Group, tensor: torch.Tensor, tag: int = 0) -> Pending:
        return self._wait_for("broadcast", group, tensor.nbytes, lambda: self.inner.broadcast(group, tensor, tag))

    def sum(self, group: Group, x: torch.Tensor | None, y: torch.Tensor | None, tag: int = 0) -> Pending:
        tensor = x if x is not None else y
        nbytes = 0 if tensor is None else tensor.nbytes
        return self._wait_for("sum", group, nbytes, lambda: self.inner.sum(group, x, y, tag))

    def all_sum(self, group: Group, x: torch.Tensor, y: torch.Tensor, tag: int = 0) -> Pending:
        return self._wait_for("all_sum", group, x.nbytes, lambda: self.inner.all_sum(group, x, y, tag))

    def all_sum_by_messages(self, group: Group, x: torch.Tensor, y: torch.Tensor, tag: int, whole: bool) -> Pending:
        return self._wait_for(
            "all_sum", group, x.nbytes, lambda: self.inner.all_sum_by_messages(group, x, y, tag, whole)
        )

    def all_gather(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = self._return(
            "all_gather", group, tensor.nbytes, lambda: self.inner.all_gather(group, tensor)
        )
        return gathered

    def all_max(self, group: Group, values: IntArray) -> IntArray:
        highest: IntArray = self._return("all_max", group, values.nbytes, lambda: self.inner.all_max(group, values))
        return highest

    def _exchange(
        self, sends: list[tuple[int, int]], receives: list[tuple[int, int]], begin: Callable[[], Pending]
    ) -> Pending:
        if self._collective is not None:
            self._collective.sends += sends
            self._collective.receives += receives
            return begin()
        call = Call("exchange", tuple(worker for worker, _ in (*sends, *receives)), self.where, 0, sends, receives)
        self._begun(call)
        return self._timed(call, begin())

    def _wait_for(self, operation: str, group: Group, nbytes: int, begin: Callable[[], Pending]) -> Pending:
        if self._collective is not None:
            return begin()
        call = self._begin(operation, group, nbytes)
        return self._timed(call, self._inside(call, begin))

    def _return(self, operation: str, group: Group, nbytes: int, do: Callable[[], Any]) -> Any:
        if self._collective is not None:
            return do()
        call, begun = self._begin(operation, group, nbytes), time.perf_counter()
        result = self._inside(call, do)
        call.waited = time.perf_counter() - begun
        self._ended(call)
        return result

    def _begin(self, operation: str, group: Group, nbytes: int) -> Call:
        call = Call(operation, tuple(group), self.where, nbytes)
        self._begun(call)
        return call

    def _inside(self, call: Call, do: Callable[[], Any]) -> Any:
        self._collective = call
        try:
            return do()
        finally:
            self._collective = None

    def _timed(self, call: Call, pending: Pending) -> Pending:
        def finish() -> None:
            begun = time.perf_counter()
            self._inside(call, pending.wait)  # an all-sum in parts sends its second round here
            call.waited = time.perf_counter() - begun
            self._ended(call)

        return Pending(finish)
