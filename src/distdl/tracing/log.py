"""The log of one worker: slices of time by row and name, and the messages between workers."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distdl.transport.communicator import Communicator, Pending
from distdl.transport.recording import Call, Recording
from distdl.workers.attribution import Attribution, Owner

MODULES, OPERATORS, MESSAGES = "modules", "operators", "messages"
PACK, SEND, WAIT = "pack", "send", "wait"


class Slice(NamedTuple):
    """Something that a worker did from one moment to another.

    Attributes:
        row: ``modules``, ``operators`` or ``messages``.
        name: the path of a module, the operator, or ``pack``, ``send`` or ``wait``.
        begin, end: in seconds of the worker's clock.
        where: of messages, which layer or function it was for.
        nbytes: of messages: how many this worker sent.
    """

    row: str
    name: str
    begin: float
    end: float
    where: str = ""
    nbytes: int = 0


class Message(NamedTuple):
    """One end of a message between two workers.

    Attributes:
        sender, receiver: their numbers.
        number: how many messages of that size went from one to the other before: both ends count alike.
        nbytes: its size.
        moment: when it was sent, or when the wait for it ended; in seconds of the worker's clock.
        waited: at the receiver: for how many seconds the worker waited there, for all messages of the call.
        where: as of slices.
    """

    sender: int
    receiver: int
    number: int
    nbytes: int
    moment: float
    waited: float
    where: str


@dataclass
class Log:
    """What one worker has done.

    Attributes:
        worker: its number.
        begin, end: of the log, in seconds of this worker's clock.
        slices, sent, received: in the order in which they ended.
    """

    worker: int
    begin: float = 0.0
    end: float = 0.0
    slices: list[Slice] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)
    received: list[Message] = field(default_factory=list)

    def encoded(self) -> str:
        """A text, which can be sent."""
        return json.dumps(vars(self))

    @classmethod
    def decoded(cls, text: str) -> Log:
        """The log that has been encoded."""
        values, kinds = json.loads(text), {"slices": Slice, "sent": Message, "received": Message}
        found = cls(values["worker"], values["begin"], values["end"])
        for name, kind in kinds.items():
            setattr(found, name, [kind(*one) for one in values[name]])
        return found


class Operators(TorchDispatchMode):
    """Logs each operator of torch that this worker's thread calls, in forward and backward."""

    logs = True  # a compiled step is replayed beside it

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._slices = log.slices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._slices.append(Slice(OPERATORS, func.overloadpacket.__name__, begin, time.perf_counter()))
        return result


class Messages(Recording):
    """Passes all messages on, and logs them.

    Args:
        inner: what does the work.
        log: of this worker.
        attribution: knows the path of the module for which a message is; None if no model was given.
    """

    def __init__(self, inner: Communicator, log: Log, attribution: Attribution | None) -> None:
        super().__init__(inner, self._has_ended, self._has_begun)
        self._log, self._attribution = log, attribution
        self._since: float | None = None  # when the operator began whose messages come next
        self._open: dict[int, tuple[float, int]] = {}  # of each call: its begin, and how many messages are logged
        self._numbers: Counter[tuple[str, int, int]] = Counter()

    def operator_begins(self) -> None:
        """An operator begins: until its messages are sent, it packs them."""
        self._since = time.perf_counter()

    def _has_begun(self, call: Call) -> None:
        now = time.perf_counter()
        path = "" if self._attribution is None else self._attribution.path
        text = str(call.where)
        call.where = f"{path}: {text}" if path and not text.startswith(f"{path}: ") else text
        if self._since is not None:
            self._log.slices.append(Slice(MESSAGES, PACK, self._since, now, call.where))
            self._since = None
        self._open[id(call)] = now, 0

    def _timed(self, call: Call, pending: Pending) -> Pending:
        now, where = time.perf_counter(), str(call.where)
        self._log.slices.append(Slice(MESSAGES, SEND, self._open[id(call)][0], now, where, _sent(call)))
        self._send(call, self._open[id(call)][0])  # it may arrive before the call that sends it returns
        return super()._timed(call, pending)

    def _has_ended(self, call: Call) -> None:
        now, where = time.perf_counter(), str(call.where)
        begin = max(now - call.waited, self._open[id(call)][0])
        self._log.slices.append(Slice(MESSAGES, WAIT, begin, now, where, _sent(call)))
        self._send(call, begin)  # what the call has sent while it waited
        del self._open[id(call)]
        for worker, nbytes in call.receives:
            number = self._next("received", worker, nbytes)
            self._log.received.append(Message(worker, self.rank, number, nbytes, now, call.waited, where))

    def _send(self, call: Call, moment: float) -> None:
        begun, done = self._open[id(call)]
        self._open[id(call)] = begun, len(call.sends)
        for worker, nbytes in call.sends[done:]:
            number = self._next("sent", worker, nbytes)
            self._log.sent.append(Message(self.rank, worker, number, nbytes, moment, 0.0, str(call.where)))

    def _next(self, end: str, worker: int, nbytes: int) -> int:
        number = self._numbers[end, worker, nbytes]
        self._numbers[end, worker, nbytes] += 1
        return number


def _sent(call: Call) -> int:
    return sum(nbytes for _, nbytes in call.sends) or call.nbytes


class Modules:
    """Logs which module of a model computes when: forward and backward, without the modules inside it."""

    def __init__(self, model: torch.nn.Module, log: Log) -> None:
        paths = {module: path for path, module in model.named_modules()}
        self.attribution = Attribution(paths, self._called, Owner("", lambda seconds: self._left("")))
        self._log, self._since = log, time.perf_counter()

    def _called(self, module: torch.nn.Module, path: str) -> Owner:
        return Owner(path, lambda seconds: self._left(path or type(module).__name__))

    def _left(self, name: str) -> None:
        now = time.perf_counter()
        if name:
            self._log.slices.append(Slice(MODULES, name, self._since, now))
        self._since = now
