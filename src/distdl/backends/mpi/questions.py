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

from distdl.transport.communicator import CommunicationError, Communicator, Group
from distdl.transport.whereabouts import NAMED, Circles, Whereabouts, disorder, told

_ASK, _ANSWER, _ASK_CALLS, _CALLS, _FAILED = range(32774, 32779)  # beyond the tags of exchanges, and of leaving
_MOMENT = 0.3  # seconds in which those that wait are sure to answer
_TOLD = 3000  # characters of a failure that the others are told: what MPI sends at once


class Questions:
    """The questions of a worker to the others of an MPI communicator, and its answers to theirs.

    Args:
        comm: of this worker.
        world: over all workers of it.
    Attributes:
        missing: the workers without which its wait cannot end, as far as that is known.
    """

    def __init__(self, comm: Communicator, world: MPI.Intracomm) -> None:
        self._comm = comm
        self._world = world
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._asked: set[tuple[int, Group]] = set()  # who has yet to answer after which calls of which group it waits
        self._answers: dict[tuple[int, Group], Whereabouts] = {}  # what they have answered since it began to ask anew
        self._circles = Circles()
        self._wait = 0  # how many long waits have begun
        self.missing: Sequence[int] = ()
        self._next = 0.0  # the wait, in seconds, after which it asks the next time
        self._told = False

    def answer(self) -> None:
        """Answer the others."""
        for worker, _ in self._received(_ASK):
            self._send(self._comm.place.encode(), worker, _ANSWER)
        for worker, group in self._received(_ASK_CALLS):
            self._send(self._own(tuple(json.loads(group))).encode().encode(), worker, _CALLS)

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
        Raises: CommunicationError if one of them waits after other calls than this worker, or workers wait in a circle;
            or if any worker has failed.
        """
        comm = self._comm
        for _, text in self._received(_FAILED):
            self._told = True
            raise CommunicationError(
                f"worker {comm.rank} gave up in {comm.place}, after another worker had: {text.decode()}"
            )
        group = tuple(getattr(comm.where, "group", group))
        if comm.rank not in group:  # messages of this worker's own
            awaited = ()
        if waited >= self._next:
            self._next = 2 * waited
            self._answers = {}
            for worker in set(awaited) - {comm.rank}:
                self._ask(worker, group)
        for worker, message in self._received(_CALLS):
            other = Whereabouts.decode(message)
            asked = next(iter(other.histories))
            self._asked.discard((worker, asked))
            self._answers[worker, asked] = other
            wrong = disorder(comm, other) or self._circle(group)
            if wrong:
                others = [worker for worker in range(min(comm.size, NAMED)) if worker != comm.rank]
                raise CommunicationError(told(wrong, self.waiting(others, _MOMENT)))

    def begin(self) -> None:
        """This worker begins to wait long."""
        self._next = 0.0
        self._wait += 1
        self.missing, self._answers = (), {}

    def _circle(self, group: Group) -> str:
        """What is wrong if workers wait in a circle; it asks those on whom that depends."""
        me = self._own(group)
        found, wrong = self._circles.look(self._comm, me, self._ask)
        # the circle has to show again in what the workers answer now
        if found:
            self._answers = {}
            self._circles.look(self._comm, me, self._ask)
        return wrong

    def _own(self, group: Group) -> Whereabouts:
        return Whereabouts.of(self._comm, [group], self._wait, self.missing)

    def _ask(self, worker: int, group: Group) -> Whereabouts | None:
        """What a worker has answered of its calls in a group; if nothing yet, it is asked."""
        key = worker, group
        if key not in self._answers and key not in self._asked:
            self._asked.add(key)
            self._send(json.dumps(group, default=int).encode(), worker, _ASK_CALLS)
        return self._answers.get(key)

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
