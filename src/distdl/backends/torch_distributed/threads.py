"""The threads by which gloo receives, beside the one that computes and sends.

While a worker sends, it holds a lock of the connection. If a message arrives meanwhile, gloo's thread finds the lock
taken and asks again at once, without a pause (``Pair::handleEvents`` of gloo/transport/tcp/pair.cc). On the worker's
own core it then keeps the worker from ever giving the lock back, until the system takes the core away: on Linux, 4 ms
later. A thread of the policy ``SCHED_BATCH`` takes no core from another one by waking up, so the worker is through
before its turn comes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = b"gloo_tcp_loop"  # that of each, in the system


@contextmanager
def in_their_turn() -> Iterator[None]:
    """Threads by which gloo receives, and that are started meanwhile, let others finish first. (On Linux.)"""
    before = receiving_threads()
    yield
    if sys.platform == "linux":
        for thread in receiving_threads() - before:
            with suppress(OSError):  # it has ended, or this is not allowed here
                if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def receiving_threads() -> set[int]:
    """The numbers, in the system, of all threads of this process by which gloo receives; none where it does not say."""
    threads: dict[int, Path] = {}
    with suppress(OSError):  # no more files may be opened
        threads = {int(path.name): path for path in Path("/proc/self/task").glob("*")}
    if threading.get_native_id() not in threads:  # these are the numbers of another namespace
        return set()
    found = set()
    for number, path in threads.items():
        with suppress(OSError):  # it has ended
            if (path / "comm").read_bytes().strip() == _NAME:
                found.add(number)
    return found
