"""A team of workers that stays alive for many cases, and what came of a case on each of them."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from partitions import WORKERS

import distdl
from distdl.backends.threaded import ThreadCommunicator
from distdl.partition import Partition
from distdl.transport.communicator import CommunicationError

_LIMIT = 120.0  # seconds for a case, on a busy machine; a wait that can never end is noticed at once, where it begins
_END = 2**31 - 7  # the tag of the messages by which workers tell each other that they are through with a case

Work = Callable[[Partition], Any]
_AT_THE_END = "at the end: "  # begins the text of a failure that came after the case itself


@dataclass(frozen=True)
class Failed:
    """What a worker raised."""

    kind: str
    text: str


class Team:
    """Workers that are threads. After each case they wait for each other, so one that hangs is noticed there."""

    def __init__(self) -> None:
        self._work: list[queue.SimpleQueue[tuple[Work, bool] | None]] = [queue.SimpleQueue() for _ in range(WORKERS)]
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._broken = False
        self._thread: threading.Thread | None = None

    def run(self, work: Work, in_step: bool = True) -> list[Any]:
        """What ``work(world)`` returned on each worker, or :class:`Failed`.

        Args:
            in_step: that workers end after different exchanges is a failure, too, unless they were told.
        Raises: AssertionError if a worker has not come to its end within the time limit, or messages are left over.
        """
        if self._thread is None or self._broken:
            self.close()
            self._start()
        for one in self._work:
            one.put((work, in_step))
        found: dict[int, Any] = {}
        try:
            while len(found) < WORKERS:
                rank, result = self._done.get(timeout=_LIMIT)
                found[rank] = result
                failure = failure_of(result)
                if failure is not None:
                    at_the_end = failure.text.startswith(_AT_THE_END)
                    self._broken = self._broken or at_the_end or failure.kind == "CommunicationError"
        except queue.Empty:
            self._broken, self._thread = True, None  # (it is a daemon; nothing more can be done about it)
            raise AssertionError(f"after {_LIMIT} s only {sorted(found)} have come to their end: {found}") from None
        told = failures(found.values())
        self._broken = self._broken or len(told) > 1 or not (in_step or told == {None})
        return [found[rank] for rank in range(WORKERS)]

    def close(self) -> None:
        if self._thread is not None:
            for one in self._work:
                one.put(None)
            self._thread.join(_LIMIT)
            self._thread = None

    def _start(self) -> None:
        self._work = [queue.SimpleQueue() for _ in range(WORKERS)]
        self._done = queue.SimpleQueue()
        self._broken = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        waiting, done = self._work, self._done

        def main() -> None:
            world = distdl.world()
            while (asked := waiting[world.rank].get()) is not None:
                done.put((world.rank, _result(*asked, world)))

        try:
            distdl.run_workers(main, WORKERS, "threads")
        except BaseException as error:
            self._broken = True
            for rank in range(WORKERS):
                done.put((rank, Failed("the team ended", str(error))))


def _result(work: Work, in_step: bool, world: Partition) -> Any:
    try:
        result = work(world)
    except Exception as error:
        result = Failed(type(error).__name__, str(error))
    failure = failure_of(result)
    if world.comm.failure is not None:  # this worker takes part no more; who has no part in what failed waits for it
        world.comm.interrupt(world.comm.failure)
    try:
        _end(world)
        if in_step:
            _assert_in_step(world)
    except Exception as error:  # somebody hangs, or has failed alone
        failed = Failed(type(error).__name__, f"{_AT_THE_END}{error}")
        if failure is None or not (isinstance(error, CommunicationError) or failure.kind == "CommunicationError"):
            return [*result, failed] if isinstance(result, list) else failed
    return result


def _end(world: Partition) -> None:
    """Come to the end of the case together, with nothing left over in any inbox."""
    comm = world.comm
    assert isinstance(comm, ThreadCommunicator)
    comm.where = "the end of the case"
    others = [worker for worker in range(WORKERS) if worker != world.rank]
    nothing = torch.zeros(1)
    for _ in range(2):  # the second time, nobody is left in front of the first
        comm.exchange([(w, nothing) for w in others], [(w, torch.zeros(1)) for w in others], _END).wait()
        posted = [*comm.post.sent.items(), *comm.post.wanted.items()]
        left = {key: len(ends) for key, ends in posted if key[1] == world.rank and key[2] != _END}
        assert not left, f"messages are left over, by sender, receiver and tag: {left}"


def _assert_in_step(world: Partition) -> None:
    """Check that the members of each group have made the same exchanges."""
    comm = world.comm
    histories = world.allgather_data([(group, comm.calls(group).history) for group in comm.groups()])
    for group in comm.groups():
        told = {dict(one).get(group) for worker, one in enumerate(histories) if worker in group}
        assert len(told) == 1, f"workers {group} have made different exchanges"


def failure_of(result: Any) -> Failed | None:
    """The failure in what a worker has returned; of several steps the last one that was done."""
    while type(result) in (tuple, list) and result:
        result = result[-1]
    return result if isinstance(result, Failed) else None


def failures(results: Iterable[Any]) -> set[Failed | None]:
    """The different failures of workers; None stands for those that have not failed."""
    return {failure_of(one) for one in results}


def quietly(function: Callable[[], Any]) -> Any:
    """Call a function without the warnings that torch and fallbacks give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()
