"""The threads back-end: the workers are threads of one process, and tensors pass by reference."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distdl.backends import Work, before_threads, register
from distdl.backends.threaded.communicator import Post, ThreadCommunicator
from distdl.backends.threaded.hub import Hub
from distdl.transport.communicator import CommunicationError, Communicator
from distdl.transport.tracebacks import fold

_GRACE = 5.0  # seconds that the others get to end, once one worker has failed, and again when the process ends


def _open() -> Communicator:
    raise RuntimeError(
        "the threads back-end exists inside distdl.run_workers(function, workers=4) and under "
        "'distdl run -n 4 SCRIPT'; the caller is in neither"
    )


def _start(work: Work, workers: int) -> list[Any]:
    for act in before_threads:
        act()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(work, workers)
    finally:
        torch.set_num_threads(threads)


def _run(work: Work, workers: int) -> list[Any]:
    hub, post = Hub(workers), Post()
    results: dict[int, Any] = {}
    exits: dict[int, SystemExit] = {}
    failures: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        hub.threads[threading.get_ident()] = rank
        try:
            with torch.autograd.set_multithreading_enabled(False):  # backward runs on this thread, CUDA's too
                results[rank] = work(ThreadCommunicator(hub, post, rank))
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                exits[rank] = error
                hub.finish(rank, "called sys.exit")
            else:
                error.add_note(f"(raised on worker {rank} of {workers})")
                if isinstance(error, SystemExit) and hub.failure is None:  # which ends a process without a traceback
                    print(f"distdl: worker {rank} called sys.exit({error.code!r})", file=sys.stderr, flush=True)
                fold(error)
                failures[rank] = error
                hub.fail(error)
        else:
            hub.finish(rank, "returned")
        finally:
            del hub.threads[threading.get_ident()]  # which another thread may get

    running = [_Worker(run, rank) for rank in range(workers)]
    for thread in running:
        thread.start()
    try:
        for thread in running:
            while not thread.over.wait(0.1) and hub.failure is None:
                pass
    except BaseException as interruption:  # of the caller's thread: by the keyboard, or by a test's time limit
        hub.fail(interruption)
    if hub.failure is not None:
        try:
            _join(running)
        finally:  # also after a second interruption
            for thread in running:
                _stop(thread)
        raise _telling(hub.failure, hub.cause, failures)
    _join(running)
    if exits:
        raise exits[min(exits)]  # nobody waited for those that called sys.exit, so what they asked for can be done
    return [results[rank] for rank in range(workers)]


class _Worker(threading.Thread):
    """The thread of a worker, which tells itself when its work is over.

    ``join`` and ``is_alive`` take a thread that still works for one that has ended once Ctrl-C has interrupted ``join``
    (before Python 3.13).
    """

    def __init__(self, run: Callable[[int], None], rank: int) -> None:
        super().__init__(target=run, args=(rank,), name=f"worker {rank}", daemon=True)
        self.over = threading.Event()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.over.set()


def _telling(first: BaseException, cause: int | None, failures: Mapping[int, BaseException]) -> BaseException:
    """The first failure; or if it only tells of another worker's error, what that worker raised, of which it is the
    cause, with the place in the user's code. Of workers that waited for each other, that of the worker which is the
    cause, if that is known.

    Of an import in all threads, one thread finds out that a package is missing, and Python tells the others only that
    they "cannot import name".
    """
    if isinstance(first, ImportError):
        return next((one for one in (first, *failures.values()) if isinstance(one, ModuleNotFoundError)), first)
    if not isinstance(first, CommunicationError) or first.has_own_cause:
        return first
    caused = [one for one in failures.values() if isinstance(one, CommunicationError) and one.has_own_cause]
    same = [one for rank, one in failures.items() if rank == cause and str(one) == str(first)]
    return [*caused, *same, first][0]


class _Stopped(SystemExit):
    """Ends a worker that still computes when ``run_workers`` has raised."""


_stopped: list[_Worker] = []


def _stop(thread: _Worker) -> None:
    """Let a thread that still works end at its next Python statement."""
    if not thread.over.is_set() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped))
        _stopped.append(thread)


def _join(threads: Sequence[_Worker]) -> None:
    deadline = time.monotonic() + _GRACE
    for thread in threads:
        if thread.over.wait(max(deadline - time.monotonic(), 0.0)):
            thread.join()  # waits for what the interpreter does at the end of a thread


@atexit.register
def _await_stopped() -> None:
    """Before the interpreter ends: a thread that it finds in the midst of torch's code aborts the process."""
    _join(_stopped)
    computing = [thread.name for thread in _stopped if not thread.over.is_set()]
    if computing:
        sys.stdout.flush()
        print(f"distdl: {', '.join(computing)} still computes, though run_workers has failed", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


register("threads", _open, start=_start)
