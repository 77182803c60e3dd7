"""Where a call of a step stands: the module in whose forward it is, or in its backward, and the user's line."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping
from functools import cache
from types import CodeType, FrameType

import torch

from distdl.transport.callsite import is_librarys

_CALL = torch.nn.Module._call_impl.__code__


class Places:
    """The places of the calls of one step.

    Args:
        paths: of modules, by their ids.
    """

    def __init__(self, paths: Mapping[int, str]) -> None:
        self._paths = paths
        self._librarys: dict[CodeType, bool] = {}
        # autograd numbers its nodes: those that a module makes lie between two numbers
        self._numbers: list[int] = []
        self._made: list[str] = []

    def here(self) -> tuple[str, str]:
        """Path and line of the call that is under way."""
        path, line, frame = "", "", sys._getframe(1)
        found: FrameType | None = frame
        while found is not None and not (path and line):
            code = found.f_code
            if code is _CALL:
                path = path or self._paths.get(id(found.f_locals["self"]), "")
            elif not line and not self._is_librarys(found):
                line = f"{_short(code.co_filename)}:{found.f_lineno}"
            found = found.f_back
        node = torch._C._current_autograd_node()
        if node is not None:
            return path or self._maker(node._sequence_nr() + 1), line
        number = torch.autograd._get_sequence_nr()
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._made.append(path)
        return path, line

    def _maker(self, number: int) -> str:
        """The path of the module that has made a node: that of the call that was recorded next.

        A node without a call is of the module around the next call's, if that had made the call before.
        """
        place = bisect_left(self._numbers, number)
        if place == len(self._made):
            return ""
        found, before = self._made[place], self._made[place - 1] if place else ""
        return before if self._numbers[place] != number and found.startswith(f"{before}.") else found

    def _is_librarys(self, frame: FrameType) -> bool:
        found = self._librarys.get(frame.f_code)
        if found is None:
            found = self._librarys[frame.f_code] = is_librarys(frame)
        return found


@cache
def _short(file: str) -> str:
    return file.rpartition("/")[2]
