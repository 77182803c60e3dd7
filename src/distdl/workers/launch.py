"""Running a function on several workers: as threads, as processes, or in the job that was launched already."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from distdl.backends import chosen, find
from distdl.partition.arguments import checks_arguments
from distdl.partition.sharing import gather_values
from distdl.tensors.failures import forget_failed
from distdl.transport.communicator import Communicator
from distdl.transport.tracebacks import fold_uncaught
from distdl.workers.processes import run_processes
from distdl.workers.termination import catching_for_threads
from distdl.workers.worlds import inside, launched, world

Result = TypeVar("Result")

_MOST = 10_000  # workers that one call starts: a machine has no use for more, and may not survive them


@checks_arguments
def run_workers(function: Callable[[], Result], workers: int = 4, backend: str | None = None) -> list[Result]:
    """Run ``function()`` on every worker of a world and return the list of results, on every worker that asks.

    Args:
        function: takes no arguments; finds its place in ``distdl.world()``.
        workers: how many.
        backend: ``threads``; ``gloo``, ``nccl`` or one of the user's own, which start processes and need a function
            that can be imported and results that can be pickled; ``serial`` for one worker. None runs it here if this
            is a worker of a launched job (mpirun, torchrun, ``distdl run``), and else on the back-end that
            ``DISTDL_BACKEND`` names, or on threads.
    Returns: the results in the order of the workers. In a launched job they are gathered, and must be numbers, strings,
        arrays, tensors, or tuples, lists or dicts of these.
    Raises: what a worker raised, with its traceback; ValueError if the launched job has another size, and for more than
        10,000 workers on one machine.
    """
    if workers < 1:
        raise ValueError(f"run_workers needs at least one worker; got {workers}")
    fold_uncaught()
    if backend is not None:
        find(backend)
    here = launched()
    if here is not None and backend in (None, here):
        return _run_here(function, workers, here)
    if workers > _MOST:
        raise ValueError(f"run_workers starts at most {_MOST} workers; got {workers}")
    name = backend or chosen()
    found = find(name)
    if found.check is not None:
        found.check()
    if found.start is None:
        return run_processes(function, workers, name, found.opener)

    def work(communicator: Communicator) -> Result:
        try:
            with inside(communicator, name):
                return function()
        finally:
            forget_failed()  # in the thread itself, before it ends

    with catching_for_threads():
        return found.start(work, workers)


def _run_here(function: Callable[[], Result], workers: int, backend: str) -> list[Result]:
    P = world(backend)
    if P.size != workers:
        raise ValueError(
            f"run_workers was asked for {workers} workers inside a job that was launched with {P.size} ({backend}); "
            f"launch it with {workers}, or ask for {P.size}"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = function()
        P.comm.where = where = "the end of run_workers, where the results of all workers are gathered"
        return gather_values(P.comm, tuple(range(P.size)), where, found)
    finally:
        torch.set_num_threads(threads)
