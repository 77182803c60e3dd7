"""What MPI means for the process as a whole: what its library can do, and how the job ends."""

from __future__ import annotations

import ctypes
import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from mpi4py import MPI

from distdl import environment

_PATIENCE = 2.0  # seconds in which the first worker that failed has printed why


def is_cuda_aware() -> bool:
    """Whether MPI reads and writes CUDA memory; the environment variable ``DISTDL_CUDA_AWARE_MPI`` overrides it."""
    asked = environment.cuda_aware_mpi()
    if asked is not None:
        return asked
    try:
        return torch.cuda.is_available() and bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    except AttributeError:
        return False


def abort_on_uncaught_exceptions() -> None:
    """End the whole job when this process dies of an exception: the others would wait for it."""
    if getattr(sys.excepthook, "aborts", False):
        return
    show: Callable[..., Any] = sys.excepthook

    def abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if _is_first_to_fail():
            _print_at_once(_text(show, kind, error, trace))
        else:
            time.sleep(_PATIENCE)  # the first one prints, and ends the job
        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(1)

    hook: Any = abort
    hook.aborts = True
    sys.excepthook = hook


def _is_first_to_fail() -> bool:
    """Whether no other worker of the job has failed before on this machine, as a file in Open MPI's folder tells."""
    folder = os.environ.get("PMIX_SERVER_TMPDIR")
    if folder is None:
        return True
    try:
        name = f"distdl-failed-{os.environ.get('PMIX_NAMESPACE', '').replace('/', '-')}"
        os.close(os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _text(show: Callable[..., Any], kind: Any, error: Any, trace: Any) -> str:
    place = f"worker {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()} on {MPI.Get_processor_name()} failed:"
    text = io.StringIO()
    with redirect_stderr(text):
        show(kind, error, trace)
    return f"{place}\n{text.getvalue()}"


def _print_at_once(text: str) -> None:
    """Write all of it by as few calls as possible, so that little of other workers gets in between."""
    streams: tuple[Any, ...] = sys.stderr, sys.__stderr__
    # sys.stderr may be no file: a hook of torch.distributed collects there what other hooks print, to show it later
    for stream in streams:
        try:
            left = memoryview(text.encode())
            while left:
                left = left[os.write(stream.fileno(), left) :]
            return
        except (AttributeError, OSError, ValueError):  # it is no file
            continue
    print(text, file=sys.stderr, flush=True)
