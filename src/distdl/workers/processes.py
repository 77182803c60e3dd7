"""Running a function in processes that this one starts, joined by torch.distributed."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

import torch

from distdl import environment
from distdl.transport.communicator import CommunicationError, Communicator
from distdl.transport.job import Job, join
from distdl.transport.stores import LOOPBACK, connect, local_store
from distdl.transport.tracebacks import fold
from distdl.workers.launchers import end_with
from distdl.workers.termination import catching
from distdl.workers.worlds import enter

Result = TypeVar("Result")
_GRACE = 5.0  # seconds that the others get to end by themselves, once one worker has failed
_PATIENCE = 0.2  # seconds between two looks at processes that may have ended without a word


class WorkerTraceback(Exception):
    """The traceback of a failure in another process, as text: the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Report(NamedTuple):
    """How a worker ended: ``returned`` a result, ``called sys.exit``, or ``failed`` by an error."""

    how: str
    value: Any
    trace: str = ""


def run_processes(
    function: Callable[[], Result], workers: int, backend: str, opener: Callable[[], Communicator]
) -> list[Result]:
    """Start processes that find each other by a store, run ``function()`` in each as a worker, and return the results.

    None of them lives on when this has returned or raised, or when this process has ended.

    Args:
        function, opener: what each process runs, in the world of the communicator that ``opener()`` returns.
        workers: how many.
        backend: the name of the back-end whose opener it is.
    Raises: what the first worker to fail raised, caused by a :class:`WorkerTraceback`; ValueError if the function
        cannot be sent to another process; SystemExit if a worker called ``sys.exit``, or this process gets SIGTERM.
    """
    try:
        content = pickle.dumps((opener, function))
    except Exception as error:
        raise ValueError(
            f"the {backend} back-end runs its workers in processes and needs a function that they can import, defined "
            f"at the top of a module; got {function!r} and the opener {opener!r} ({error})"
        ) from error
    if _is_unreadable(content):
        raise ValueError(
            f"the {backend} back-end runs its workers in processes, which read the function from a file; got "
            f"{function!r}, and this program is in none (a notebook, an interactive session, python -c): define it in "
            f"a module, or run it on threads"
        )
    context = multiprocessing.get_context("spawn")
    store = local_store(environment.timeout())
    patience = environment.grace()
    processes: list[BaseProcess] = []
    reports: dict[Connection, int] = {}
    ends: dict[int, _Report] = {}
    with catching(_exit):
        try:
            for rank in range(workers):
                report, sender = context.Pipe(duplex=False)
                arguments = (content, rank, workers, store.port, backend, sender)
                # no daemon: a daemon could start no data loader
                process = context.Process(target=_work, args=arguments)
                process.start()
                sender.close()
                processes.append(process)
                reports[report] = rank
            _collect(processes, reports, ends)
            if not reports:
                _join(processes, _GRACE)
            patience = 1.0  # they had their time
        except BaseException:
            failed = _first_failure(ends)
            if failed is not None:  # the interruption must not hide what is known
                print(f"(in worker {failed})\n{ends[failed].trace}", file=sys.stderr, flush=True)
            raise
        finally:
            _end(processes, patience)
    return _results(ends, workers)


def _is_unreadable(content: bytes) -> bool:
    """Whether another process would look in vain for the file of this program, where what is pickled is defined."""
    program = sys.modules["__main__"]
    file = getattr(program, "__file__", None)
    return file == "<stdin>" or (file is None and program.__spec__ is None and b"__main__" in content)


def _collect(processes: Sequence[BaseProcess], reports: dict[Connection, int], ends: dict[int, _Report]) -> None:
    """Note how each worker ends, in the order in which they do. After a failure the others have some seconds."""
    deadline = float("inf")
    while reports and time.monotonic() < deadline:
        ended = [report for report, rank in reports.items() if processes[rank].exitcode is not None]
        for report in {*wait(list(reports), _PATIENCE), *ended}:
            assert isinstance(report, Connection)
            rank = reports.pop(report)
            ends[rank] = _read(report, rank, processes[rank])
            if ends[rank].how == "failed" and deadline == float("inf"):
                deadline = time.monotonic() + _GRACE


def _read(report: Connection, rank: int, process: BaseProcess) -> _Report:
    try:
        if report.poll():
            how, content, trace = report.recv()
            return _Report(how, pickle.loads(content), trace)
    except (EOFError, OSError):
        process.join(1.0)
    code = process.exitcode
    if code is not None and code < 0:
        return _Report("failed", RuntimeError(f"worker {rank} was ended by {signal.Signals(-code).name}"))
    return _Report("failed", RuntimeError(f"worker {rank} ended with exit code {code}"))


def _first_failure(ends: dict[int, _Report]) -> int | None:
    failures = [rank for rank, end in ends.items() if end.how == "failed"]
    # those that only lost the others tell nothing new, and one that had failed before has that error as its cause
    return min(failures, key=lambda rank: _tells_of_others(ends[rank].value), default=None)


def _tells_of_others(error: BaseException) -> int:
    return 0 if not isinstance(error, CommunicationError) else 1 if error.has_own_cause else 2


def _results(ends: dict[int, _Report], workers: int) -> list[Any]:
    first = _first_failure(ends)
    if first is not None:
        error = ends[first].value
        for rank, end in ends.items():  # in the order in which they ended
            if rank != first:
                how = f"raised {type(end.value).__name__}: {end.value}" if end.how == "failed" else end.how
                error.add_note(f"worker {rank} {how}")
        if isinstance(error, SystemExit):  # which ends a process without a traceback
            print(f"distdl: worker {first} called sys.exit({error.code!r})", file=sys.stderr, flush=True)
        raise error from WorkerTraceback(f"(in worker {first})\n{ends[first].trace}")
    for rank in range(workers):
        if ends[rank].how != "returned":
            raise ends[rank].value  # nobody waited for those that called sys.exit, so what they asked for can be done
    return [ends[rank].value for rank in range(workers)]


def _end(processes: Sequence[BaseProcess], patience: float) -> None:
    """End those that are alive: by SIGTERM, and by SIGKILL if they have not ended after so many seconds."""
    try:
        for process in processes:
            if process.is_alive():
                process.terminate()
        _join(processes, patience)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _join(processes: Sequence[BaseProcess], patience: float) -> None:
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))


def _exit(number: int, frame: object) -> None:
    """Let the workers be ended first."""
    raise SystemExit(128 + number)


def _work(content: bytes, rank: int, size: int, port: int, backend: str, reports: Connection) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    end_with(parent.pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers, Ctrl-C or not
    communicator, failure = None, None
    try:
        torch.set_num_threads(1)
        join(Job(rank, size, rank, connect(LOOPBACK, port, environment.timeout()), LOOPBACK))
        opener, function = pickle.loads(content)
        communicator = opener()
        enter(communicator, backend)
        report = _Report("returned", pickle.dumps(function()))
    except BaseException as error:
        left = isinstance(error, SystemExit) and not error.code
        how, failure = ("called sys.exit", None) if left else ("failed", error)
        fold(error)
        report = _Report(how, _pickled(error), traceback.format_exc())
    reports.send(tuple(report))
    reports.close()
    if communicator is not None:
        communicator.leave(failure)


def _pickled(error: BaseException) -> bytes:
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:
        content = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return content
