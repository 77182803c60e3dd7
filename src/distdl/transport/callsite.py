"""Where in the user's script and model a call stands, which errors, warnings and reports say.

Frames are read where an error or a warning is made, or a wait is long already: no call that goes on pays for it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

ORIGINS = "_distdl_origins"
"""The global name under which generated code has an :class:`Origin` for each of its lines, by their numbers."""

_PLACE = "_distdl_place"
_NOT_THE_USERS = ("distdl.", "torch.")  # modules of which no line is the place of a call
_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCHS, _PYTHONS = (str(Path(str(one.__file__)).parent) + os.sep for one in (torch, os))
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


class Origin(NamedTuple):
    """What a line of generated code repeats.

    Attributes:
        path: of the module in whose forward, or in the backward of whose forward it was.
        line: of the user's, as ``train.py:28``.
        call: what is called.
    """

    path: str
    line: str
    call: str

    @classmethod
    def of(cls, frame: FrameType, number: int) -> Origin | None:
        """That of a line of a frame; None if its code is not generated."""
        found: Origin | None = frame.f_globals.get(ORIGINS, {}).get(number)
        return found


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


class Site(NamedTuple):
    """Lines of the user's that have led to a call, as ``train.py:28``; empty where there is none.

    Attributes:
        line: the innermost one.
        path: of the module whose forward runs, in the model that was distributed.
        called: the innermost one outside of all modules.
    """

    line: str = ""
    path: str = ""
    called: str = ""

    @classmethod
    def of(cls, thread: int) -> Site:
        """That of the call in which a thread is just now."""
        with suppress(Exception):  # this runs while an error is made, which must not be lost
            return cls._of(sys._current_frames().get(thread))
        return cls()

    @classmethod
    def _of(cls, frame: FrameType | None) -> Site:
        line = path = called = ""
        while frame is not None:
            origin = Origin.of(frame, frame.f_lineno)
            if origin is not None:
                path, line, called = path or origin.path, line or origin.line, ""
            elif frame.f_code is _CALL:
                place: Place = frame.f_locals["self"].__dict__.get(_PLACE, Place())
                path, called = path or place.path, ""
            elif not is_librarys(frame) and not _is_installed(frame.f_code.co_filename):
                here = f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"
                line, called = line or here, called or here
            frame = frame.f_back
        return cls(line, path, called)

    def __str__(self) -> str:
        """`` at net.py:14 (module encoder.0, called at train.py:25)``, to be put behind what is called."""
        inside = [f"module {self.path}"] if self.path else []
        if self.called not in ("", self.line):
            inside.append(f"called at {self.called}")
        return (f" at {self.line}" if self.line else "") + (f" ({', '.join(inside)})" if inside else "")


def is_ours(frame: FrameType) -> bool:
    """Whether a frame is of a function of distdl."""
    return frame.f_code.co_filename.startswith(_OURS)


def is_librarys(frame: FrameType) -> bool:
    """Whether a frame is of a function of distdl, torch or Python's own library."""
    file = frame.f_code.co_filename
    return file.startswith((_OURS, _TORCHS, "<frozen ")) or (file.startswith(_PYTHONS) and not _is_installed(file))


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def _shown(file: str) -> str:
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
