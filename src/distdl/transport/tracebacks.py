"""Tracebacks as users read them: without the frames of distdl, and without those of torch and Python beside them.

``DISTDL_DEBUG=1`` shows them all. What torch calls for the user, without us, stays.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any

from distdl import environment
from distdl.transport.callsite import is_librarys, is_ours

_COMMAND = str(Path(__file__).parents[1] / "__main__.py")
_HINT = "(DISTDL_DEBUG=1 shows the frames of distdl, too)"


def fold(error: BaseException) -> bool:
    """Leave frames of distdl out of the traceback of an error, and of those of its causes.

    A traceback that has only frames of distdl is kept as it is.

    Returns: whether frames were left out of the traceback of the error itself.
    """
    with suppress(Exception):  # a traceback that cannot be shortened is shown whole
        return not environment.debug() and _fold(error)
    return False


def _fold(error: BaseException) -> bool:
    kept, all_kept = _folded(error.__traceback__)
    if kept is not None:
        error.__traceback__ = kept
    known, causes = {id(error)}, [error.__cause__, error.__context__]
    while causes:
        cause = causes.pop()
        if cause is not None and id(cause) not in known:
            known.add(id(cause))
            cause.__traceback__, _ = _folded(cause.__traceback__)
            causes += [cause.__cause__, cause.__context__]
    return kept is not None and not all_kept


def _folded(trace: TracebackType | None) -> tuple[TracebackType | None, bool]:
    """A traceback without our frames; whether these are all of its frames."""
    runs: list[list[TracebackType]] = [[]]  # of frames of libraries, and between them single ones of others
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _COMMAND:
            runs = [[]]  # what has called ``distdl run`` is none of the user's
        if is_librarys(trace.tb_frame):
            runs[-1].append(trace)
        else:
            runs += [[trace], []]
        trace = trace.tb_next
    kept = [run for run in runs if not any(is_ours(one.tb_frame) for one in run)]
    for one in reversed([one for run in kept for one in run]):
        trace = TracebackType(trace, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return trace, len(kept) == len(runs)


def fold_uncaught() -> None:
    """From now on, :func:`fold` the errors of this process that nobody catches."""
    show: Any = sys.excepthook
    if getattr(show, "folds", False):
        return

    @wraps(show)  # keeps what other libraries have noted on the hook
    def shortened(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if fold(error):
            error.add_note(_HINT)
        show(kind, error, error.__traceback__)

    hook: Any = shortened
    hook.folds = True
    sys.excepthook = hook
