"""What workers that wait long ask and tell each other over MPI: where they wait, after which calls, and what failed.

Only a worker that waits looks for questions, so who answers waits, too. All messages are short, and are sent at once
whether or not anybody ever looks for them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence

from mpi4py import MPI

from distdl.transport.calls import Begun
from distdl.transport.communicator import CommunicationError, Communicator
from distdl.transport.whereabouts import Whereabouts, disorder

_ASK, _ANSWER, _ASK_CALLS, _CALLS, _FAILED = range(32774, 32779)  # beyond the tags of exchanges, and of leaving
_TOLD = 3000  # characters of a failure that the others are told: what MPI sends at once


class Questions:
    """The questions of a worker to the others of an MPI communicator, and its answers to theirs.

    Args:
        comm: of this worker.
        world: over all workers of it.
    """

    def __init__(self, comm: Communicator, world: MPI.Intracomm) -> None:
        self._comm = comm
        self._world = world
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._asked: set[int] = set()  # those that have yet to answer after which calls they wait
        self._next = 0.0  # the wait, in seconds, after which it asks the next time
        self._told = False

    def answer(self) -> None:
        """Answer the others."""
        for worker, _ in self._received(_ASK):
            self._send(self._comm.place.encode(), worker, _ANSWER)
        for worker, group in self._received(_ASK_CALLS):
            self._send(Whereabouts.of(self._comm, [tuple(json.loads(group))]).encode().encode(), worker, _CALLS)

    def waiting(self, asked: Sequence[int], seconds: float) -> dict[int, str]:
        """Those of the workers that wait too, and where: what they answer in so many seconds."""
        for worker in asked:
            self._send(b"", worker, _ASK)
        waiting: dict[int, str] = {}
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(waiting) < len(asked):
            self.answer()
            waiting |= {worker: text.decode() for worker, text in self._received(_ANSWER)}
            os.sched_yield()
        return waiting

    def compare(self, awaited: Sequence[int], waited: float, group: Sequence[int]) -> None:
        """Ask those whose messages this worker waits for after which calls they wait, now and then; read the answers.

        Args:
            waited: for how long, in seconds.
            group: in which this worker waits, where that is in no exchange.
        Raises: CommunicationError if one of them waits after other calls than this worker; or if any worker has failed.
        """
        comm = self._comm
        for _, text in self._received(_FAILED):
            self._told = True
            raise CommunicationError(
                f"worker {comm.rank} gave up in {comm.place}, after another worker had: {text.decode()}"
            )
        if isinstance(comm.where, Begun):
            group = comm.where.group
        elif comm.rank not in group:  # (messages of its own making)
            awaited = ()
        if waited >= self._next:
            self._next = 2 * waited
            for worker in set(awaited) - self._asked - {comm.rank}:
                self._asked.add(worker)
                self._send(json.dumps(tuple(group)).encode(), worker, _ASK_CALLS)
        for worker, message in self._received(_CALLS):
            self._asked.discard(worker)
            differs = disorder(comm, Whereabouts.decode(message))
            if differs:
                raise CommunicationError(differs)

    def begin(self) -> None:
        """This worker begins to wait long."""
        self._next = 0.0

    def tell(self, failure: CommunicationError) -> None:
        """Tell the others of a failure after which they would wait for this worker in vain."""
        if not self._told:
            self._told = True
            for worker in range(self._world.Get_size()):
                if worker != self._comm.rank:
                    self._send(str(failure)[:_TOLD].encode(), worker, _FAILED)

    def _send(self, message: bytes, worker: int, tag: int) -> None:
        self._sent = [(request, sent) for request, sent in self._sent if not request.Test()]
        self._sent.append((self._world.Isend(message, worker, tag), message))

    def _received(self, tag: int) -> Iterator[tuple[int, bytes]]:
        status = MPI.Status()
        while self._world.Iprobe(MPI.ANY_SOURCE, tag, status):
            message = bytearray(status.Get_count(MPI.BYTE))
            self._world.Recv(message, status.Get_source(), tag)
            yield status.Get_source(), bytes(message)
