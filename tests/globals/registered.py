"""Undoing ``distdl.register``, so that one test does not change what the next one sees."""

from __future__ import annotations

from typing import Any

from distdl.globals.tensor.table import TABLE


def unregister(function: Any) -> None:
    """Forget what was said of a function."""
    if not isinstance(function, type):
        TABLE.pop(function, None)
        return
    known: Any = function
    own = vars(function)["_apply_of_its_own"]
    if own is None:
        del known.apply
    else:
        known.apply = own
