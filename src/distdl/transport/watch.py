"""Watch: who waits where, and whose failure was first, written into the store of a job for the others to read.

Only long waits and failures are written. The wait itself is timed by the transport, and never asks the store: whoever
keeps it may be stopped or out of reach. What a failing worker asks has a limit of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from distdl.transport.communicator import Communicator
from distdl.transport.stores import SilentError, described, within

_PATIENCE = 1.0  # seconds after which a waiting worker writes that it waits
_ANSWER = 1.5 * _PATIENCE  # seconds in which those that wait are sure to have written it
_MOMENT = 0.3  # seconds between a failure that closes connections and its first words
_LIMIT = 2 * _ANSWER + _MOMENT + 1  # seconds of all that a failing worker asks


class Watch:
    """What a worker writes into the store and reads there. All of its questions may fail without harm.

    Args:
        store: of the world, for all of its workers.
        rank: this worker.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._wait: tuple[float, Communicator] | None = None
        self._written: tuple[float, Communicator] | None = None
        self._bell = threading.Event()
        threading.Thread(target=self._look, name="distdl-watch", daemon=True).start()

    def begin(self, comm: Communicator) -> None:
        """This worker begins to wait."""
        self._wait = (time.monotonic(), comm)

    def end(self) -> None:
        """It waits no longer."""
        self._wait = None
        if self._written is not None:
            self._bell.set()

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
        if first != me:
            try:
                store.wait([f"told/{first}"], timedelta(seconds=_LIMIT - 1))
            except RuntimeError:  # it failed again, and for good
                return f"{tell({})}; worker {first} had failed before"
            return store.get(f"told/{first}").decode()
        text = tell(self._waiting(others, _ANSWER if late else 0))
        store.set(f"told/{me}", text)
        return text

    def _waiting(self, workers: Sequence[int], seconds: float) -> dict[int, str]:
        """Those of the workers that wait too, and where. They get some time to write it."""
        until = time.monotonic() + seconds
        while True:
            written = {w: self._store.get(f"waits/{w}").decode() for w in workers if self._store.check([f"waits/{w}"])}
            found = {worker: where for worker, where in written.items() if where}
            if len(found) == len(workers) or time.monotonic() >= until:
                return found
            time.sleep(_PATIENCE / 10)

    def _look(self) -> None:
        key = f"waits/{self._rank}"
        try:
            while True:
                self._bell.wait(_PATIENCE / 2)
                self._bell.clear()
                wait = self._wait
                if wait is not None and time.monotonic() - wait[0] >= _PATIENCE:
                    if wait is not self._written:
                        self._written = wait
                        self._store.set(key, wait[1].place)
                elif self._written is not None:
                    self._written = None
                    self._store.set(key, "")
        except RuntimeError:  # the store went away together with the worker that kept it
            return
