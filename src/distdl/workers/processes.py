"""Running a function in processes that this one starts, joined by torch.distributed."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from distdl import environment
from distdl.transport.communicator import CommunicationError, Communicator
from distdl.transport.job import Job, join
from distdl.transport.stores import LOOPBACK, connect, local_store
from distdl.workers.worlds import enter

Result = TypeVar("Result")
_GRACE = 5.0  # seconds that the others get to end, once one worker has failed


class WorkerTraceback(Exception):
    """The traceback of a failure in another process, as text: the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_processes(
    function: Callable[[], Result], workers: int, backend: str, opener: Callable[[], Communicator]
) -> list[Result]:
    """Start processes that find each other by a store, run ``function()`` in each as a worker, and return the results.

    Args:
        function, opener: what each process runs, in the world of the communicator that ``opener()`` returns.
        workers: how many.
        backend: the name of the back-end whose opener it is.
    Raises: what the first worker to fail raised, caused by a :class:`WorkerTraceback`; ValueError if the function
        cannot be sent to another process.
    """
    try:
        content = pickle.dumps((opener, function))
    except Exception as error:
        raise ValueError(
            f"the {backend} back-end runs its workers in processes and needs a function that they can import, defined "
            f"at the top of a module; got {function!r} and the opener {opener!r} ({error})"
        ) from error
    context = multiprocessing.get_context("spawn")
    store = local_store(environment.timeout())
    reports: Any = context.Queue()
    processes = [
        context.Process(target=_work, args=(content, rank, workers, store.port, backend, reports), daemon=True)
        for rank in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        results = _collect(processes, reports)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()
    return [results[rank] for rank in range(workers)]


def _collect(processes: Sequence[BaseProcess], reports: Any) -> dict[int, Any]:
    results: dict[int, Any] = {}
    failures: dict[int, tuple[BaseException, str]] = {}
    deadline = float("inf")
    while len(results) + len(failures) < len(processes) and time.monotonic() < deadline:
        try:
            rank, succeeded, content = reports.get(timeout=0.1)
        except queue.Empty:
            for rank, process in enumerate(processes):
                if process.exitcode is not None and rank not in results and rank not in failures and reports.empty():
                    failures[rank] = (RuntimeError(f"worker {rank} ended with exit code {process.exitcode}"), "")
        else:
            if succeeded:
                results[rank] = pickle.loads(content)
            else:
                failures[rank] = pickle.loads(content)
        if failures and deadline == float("inf"):
            deadline = time.monotonic() + _GRACE
    if failures:
        # those that only lost the others tell nothing new
        first = min(failures, key=lambda rank: isinstance(failures[rank][0], CommunicationError))
        error, trace = failures[first]
        raise error from WorkerTraceback(f"(in worker {first})\n{trace}")
    return results


def _work(content: bytes, rank: int, size: int, port: int, backend: str, reports: Any) -> None:
    try:
        torch.set_num_threads(1)
        join(Job(rank, size, rank, connect(LOOPBACK, port, environment.timeout()), LOOPBACK))
        opener, function = pickle.loads(content)
        enter(opener(), backend)
        report = (rank, True, pickle.dumps(function()))
    except BaseException as error:
        report = (rank, False, _pickled(error, traceback.format_exc()))
    reports.put(report)
    reports.close()
    reports.join_thread()


def _pickled(error: BaseException, trace: str) -> bytes:
    try:
        content = pickle.dumps((error, trace))
        pickle.loads(content)
    except Exception:
        content = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return content
