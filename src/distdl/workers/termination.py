"""A last checkpoint before the job ends: SIGTERM is what schedulers send first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from distdl.environment.arguments import checks_arguments
from distdl.workers.worlds import world

_caught: set[int] = set()  # the signals that only leave a mark
_asked = threading.Event()  # the mark
_DEAF = (signal.SIGKILL, signal.SIGSTOP)


@checks_arguments
def on_terminate(function: Callable[[], Any], signals: Sequence[int] = (signal.SIGTERM,)) -> Callable[[], None]:
    """Call a function on every worker, at the same step, when the job is asked to end: ``check = on_terminate(save)``.

    From now on such a signal does not end this process, but leaves a mark. Every worker calls ``check()`` once in a
    while, say after each step; it costs one small message to each other worker. When any of them has got a signal, all
    of them call ``function()``, wait for each other, and raise SystemExit with 128 plus the number of SIGTERM (143).
    The function may exchange messages: all workers are in it.

    Args:
        function: takes no arguments, for example ``lambda: distdl.save(path, network)``.
        signals: which ones ask the job to end.
    Raises: ValueError for a number that is no signal, or that of one that cannot be caught; RuntimeError where signals
        cannot be caught: in a thread that is neither the main one nor a worker of a ``run_workers`` that the main one
        has called. Such a worker can catch SIGTERM only.
    """
    wrong = [number for number in signals if number not in signal.valid_signals() or number in _DEAF]
    if wrong or not signals:
        raise ValueError(f"on_terminate needs signals that can be caught, at least one; got {list(signals)}")
    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in signals if signal.getsignal(number) is _mark]
    if not main and len(ours) < len(signals):
        raise RuntimeError(
            "Python catches signals in the main thread: on_terminate is called there, or by a worker of a run_workers "
            f"that was called there (and then for SIGTERM alone); this is the thread {threading.current_thread().name}"
        )
    for number in signals:
        if number not in ours:
            signal.signal(number, _mark)
    _caught.update(signals)

    def check() -> None:
        P = world()
        if P.allreduce_data(int(_asked.is_set()), "max"):
            function()
            P.allreduce_data(0, "max")  # a worker that ends earlier would end the others in their function
            raise SystemExit(128 + signal.SIGTERM)

    return check


@contextmanager
def catching(handler: Callable[[int, FrameType | None], None]) -> Iterator[bool]:
    """Let SIGTERM call the handler; not where the user has set one, nor in a thread that is not the main one.

    Yields: whether it does.
    """
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield ours
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def catching_for_threads() -> Iterator[None]:
    """Catch SIGTERM for workers that are threads, as these cannot; until one of them asks for it, it has its effect."""
    with catching(_mark) as caught:
        try:
            yield
        finally:
            if caught:
                _caught.clear()
                _asked.clear()


def _mark(number: int, frame: object) -> None:
    if number in _caught:
        _asked.set()
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
