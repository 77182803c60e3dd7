"""The threads back-end: the workers are threads of one process, and tensors pass by reference.

A sender posts a reference; the receiver copies from it into its own tensor and marks the message as read. So a message
is copied once, whatever its strides, and the sender's ``wait`` returns when that copy has been made.

All waiting goes through one lock and one wake-up per worker, so the hub knows at any moment who waits for what. When a
worker waits for one that has ended, or every worker that still runs is waiting, nothing can ever arrive: that is an
error at once, which names all the waits.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from distdl.backends import Work, register
from distdl.transport.communicator import (
    CommunicationError,
    Communicator,
    Group,
    IntArray,
    Message,
    Pending,
    name_workers,
)

_GRACE = 5.0  # seconds that the others get to end, once one worker has failed, and again when the process ends


class _Letter:
    """A message on its way: a reference to the sender's tensor, and whether it has been read."""

    __slots__ = ("event", "read", "sender", "tensor")

    def __init__(self, sender: int, tensor: torch.Tensor) -> None:
        self.sender = sender
        self.tensor = tensor.detach()
        self.read = False
        self.event = _record(tensor)


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
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        self._inboxes: list[dict[tuple[int, int], deque[_Letter]]] = [defaultdict(deque) for _ in range(size)]
        self._meetings: dict[Group, _Meeting] = {}
        self._bells = [threading.Lock() for _ in range(size)]  # released to wake a worker
        for bell in self._bells:
            bell.acquire()
        self._waits: dict[int, _Wait] = {}
        self._ended: dict[int, str] = {}
        self.threads: dict[int, int] = {}

    def post(self, target: int, tag: int, letter: _Letter) -> None:
        """Put a letter into the target's inbox. Hold the lock."""
        self._inboxes[target][letter.sender, tag].append(letter)
        self._ring(target)

    def waiting(self, worker: int, sender: int, tag: int) -> int:
        """How many letters of a sender lie in the worker's inbox. Hold the lock."""
        return len(self._inboxes[worker].get((sender, tag), ()))

    def take(self, worker: int, sender: int, tag: int) -> _Letter:
        """Take the next letter of a sender out of the worker's inbox. Hold the lock."""
        letters = self._inboxes[worker][sender, tag]
        letter = letters.popleft()
        if not letters:
            del self._inboxes[worker][sender, tag]
        return letter

    def mark_read(self, letter: _Letter) -> None:
        """Tell the sender that its tensor has been read. Hold the lock."""
        letter.read = True
        self._ring(letter.sender)

    def join(self, worker: int, group: Group, values: IntArray) -> _Meeting:
        """Bring a vector to the meeting of a group; the last to arrive ends it. Hold the lock."""
        meeting = self._meetings.setdefault(group, _Meeting())
        meeting.arrived.add(worker)
        meeting.highest = values if meeting.highest is None else np.maximum(meeting.highest, values)
        if len(meeting.arrived) == len(group):
            meeting.done = True
            del self._meetings[group]
            for member in group:
                self._ring(member)
        return meeting

    def wait(self, comm: ThreadCommunicator, ready: Callable[[], bool], awaited: Callable[[], Sequence[int]]) -> None:
        """Wait until ``ready()``. Whoever may have made it true rings; a worker is woken only if it is."""
        with self.lock:
            self._check_failure(comm)
            caller = self.threads.get(threading.get_ident(), comm.rank)
            if caller != comm.rank:
                self._refuse(comm, caller)
            if ready():
                return
            self._waits[comm.rank] = _Wait(comm, ready, awaited)
            self._check_deadlock(comm)
        if not self._bells[comm.rank].acquire(timeout=comm.timeout):
            with self.lock:
                if self._waits.pop(comm.rank, None) is not None:
                    error = comm.poison(comm.overdue(awaited()))
                    self._end(error)
                    raise error
            self._bells[comm.rank].acquire()  # it rang between the end of the time and the lock
        with self.lock:
            self._check_failure(comm)

    def _refuse(self, comm: ThreadCommunicator, caller: int) -> None:
        error = CommunicationError(
            f"worker {caller} called {comm.place} of worker {comm.rank}: each worker builds its own layers and "
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

    def _ring(self, worker: int) -> None:
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

    def _check_failure(self, comm: ThreadCommunicator) -> None:
        if isinstance(self.failure, CommunicationError):
            raise comm.poison(CommunicationError(str(self.failure)))
        if self.failure is not None:
            text = f"another worker failed: {type(self.failure).__name__}: {self.failure}"
            raise comm.poison(CommunicationError(text))

    def _check_deadlock(self, comm: ThreadCommunicator) -> None:
        if self._is_stuck():
            error = comm.poison(self._deadlock())
            self._end(error)
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
            else "every worker waits for another one, so none can go on"
        )
        waits = "; ".join(
            f"worker {worker} waits in {wait.comm.place} for {name_workers(wait.awaited())}"
            for worker, wait in sorted(self._waits.items())
        )
        ended = ", ".join(f"worker {worker} {how}" for worker, how in sorted(self._ended.items()))
        return CommunicationError(f"{rule}: {waits}{f' ({ended})' if ended else ''}")


class ThreadCommunicator(Communicator):
    """A thread's link to the other threads of its world."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__()
        self.hub = hub
        self.rank = rank
        self.size = hub.size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        letters = [(target, _Letter(self.rank, tensor)) for target, tensor in sends]
        with self.hub.lock:
            for target, letter in letters:
                self.hub.post(target, tag, letter)

        def finish() -> None:
            # what has arrived is read at once, so that its sender can go on; then one wait for all the rest
            rest = self._read(receives, tag)
            if rest:
                self._await_all([source for source, _ in rest], tag)
                self._read(rest, tag)
            self.hub.wait(
                self,
                lambda: all(letter.read for _, letter in letters),
                lambda: [target for target, letter in letters if not letter.read],
            )
            for _, letter in letters:
                _await(letter.tensor, letter.event)

        return Pending(finish)

    def _await_all(self, sources: Sequence[int], tag: int) -> None:
        expected = Counter(sources)

        def missing() -> list[int]:
            return [source for source, n in expected.items() if self.hub.waiting(self.rank, source, tag) < n]

        self.hub.wait(self, lambda: not missing(), missing)

    def _read(self, receives: Sequence[Message], tag: int) -> list[Message]:
        """Read the letters that have arrived; return the receives for which there is none yet."""
        pairs, rest = [], []
        with self.hub.lock:
            for source, tensor in receives:
                if self.hub.waiting(self.rank, source, tag):
                    pairs.append((self.hub.take(self.rank, source, tag), tensor))
                else:
                    rest.append((source, tensor))
        for letter, tensor in pairs:
            self._copy(letter, tensor)
        with self.hub.lock:
            for letter, _ in pairs:
                self.hub.mark_read(letter)
        return rest

    def _copy(self, letter: _Letter, tensor: torch.Tensor) -> None:
        if letter.tensor.shape != tensor.shape or letter.tensor.dtype != tensor.dtype:
            error = CommunicationError(
                f"worker {self.rank} in {self.place} expects {list(tensor.shape)} {tensor.dtype} from worker "
                f"{letter.sender}, which sends {list(letter.tensor.shape)} {letter.tensor.dtype}"
            )
            self.hub.fail(self.poison(error))
            raise error
        _await(tensor, letter.event)
        with torch.no_grad():
            tensor.copy_(letter.tensor)
        letter.event = _record(tensor)

    def all_max(self, group: Group, values: IntArray) -> IntArray:
        with self.hub.lock:
            meeting = self.hub.join(self.rank, group, values)
        self.hub.wait(self, lambda: meeting.done, lambda: [w for w in group if w not in meeting.arrived])
        assert meeting.highest is not None
        return meeting.highest.copy()


def _record(tensor: torch.Tensor) -> torch.cuda.Event | None:
    # on CUDA, "written" and "read" are moments of a stream, which the other worker's stream has to wait for
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _await(tensor: torch.Tensor, event: torch.cuda.Event | None) -> None:
    if event is not None and tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).wait_event(event)
    elif event is not None:
        event.synchronize()


def _open() -> Communicator:
    raise RuntimeError(
        "the threads back-end exists inside distdl.run_workers(function, workers=4) and under "
        "'distdl run -n 4 SCRIPT'; the caller is in neither"
    )


def _start(work: Work, workers: int) -> list[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(work, workers)
    finally:
        torch.set_num_threads(threads)


def _run(work: Work, workers: int) -> list[Any]:
    hub = Hub(workers)
    results: dict[int, Any] = {}
    exits: dict[int, SystemExit] = {}

    def run(rank: int) -> None:
        hub.threads[threading.get_ident()] = rank
        try:
            with torch.autograd.set_multithreading_enabled(False):  # backward runs on this thread, CUDA's too
                results[rank] = work(ThreadCommunicator(hub, rank))
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                exits[rank] = error
                hub.finish(rank, "called sys.exit")
            else:
                error.add_note(f"(raised on worker {rank} of {workers})")
                if isinstance(error, SystemExit) and hub.failure is None:  # which ends a process without a traceback
                    print(f"distdl: worker {rank} called sys.exit({error.code!r})", file=sys.stderr, flush=True)
                hub.fail(error)
        else:
            hub.finish(rank, "returned")
        finally:
            del hub.threads[threading.get_ident()]  # which another thread may get

    running = [
        threading.Thread(target=run, args=(rank,), name=f"worker {rank}", daemon=True) for rank in range(workers)
    ]
    for thread in running:
        thread.start()
    try:
        for thread in running:
            while thread.is_alive() and hub.failure is None:
                thread.join(0.1)
    except BaseException as interruption:  # of the caller's thread: by the keyboard, or by a test's time limit
        hub.fail(interruption)
    if hub.failure is not None:
        _join(running)
        for thread in running:
            _stop(thread)
        raise hub.failure
    if exits:
        raise exits[min(exits)]  # nobody waited for those that called sys.exit, so what they asked for can be done
    return [results[rank] for rank in range(workers)]


class _Stopped(SystemExit):
    """Ends a worker that still computes when ``run_workers`` has raised."""


_stopped: list[threading.Thread] = []


def _stop(thread: threading.Thread) -> None:
    """Let a thread that is alive end at its next Python statement."""
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped))
        _stopped.append(thread)


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _GRACE
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


@atexit.register
def _await_stopped() -> None:
    """Before the interpreter ends: a thread that it finds in the midst of torch's code aborts the process."""
    _join(_stopped)
    computing = [thread.name for thread in _stopped if thread.is_alive()]
    if computing:
        sys.stdout.flush()
        print(f"distdl: {', '.join(computing)} still computes, though run_workers has failed", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


register("threads", _open, start=_start)
