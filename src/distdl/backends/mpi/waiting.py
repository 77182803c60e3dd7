"""Waits for MPI's requests. Each has a deadline, and an error of it says which workers have not come, and why."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from mpi4py import MPI

from distdl.backends.mpi.leaving import Leaving
from distdl.backends.mpi.questions import Questions
from distdl.transport.communicator import CommunicationError, Communicator, Group, name_workers
from distdl.transport.whereabouts import told

_SPINS = 20  # tests of a request before the processor is offered to others
_PATIENCE = 1.0  # seconds after which a waiting worker tells others that it waits
_NOTICED = 2.5  # seconds within which workers that wait in another call answer where they are


class Waits:
    """The waits of one worker.

    Args:
        comm: the worker's communicator. A wait that fails leaves it unusable.
        world: the MPI communicator through which waiting workers ask each other where they are.
    Attributes:
        leaving: which workers have come to their end.
    """

    def __init__(self, comm: Communicator, world: MPI.Intracomm) -> None:
        self._comm = comm
        self.leaving, self._questions = Leaving(world), Questions(comm, world)
        self._abandoned: list[object] = []

    def finish(
        self, requests: Sequence[MPI.Request], workers: Sequence[int], *memory: object, needs: Group | None = None
    ) -> None:
        """Wait until all requests are through with the memory. If that fails, the workers are out of step.

        Args:
            workers: the other end of each message; of one of MPI's own calls, the group.
            needs: None for messages. For one of MPI's own calls, the workers that have to come to it before this one
                can go on; empty if that is not known.
        """
        try:
            self.attempt(requests, workers, memory, needs)
        except CommunicationError as error:
            raise self._failed(error) from None
        except MPI.Exception as error:
            raise self.mismatch(error, workers) from error

    def mismatch(self, error: MPI.Exception, workers: Sequence[int]) -> CommunicationError:
        """The error of a message that is not what this worker expects: the others are in other calls."""
        rank = self._comm.rank
        waiting = self._questions.waiting(sorted(set(workers) - {rank}), _NOTICED)
        text = (
            f"worker {rank} got a message in {self._comm.place} that is not the one that it expects from "
            f"{name_workers(set(workers) - {rank})}, so these are in another call ({error.Get_error_string()})"
        )
        return self._failed(CommunicationError(told(text, waiting)))

    def _failed(self, error: CommunicationError) -> CommunicationError:
        """Note an error that leaves the workers out of step, and tell the others."""
        self._questions.tell(error)
        return self._comm.poison(error)

    def attempt(
        self, requests: Sequence[MPI.Request], workers: Sequence[int], memory: object, needs: Group | None = ()
    ) -> None:
        """Wait as :meth:`finish` does, but the workers stay in step if it fails."""
        done = requests[0].Test if len(requests) == 1 else partial(MPI.Request.Testall, requests)
        for _ in range(_SPINS):
            if done():
                return
        try:
            self._comm.begin_wait()
            self._wait(done, requests, workers, needs)
        except CommunicationError:
            self._abandoned.append((requests, memory))  # MPI may still write to it
            raise
        finally:
            self._comm.waiting = None

    def _wait(
        self, done: Callable[[], bool], requests: Sequence[MPI.Request], workers: Sequence[int], needs: Group | None
    ) -> None:
        comm, begun = self._comm, time.monotonic()
        before = comm.failure
        self._questions.begin()
        while not done():
            os.sched_yield()
            if comm.failure is not before:
                raise CommunicationError(str(comm.failure))  # found by another thread
            waited = time.monotonic() - begun
            if waited > _PATIENCE:
                self._questions.missing = _unfinished(requests, workers) if needs is None else needs
                self._questions.answer()
                self._questions.compare(workers if needs is None else self._next(workers), waited, workers)
                self._check_left(requests, workers, needs is None)
            late = waited > comm.timeout and (_unfinished(requests, workers) if needs is None else workers)
            if late:
                raise self._overdue(late)

    def _next(self, group: Sequence[int]) -> Sequence[int]:
        """Whom of a group this worker asks in MPI's own calls: the next one. If any two differ, so do neighbours."""
        if self._comm.rank not in group:
            return ()
        return (group[(group.index(self._comm.rank) + 1) % len(group)],)

    def _check_left(self, requests: Sequence[MPI.Request], workers: Sequence[int], are_messages: bool) -> None:
        """Raise if the requests can never be through, because a worker that they need has come to its end."""
        if not self.leaving.look():
            return
        if are_messages:
            gone = self.leaving.among(_unfinished(requests, workers))
        else:  # a group, whose members call together
            gone = self.leaving.before_last_call(tuple(sorted(workers)))
        if gone:
            text = (
                f"worker {self._comm.rank} waits in {self._comm.place} for {name_workers(gone)}, which had come to the "
                "end of the program (or called sys.exit)"
            )
            raise CommunicationError(told(text, {}))

    def _overdue(self, workers: Iterable[int]) -> CommunicationError:
        """The error of a wait that took too long. Workers that wait too answer within a moment; the rest are absent."""
        asked = sorted(set(workers) - {self._comm.rank})
        waiting = self._questions.waiting(asked, _PATIENCE)
        error = self._comm.overdue([worker for worker in asked if worker not in waiting] or asked)
        return CommunicationError(told(str(error), waiting, apart=False))


def _unfinished(requests: Sequence[MPI.Request], workers: Sequence[int]) -> Sequence[int]:
    """The workers of messages that are not through."""
    return [worker for worker, request in zip(workers, requests, strict=True) if not request.Test()]
