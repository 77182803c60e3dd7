"""Running a function on several workers: as threads, as processes, or in the job that was launched already."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from distdl.processes import run_processes
from distdl.worlds import BACKENDS, check_nccl, enter, inside, launched, world

Result = TypeVar("Result")
_GRACE = 5.0  # seconds that the others get to end, once one worker has failed


def run_workers(function: Callable[[], Result], workers: int = 4, backend: str | None = None) -> list[Result]:
    """Run ``function()`` on every worker of a world and return the list of results, on every worker that asks.

    Args:
        function: takes no arguments; finds its place in ``distdl.world()``.
        workers: how many.
        backend: ``threads``; ``gloo`` or ``nccl``, which start processes and need a function that can be imported and
            results that can be pickled; ``serial`` for one worker. None runs it here if this is a worker of a launched
            job (mpirun, torchrun, ``distdl run``), and else on threads.
    Returns: the results in the order of the workers. In a launched job they are gathered, and must be numbers, strings,
        arrays, tensors, or tuples, lists or dicts of these.
    Raises: what a worker raised, with its traceback; ValueError if the launched job has another size.
    """
    if workers < 1:
        raise ValueError(f"run_workers needs at least one worker; got {workers}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"the back-ends are {', '.join(BACKENDS)}; got {backend!r}")
    here = launched()
    if here is not None and backend in (None, here):
        return _run_here(function, workers, here)
    if backend == "serial":
        if workers != 1:
            raise ValueError(f"the serial back-end has one worker; run_workers was asked for {workers}")
        from distdl.backends.serial import SerialCommunicator

        with inside(SerialCommunicator(), "serial"):
            return [function()]
    if backend is not None:
        check_nccl(backend)
    if backend == "mpi":
        raise RuntimeError(f"the mpi back-end is launched from outside: mpirun -n {workers} python SCRIPT")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if backend in ("gloo", "nccl"):
            return run_processes(function, workers, backend)
        return _run_threads(function, workers)
    finally:
        torch.set_num_threads(threads)


def _run_here(function: Callable[[], Result], workers: int, backend: str) -> list[Result]:
    team = world(backend)
    if team.size != workers:
        raise ValueError(
            f"run_workers was asked for {workers} workers inside a job that was launched with {team.size} ({backend}); "
            f"launch it with {workers}, or ask for {team.size}"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return team.allgather_data(function())
    finally:
        torch.set_num_threads(threads)


def _run_threads(function: Callable[[], Result], workers: int) -> list[Result]:
    from distdl.backends.threaded import Hub, ThreadCommunicator

    hub = Hub(workers)
    results: dict[int, Result] = {}

    def work(rank: int) -> None:
        enter(ThreadCommunicator(hub, rank), "threads")
        try:
            with torch.autograd.set_multithreading_enabled(False):  # backward runs on this thread, CUDA's too
                results[rank] = function()
        except BaseException as error:
            hub.fail(error)
        else:
            hub.finish(rank)

    team = [threading.Thread(target=work, args=(rank,), name=f"worker {rank}", daemon=True) for rank in range(workers)]
    for thread in team:
        thread.start()
    try:
        for thread in team:
            while thread.is_alive() and hub.failure is None:
                thread.join(0.1)
    except BaseException as interruption:  # of the caller's thread: by the keyboard, or by a test's time limit
        hub.fail(interruption)
    if hub.failure is not None:
        deadline = time.monotonic() + _GRACE
        for thread in team:
            thread.join(max(deadline - time.monotonic(), 0.0))
        raise hub.failure
    return [results[rank] for rank in range(workers)]
