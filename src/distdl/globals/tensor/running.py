"""What this worker runs: the forward of a distributed model, or a function on blocks. Types of tensors depend on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Running(threading.local):
    models = 0  # how many forwards of distributed models run, one in another
    on_blocks = 0  # how many functions on blocks run


_running = _Running()


@contextmanager
def running() -> Iterator[bool]:
    """A context in which the forward of a distributed model runs; gives whether it is the outermost one."""
    _running.models += 1
    try:
        yield _running.models == 1
    finally:
        _running.models -= 1


def is_running() -> bool:
    """Whether the forward of a distributed model runs."""
    return _running.models > 0


@contextmanager
def on_blocks() -> Iterator[None]:
    """A context in which a function runs that computes on blocks: weights and blocks are plain tensors there."""
    _running.on_blocks += 1
    try:
        yield
    finally:
        _running.on_blocks -= 1


def is_on_blocks() -> bool:
    """Whether a function runs that computes on blocks."""
    return _running.on_blocks > 0


def tells_blocks() -> bool:
    """Whether blocks have a type of their own here: in a distributed forward, outside of functions on blocks."""
    return _running.models > 0 and not _running.on_blocks
