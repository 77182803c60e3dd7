"""Where in a model this worker is: what errors, warnings and reports say of a call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Here(threading.local):
    def __init__(self) -> None:
        self.paths: list[str] = []
        self.fallback: list[str] = []
        self.models: list[torch.nn.Module] = []


_here = _Here()


def current_path() -> str:
    """The path of the module whose forward runs, in the model that was distributed; empty outside."""
    return _here.paths[-1] if _here.paths else ""


def current_fallback() -> str:
    """What is done about a function that has no op: "warn", "error" or "silent"."""
    return _here.fallback[-1] if _here.fallback else "warn"


@contextmanager
def running(model: torch.nn.Module) -> Iterator[bool]:
    """While the forward of a distributed model runs; gives whether it is the outermost."""
    _here.models.append(model)
    try:
        yield len(_here.models) == 1
    finally:
        _here.models.pop()


def is_buffer(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a buffer of a distributed model whose forward runs."""
    return any(buffer is tensor for model in _here.models for buffer in model.buffers())


class Entering:
    """A hook that notes that a module's forward begins. (An object, so that a model with hooks can be copied.)"""

    def __init__(self, path: str, fallback: str | None = None) -> None:
        self.path, self.fallback = path, fallback

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        _here.paths.append(self.path)
        if self.fallback is not None:
            _here.fallback.append(self.fallback)


class Leaving:
    """A hook that notes that a module's forward has ended, also by an error."""

    def __init__(self, path: str, fallback: str | None = None) -> None:
        self.path, self.fallback = path, fallback

    def __call__(self, module: torch.nn.Module, inputs: Any, result: Any) -> None:
        if _here.paths:
            _here.paths.pop()
        if self.fallback is not None and _here.fallback:
            _here.fallback.pop()
