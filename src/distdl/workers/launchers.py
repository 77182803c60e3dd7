"""What a worker that is a process owes to the one that started it: to end with it, and to tell it of errors."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from distdl import environment
from distdl.transport.communicator import CommunicationError

_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # torchrun, Open MPI, MPICH
_PATIENCE = 0.5  # seconds between two looks at the parent
_PR_SET_PDEATHSIG = 1

_watching = False


def serve_launcher() -> None:
    """In a process that torchrun or mpirun has started: end when it ends, and tell torchrun of an uncaught error."""
    if any(variable in os.environ for variable in _LAUNCHERS):
        end_with(os.getppid())
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        _record_errors(os.environ["TORCHELASTIC_ERROR_FILE"])


def _remove_empty(file: Path) -> None:
    """Remove the temporary folders that torchrun made for a file, as far as they are empty: it leaves them there."""
    ours = [one for one in file.parents if any(two.name.startswith("torchelastic_") for two in (one, *one.parents))]
    with contextlib.suppress(OSError):  # there is an error in it, or the folder of another worker
        for folder in ours:
            folder.rmdir()


def end_with(parent: int) -> None:
    """Send this process SIGTERM, and after the grace period SIGKILL, when the parent of this number has ended.

    A process that is stopped at that moment goes on again (where there is ``prctl``), so that it can end.
    """
    global _watching
    if _watching:
        return
    _watching = True
    with contextlib.suppress(OSError, AttributeError):  # it is Linux's
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=_end_after, args=(parent, environment.grace()), name="distdl-parent", daemon=True).start()


def _end_after(parent: int, seconds: float) -> None:
    while os.getppid() == parent:
        time.sleep(_PATIENCE)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _record_errors(file: str) -> None:
    """Write an uncaught exception where torchrun looks for it when it reports which worker failed, and of what."""
    if getattr(sys.excepthook, "records", False):
        return
    show = sys.excepthook

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        # torchrun takes the earliest second for the cause: what only follows from another error is rounded up
        second = math.ceil(time.time()) if isinstance(error, CommunicationError) else int(time.time())
        stack = "".join(traceback.format_exception(kind, error, trace))
        text = {
            "message": f"{kind.__name__}: {error}",
            "extraInfo": {"py_callstack": stack, "timestamp": str(second)},
        }
        with contextlib.suppress(OSError), open(file, "w") as opened:
            json.dump({"message": text}, opened)

    hook: Any = record
    hook.records = True
    sys.excepthook = hook
    atexit.register(_remove_empty, Path(file))
