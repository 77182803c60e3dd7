"""Where in a model this worker is, which errors, warnings and reports say; and which values are blocks, not whole."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary


class _Here(threading.local):
    def __init__(self) -> None:
        self.models: list[torch.nn.Module] = []
        self.on_blocks = 0
        self.blocks = WeakIdKeyDictionary()  # those that a user has asked for
        self.asked = False  # whether for one in the latest forward


_here = _Here()
_PLACE = "_distdl_place"
_CALL = torch.nn.Module._call_impl.__code__


class Place(NamedTuple):
    """Where a module is.

    Attributes:
        path: in the model that was distributed.
        fallback: what is done in it about a function that has no op: "warn", "error" or "silent".
    """

    path: str = ""
    fallback: str = "warn"

    def of(self, name: str) -> Place:
        """That of a module in this one."""
        return Place(f"{self.path}.{name}" if self.path and name else self.path or name, self.fallback)


def put(module: torch.nn.Module, place: Place) -> None:
    """Note where a module is."""
    module.__dict__[_PLACE] = place


def current_place() -> Place:
    """Where the module is whose forward runs.

    It is looked up among the calls that are under way: modules that note when they begin and end would take longer in
    every step than those of which nobody asks.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL:
            place = frame.f_locals["self"].__dict__.get(_PLACE)
            if place is not None:
                found: Place = place
                return found
        frame = frame.f_back
    return Place()


def current_path() -> str:
    """The path of the module whose forward runs, in the model that was distributed; empty outside."""
    return current_place().path


@contextmanager
def running(model: torch.nn.Module) -> Iterator[bool]:
    """While the forward of a distributed model runs; gives whether it is the outermost."""
    if not _here.models:
        _here.asked = False
    _here.models.append(model)
    try:
        yield len(_here.models) == 1
    finally:
        _here.models.pop()


def is_running() -> bool:
    """Whether the forward of a distributed model runs."""
    return bool(_here.models)


@contextmanager
def on_blocks() -> Iterator[None]:
    """While a function of a user's runs on blocks: what it computes may be a block, also what follows from weights."""
    _here.on_blocks += 1
    try:
        yield
    finally:
        _here.on_blocks -= 1


def is_on_blocks() -> bool:
    """Whether one does."""
    return _here.on_blocks > 0


def note_block(block: torch.Tensor) -> None:
    """Take note of a block that code of a user's gets."""
    _here.blocks[block] = _here.asked = True


def may_be_block(value: object) -> bool:
    """Whether a value may be a block, so not the same on every worker: one that was asked for, or follows from one.

    What follows from one without gradients does not say so, so in a forward that asks for blocks any plain tensor may.
    """
    return type(value) is torch.Tensor and (_here.asked or value in _here.blocks)
