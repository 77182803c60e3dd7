"""How a worker tells the others that it has come to its end, so that nobody waits for it until the time limit.

At its end a worker meets all others, for a moment: mostly all of them end together, and then nothing needs to be said
(``MPI_Finalize`` waits for them, too). If they do not come, somebody may wait for this worker in vain, so it tells all
of them how many collective calls it has made in each group. One that waits looks whether such a message has come, and
knows by the count whether the call in which it waits is one that the other still made.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import weakref
from collections.abc import Iterable

from mpi4py import MPI

from distdl.transport.communicator import Calls, Group

_MEET, _LEFT = 32772, 32773  # beyond the tags of exchanges, as those of the communicator
_PATIENCE = 1.0  # seconds for which a worker that is through waits for the others to be through
_SETTLED = 0.5  # seconds after which all that a worker sent before it left has arrived


class Leaving:
    """Who has come to the end, of the workers of an MPI communicator."""

    def __init__(self, world: MPI.Intracomm) -> None:
        self._world = world
        self._calls: dict[Group, Calls] = {}
        self._left: dict[int, tuple[float, dict[Group, int]]] = {}
        self._said = world.Get_size() == 1
        _all.add(self)

    def calls(self, workers: Group) -> Calls:
        """The count of this worker's collective calls in a group (its workers in ascending order)."""
        return self._calls.setdefault(workers, Calls())

    def leave(self) -> None:
        """Say that this worker has come to its end, unless all others come to theirs within a moment."""
        if self._said or MPI.Is_finalized():
            return
        self._said = True
        if not self._meet():
            text = json.dumps([(group, calls.number) for group, calls in self._calls.items()]).encode()
            rank, size = self._world.Get_rank(), self._world.Get_size()
            sends = [self._world.Isend(text, worker, _LEFT) for worker in range(size) if worker != rank]
            _test(sends, time.monotonic() + _PATIENCE)

    def forget(self) -> None:
        """The communicator is given back: nobody waits in it any more."""
        self._said = True

    def look(self) -> bool:
        """Whether any worker has left, as far as this one has heard."""
        status = MPI.Status()
        while self._world.Iprobe(MPI.ANY_SOURCE, _LEFT, status):
            text = bytearray(status.Get_count(MPI.BYTE))
            self._world.Recv(text, status.Get_source(), _LEFT)
            counts = {tuple(group): number for group, number in json.loads(text)}
            self._left[status.Get_source()] = time.monotonic(), counts
        return bool(self._left)

    def among(self, workers: Iterable[int]) -> list[int]:
        """Those of the workers that have left, and from which nothing more will arrive."""
        return [w for w in workers if w in self._left and time.monotonic() - self._left[w][0] > _SETTLED]

    def before_last_call(self, workers: Group) -> list[int]:
        """Those of a group that have left without the last collective call that this worker has made in it."""
        number = self.calls(workers).number
        return [w for w in self.among(workers) if self._left[w][1].get(workers, 0) < number]

    def _meet(self) -> bool:
        """Whether all workers come to their end within a moment: in round k, a message to the one 2^k places on."""
        world, rank, size = self._world, self._world.Get_rank(), self._world.Get_size()
        until, distance = time.monotonic() + _PATIENCE, 1
        while distance < size:
            requests = [
                world.Irecv(bytearray(0), (rank - distance) % size, _MEET),
                world.Isend(b"", (rank + distance) % size, _MEET),
            ]
            if not _test(requests, until):
                requests[0].Cancel()
                requests[0].Wait()
                return False
            distance *= 2
        return True


def _test(requests: list[MPI.Request], until: float) -> bool:
    """Whether all requests are through by a moment of ``time.monotonic``."""
    while not MPI.Request.Testall(requests):
        if time.monotonic() > until:
            return False
        os.sched_yield()
    return True


_all: weakref.WeakSet[Leaving] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for leaving in list(_all):
        leaving.leave()
