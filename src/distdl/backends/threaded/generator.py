"""torch's default generator, which all workers of a process share.

Its methods lock it while they hold the interpreter. If a tensor that they make sets off a garbage collection, the
interpreter may pass to another thread; and if that one calls such a method, it waits for the generator without giving
the interpreter back, so that neither can ever go on. Here it waits for a lock of Python's before, and gives it back.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from types import ModuleType
from typing import Any

import torch


class _OneAtATime:
    """A generator, whose methods one thread may call at a time. (A signal's handler may do so within a call.)"""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._renew()
        # a process that is forked while another thread is in a call would find the generator locked for ever
        os.register_at_fork(before=self._acquire, after_in_parent=self._release, after_in_child=self._renew)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._generator, name)

        def method(*arguments: Any) -> Any:
            with self._lock:
                return found(*arguments)

        return method

    def _acquire(self) -> None:
        self._lock.acquire()

    def _release(self) -> None:
        self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.RLock()


class _Random(ModuleType):
    """``torch.random``, whose functions find another generator than its users do."""

    @property
    def default_generator(self) -> torch.Generator:
        return torch.default_generator


@cache
def share_generator() -> None:
    """Let threads call the functions of ``torch.random`` for the default generator, as checkpoints do for its state."""
    module: Any = torch.random
    module.default_generator = _OneAtATime(torch.default_generator)
    module.__class__ = _Random
