"""torch's default generator, which all workers of a process share.

Its methods lock it while they hold the interpreter. If a tensor that they make sets off a garbage collection, which
Python 3.11 runs within such a call, the interpreter may pass to another thread; and if that one calls such a method, it
waits for the generator without giving the interpreter back, so that neither can ever go on. Here it waits for a lock of
Python's before, and gives it back. From 3.12 on, Python collects between calls only, and none of this is needed.
"""

from __future__ import annotations

import importlib
import os
import threading
from types import ModuleType
from typing import Any

import torch

_NAME = "default_generator"


class OneAtATime:
    """A generator, whose methods one thread may call at a time. (A signal's handler may do so within a call.)"""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._renew()
        # a process that is forked while another thread is in a call would find the generator locked for ever
        os.register_at_fork(before=self._acquire, after_in_parent=self._release, after_in_child=self._renew)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._generator, name)
        if not callable(found):
            return found

        def method(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                return found(*arguments, **options)

        return method

    def _acquire(self) -> None:
        self._lock.acquire()

    def _release(self) -> None:
        self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.RLock()


class _Random(ModuleType):
    """``torch.random``, whose functions find another generator than its users do, whatever those set and set back."""

    shared: OneAtATime

    @property
    def default_generator(self) -> Any:
        found = vars(self)[_NAME]
        return torch.default_generator if isinstance(found, OneAtATime) else found

    @default_generator.setter
    def default_generator(self, value: Any) -> None:
        vars(self)[_NAME] = self.shared if value is torch.default_generator else value

    def __reduce__(self) -> Any:
        # libraries that pickle modules know plain ones only, and import these by name, too
        return importlib.import_module, (self.__name__,)


def shared(torchs: Any) -> Any:
    """The generator that the functions of ``torch.random`` find, as checkpoints call them for its state.

    Args:
        torchs: what stands there now. One that a user has set stays.
    """
    if torchs is not torch.default_generator:
        return torchs
    _Random.shared = OneAtATime(torchs)
    return _Random.shared


def module_of(torchs: type[ModuleType]) -> type[ModuleType]:
    """The class of the module ``torch.random``; torch's own unless the generator is shared."""
    return _Random if isinstance(vars(torch.random)[_NAME], OneAtATime) else torchs
