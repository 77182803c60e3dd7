"""Bars on the terminal for what takes long."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Collection[Item], what: str, shows: bool = True) -> Iterable[Item]:
    """The items, with a bar on the terminal that says how many of them are done.

    The bar is tqdm's. It appears after a second, and goes away at the end. There is none where tqdm is not installed,
    or where standard error is not a terminal, or is closed.

    Args:
        items: what is gone through.
        what: stands before the bar, as ``distdl.load: blocks``.
        shows: whether this worker draws the bar. One worker of a world does.
    """
    if not shows or sys.stderr is None:  # a daemon may have none, and tqdm would write to it
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[Item] = tqdm(items, desc=what, delay=1, leave=False, disable=None)
    return bar
