"""The hub of a world of threads: who waits for whom, who has ended, and how.

All waiting goes through one lock and one wake-up per worker, so the hub knows at any moment who waits for what. When a
worker waits for one that has ended, or every worker that still runs is waiting, nothing can ever arrive: that is an
error at once, which names all the waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from distdl.transport.calls import cure, numbered
from distdl.transport.communicator import CommunicationError, Communicator, Group, IntArray, name_workers
from distdl.transport.whereabouts import HINT, wait_of


class _Meeting:
    """Members of a group that come together to combine a vector each."""

    __slots__ = ("arrived", "done", "highest")

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self.highest: IntArray | None = None
        self.done = False


class _Wait(NamedTuple):
    """A wait of one worker: its link, what ends it (asked with the lock held), and for whom it waits."""

    comm: Communicator
    ready: Callable[[], bool]
    awaited: Callable[[], Sequence[int]]


class Hub:
    """What the threads of one world share.

    Attributes:
        failure: what the first worker to fail raised; every wait of the others then ends.
        threads: the worker of each thread, by the thread's ident.
        cause: the worker that was elsewhere when none could go on, if the others were in one place.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        self._meetings: dict[Group, _Meeting] = {}
        self._bells = [threading.Lock() for _ in range(size)]  # released to wake a worker
        for bell in self._bells:
            bell.acquire()
        self._waits: dict[int, _Wait] = {}
        self._ended: dict[int, str] = {}
        self.threads: dict[int, int] = {}
        self.cause: int | None = None

    def join(self, worker: int, group: Group, values: IntArray) -> _Meeting:
        """Bring a vector to the meeting of a group; the last to arrive ends it. Hold the lock."""
        meeting = self._meetings.setdefault(group, _Meeting())
        meeting.arrived.add(worker)
        meeting.highest = values if meeting.highest is None else np.maximum(meeting.highest, values)
        if len(meeting.arrived) == len(group):
            meeting.done = True
            del self._meetings[group]
            for member in group:
                self.ring(member)
        return meeting

    def wait(self, comm: Communicator, ready: Callable[[], bool], awaited: Callable[[], Sequence[int]]) -> None:
        """Wait until ``ready()``. Whoever may have made it true rings; a worker is woken only if it is."""
        with self.lock:
            self._check_failure(comm)
            thread = threading.get_ident()
            if self.threads.get(thread, comm.rank) != comm.rank:
                self._refuse(comm, self.threads[thread], comm.place)
            if ready():
                return
            if thread not in self.threads:
                self._check_backward(comm)
            alone = comm.waiting is None
            if alone:
                self._waits[comm.rank] = _Wait(comm, ready, awaited)
                comm.waiting = thread, comm.where
                self._check_deadlock(comm)
        if not alone:
            comm.refuse_thread(comm.where)
        try:
            if not self._bells[comm.rank].acquire(timeout=comm.timeout):
                with self.lock:
                    if self._waits.pop(comm.rank, None) is not None:
                        error = comm.poison(comm.overdue(awaited()))
                        self._end(error)
                        raise error
                self._bells[comm.rank].acquire()  # it rang between the end of the time and the lock
            with self.lock:
                self._check_failure(comm)
        finally:
            comm.waiting = None

    def check_caller(self, comm: Communicator, call: object) -> None:
        """Raise if the thread that calls this belongs to another worker than the communicator."""
        caller = self.threads.get(threading.get_ident(), comm.rank)
        if caller != comm.rank:
            with self.lock:
                self._refuse(comm, caller, numbered(call))

    def _check_backward(self, comm: Communicator) -> None:
        """Raise in a backward on torch's thread of a device: the other workers' may stand in line behind this one."""
        foreign = isinstance(threading.current_thread(), threading._DummyThread)  # a thread that Python has not started
        if foreign and torch._C._current_graph_task_id() != -1:
            error = CommunicationError(
                f"{comm.place} is in a backward of worker {comm.rank} that runs on torch's own thread of the device, "
                f"where the backwards of all workers wait for each other: torch.inference_mode(False) switches to "
                f"that thread; call the backward in torch.autograd.set_multithreading_enabled(False)"
            )
            self._end(comm.poison(error))
            raise error

    def _refuse(self, comm: Communicator, caller: int, call: str) -> None:
        error = CommunicationError(
            f"worker {caller} called {call} of worker {comm.rank}: each worker builds its own layers and "
            f"partitions, and another worker's cannot be shared between their threads"
        )
        self._end(comm.poison(error))
        raise error

    def finish(self, worker: int, how: str) -> None:
        """Note that a worker has ended, and how: whoever waits for it now waits in vain."""
        with self.lock:
            self._ended[worker] = how
            if self.failure is None and self._is_stuck():
                self._end(self._deadlock())

    def fail(self, error: BaseException) -> None:
        """Note the first failure and wake everyone."""
        with self.lock:
            self._end(error)

    def ring(self, worker: int) -> None:
        """Wake a worker if what it waits for is there. Hold the lock."""
        wait = self._waits.get(worker)
        if wait is not None and wait.ready():
            del self._waits[worker]
            self._bells[worker].release()

    def _end(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        for worker in list(self._waits):
            del self._waits[worker]
            self._bells[worker].release()

    def _check_failure(self, comm: Communicator) -> None:
        if isinstance(self.failure, CommunicationError):
            raise comm.poison(CommunicationError(str(self.failure)))
        if self.failure is not None:
            how = f"another worker failed: {type(self.failure).__name__}: {self.failure}"
            text = f"worker {comm.rank} gave up in {comm.place}, after {how}"
            raise comm.poison(CommunicationError(text))

    def _check_deadlock(self, comm: Communicator) -> None:
        if self._is_stuck():
            error = comm.poison(self._deadlock())
            self._end(error)
            comm.waiting = None
            raise error

    def _is_stuck(self) -> bool:
        if not self._waits:
            return False
        return len(self._waits) + len(self._ended) == self.size or bool(self._ended and self._missed())

    def _missed(self) -> set[int]:
        """The workers that have ended and for which others wait."""
        return {worker for wait in self._waits.values() for worker in wait.awaited() if worker in self._ended}

    def _deadlock(self) -> CommunicationError:
        missed = self._missed()
        rule = (
            f"{name_workers(missed)} ended while others wait for it"
            if missed
            else f"every worker waits for another one, so none can go on ({HINT})"
        )
        waits: dict[str, list[int]] = {}
        called: dict[str, list[int]] = {}
        for worker, wait in sorted(self._waits.items()):
            waits.setdefault(f"in {wait.comm.place} for {name_workers(wait.awaited())}", []).append(worker)
            called.setdefault(wait.comm.site.called, []).append(worker)
        fewest, *others = sorted(called.values(), key=len)
        if others and len(fewest) < len(others[0]):
            self.cause = fewest[0]
        text = "; ".join(f"{wait_of(workers)} {where}" for where, workers in waits.items())
        ended = ", ".join(f"worker {worker} {how}" for worker, how in sorted(self._ended.items()))
        return CommunicationError(f"{rule}: {text}{f' ({ended})' if ended else ''}{cure(text)}")
