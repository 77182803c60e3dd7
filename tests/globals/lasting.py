"""A world of threads that lasts for many tests: what its workers have planned for one, they find again in the next."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import distdl


class LastingWorld:
    """Workers that wait for work. The first error ends them, and others begin anew with the next work."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._waiting: list[queue.SimpleQueue[Callable[[], None] | None]] | None = None
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work()`` on each worker, and wait until all have come to its end.

        Raises: what ``distdl.run_workers`` raises.
        """
        if self._waiting is None:
            self._start()
        assert self._waiting is not None
        for worker in self._waiting:
            worker.put(work)
        try:
            for _ in range(self._workers):
                error = self._ended.get()
                if error is not None:
                    raise error
        except BaseException:  # (a time limit of pytest's, too)
            self.close()
            raise

    def close(self) -> None:
        """Let the workers end."""
        for worker in self._waiting or ():
            worker.put(None)
        self._waiting = None

    def _start(self) -> None:
        waiting: list[queue.SimpleQueue[Callable[[], None] | None]]
        waiting = [queue.SimpleQueue() for _ in range(self._workers)]
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def main() -> None:
            P = distdl.world()
            while (work := waiting[P.rank].get()) is not None:
                try:
                    work()
                    P.allgather_data("through")
                except BaseException:
                    for worker in waiting:  # those that are through already wait for no work that could come
                        worker.put(None)
                    raise
                ended.put(None)

        def host() -> None:
            try:
                distdl.run_workers(main, self._workers, "threads")
            except BaseException as error:
                ended.put(error)

        self._waiting, self._ended = waiting, ended
        threading.Thread(target=host, name="host of a lasting world", daemon=True).start()
