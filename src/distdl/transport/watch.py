"""Watch: who waits where, after which calls, and whose failure was first, in the store of a job for the others to read.

A worker that waits long for messages of another looks whether that one waits, too, after other calls, or whether
workers wait in a circle: then all of them wait in vain, and the watch ends their waits by an error. Only long waits and
failures are written. The wait itself is timed by the transport, and never asks the store: whoever keeps it may be
stopped or out of reach. What a failing worker asks has a limit of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from distdl.transport.communicator import Communicator, Group
from distdl.transport.stores import SilentError, described, within
from distdl.transport.whereabouts import NAMED, Circles, Whereabouts, disorder, told

_PATIENCE = 1.0  # seconds after which a waiting worker writes that it waits
_ANSWER = 1.5 * _PATIENCE  # seconds in which those that wait are sure to have written it
_MOMENT = 0.3  # seconds between a failure that closes connections and its first words
_TRIES = 3  # failures in a row, after which it looks no more
_LIMIT = 2 * _ANSWER + _MOMENT + 1  # seconds of all that a failing worker asks
_new = tuple.__new__  # the constructor of a NamedTuple takes twice as long


class _Wait(NamedTuple):
    """A wait: when it began, and whose messages it needs; nobody's if it is for a collective of the transport."""

    begun: float
    comm: Communicator
    awaited: Sequence[int]


class Watch:
    """What a worker writes into the store and reads there. All of its questions may fail without harm.

    Args:
        store: of the world, for all of its workers.
        rank: this worker.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._wait: _Wait | None = None
        self._written: _Wait | None = None
        self._next = 0.0
        self._circles = Circles()
        self._ended: Exception | None = None  # by what it does not look any more
        self._bell = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._look, name="distdl-watch", daemon=True)
        self._thread.start()

    def begin(self, comm: Communicator, awaited: Sequence[int]) -> None:
        """This worker begins to wait: for messages of those that are awaited, or in a collective."""
        self._wait = _new(_Wait, (time.monotonic(), comm, awaited))

    def end(self) -> None:
        """It waits no longer."""
        self._wait = None
        if self._written is not None:
            self._bell.set()

    def stop(self) -> None:
        """Look no more. (A thread that comes back from C++ while the interpreter ends aborts the process.)

        A thread to which the store does not answer is left behind.
        """
        self.dismiss()
        self._thread.join(_PATIENCE)

    def dismiss(self) -> None:
        """The same, without waiting until it has stopped."""
        self._stopped = True
        self._bell.set()

    def tell(self, text: str) -> None:
        """Tell the others why this worker fails, unless another one has failed before."""
        me = str(self._rank)
        if self._store.compare_set("failed", "", me).decode() == me:
            self._store.set(f"told/{me}", text)

    def first_failure(self, others: Sequence[int], late: bool, tell: Callable[[dict[int, str]], str]) -> str:
        """What the first worker to fail told, which may be this one.

        Args:
            others: the workers that it waited for.
            late: whether it waited too long; else it lost a connection, it may be to a worker that had waited too long.
            tell: called where this worker is the first, with the others that wait too, and where: what it tells.
        """
        try:
            return within(_LIMIT, lambda: self._ask(others, late, tell))
        except SilentError:
            silent = f"{described(self._store)} does not answer: the process that keeps it is stopped or out of reach"
            return f"{tell({})}; {silent}"
        except RuntimeError:
            return f"{tell({})}; {described(self._store)} has gone"

    def _ask(self, others: Sequence[int], late: bool, tell: Callable[[dict[int, str]], str]) -> str:
        store, me = self._store, str(self._rank)
        until = time.monotonic() + _MOMENT
        while not late and not store.check(["failed"]) and time.monotonic() < until:
            time.sleep(_MOMENT / 10)
        first = store.compare_set("failed", "", me).decode()
        if first != me or store.check([f"told/{me}"]):  # this worker's own watch may have told why
            try:
                store.wait([f"told/{first}"], timedelta(seconds=_LIMIT - 1))
            except RuntimeError:  # it failed again, and for good
                return f"{tell({})}; worker {first} had failed before"
            return store.get(f"told/{first}").decode()
        text = tell(self._waiting(others, _ANSWER if late else 0))
        if self._ended is not None:
            text = f"{text}; nobody looked for calls that differ, since that failed on this worker: {self._ended!r}"
        store.set(f"told/{me}", text)
        return text

    def _waiting(self, workers: Sequence[int], seconds: float) -> dict[int, str]:
        """Those of the workers that wait too, and where. They get some time to write it."""
        until = time.monotonic() + seconds
        while True:
            found = {worker: other.where for worker, other in self._whereabouts(workers).items()}
            if len(found) == len(workers) or time.monotonic() >= until:
                return found
            time.sleep(_PATIENCE / 10)

    def _whereabouts(self, workers: Sequence[int]) -> dict[int, Whereabouts]:
        """What those of the workers that wait have written."""
        keys = {worker: f"waits/{worker}" for worker in workers}
        written = {worker: self._store.get(key) for worker, key in keys.items() if self._store.check([key])}
        return {worker: Whereabouts.decode(message) for worker, message in written.items() if message}

    def _known(self, worker: int, group: Group) -> Whereabouts | None:
        """What a worker that waits has written, with its position in a group. (It has written of all that it knows.)"""
        found = self._whereabouts([worker]).get(worker)
        if found is None or group in found.positions:
            return found
        return found._replace(positions={**found.positions, group: (0, 0, 0)})

    def _look(self) -> None:
        key, failures = f"waits/{self._rank}", 0
        while not self._stopped:
            self._bell.wait(_PATIENCE / 2)
            self._bell.clear()
            try:
                self._look_once(key)
                failures = 0
            except Exception as error:
                # the worker may have changed what is read here, or the store may have gone
                failures += 1
                if failures == _TRIES:
                    self._ended = error
                    return

    def _look_once(self, key: str) -> None:
        wait = self._wait
        if wait is not None and time.monotonic() - wait.begun >= _PATIENCE:
            self._write(key, wait)
        elif self._written is not None:
            self._store.set(key, "")
            self._written = None

    def _write(self, key: str, wait: _Wait) -> None:
        """Write that this worker waits; if it has, compare its calls with those of the workers that it waits for."""
        waited = time.monotonic() - wait.begun
        if wait is not self._written:
            own = _own(wait)
            if wait is self._wait:  # else it has gone on meanwhile, and they may be of no moment
                self._store.set(key, own.encode())
                self._written, self._next = wait, waited
        elif wait.awaited and waited >= self._next:
            texts = [disorder(wait.comm, other) for other in self._whereabouts(wait.awaited).values()]
            circle, text = self._circles.look(wait.comm, _own(wait), self._known)
            self._next = waited + _PATIENCE if circle else 2 * waited
            wrong = next(filter(None, [*texts, text]), "")
            if wrong:
                wrong = told(wrong, self._waiting(range(min(wait.comm.size, NAMED)), _PATIENCE))
            if wrong and wait is self._wait:
                self.tell(wrong)
                wait.comm.interrupt()


def _own(wait: _Wait) -> Whereabouts:
    return Whereabouts.of(wait.comm, wait.comm.groups(), wait.begun, wait.awaited)
