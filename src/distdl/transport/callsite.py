"""Where in a model this worker is, which errors, warnings and reports say."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

import torch

_PLACE = "_distdl_place"
_NOT_THE_USERS = ("distdl.", "torch.")  # modules of which no line is the place of a call
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


def users_call() -> tuple[FrameType, int]:
    """The call of the user's that has led here: its frame, and the stack level by which the caller warns of it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    return frame, level
