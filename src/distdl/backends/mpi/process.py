"""What MPI means for the process as a whole: what its library can do, and how the job ends."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from mpi4py import MPI

from distdl import environment


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
        show(kind, error, trace)
        sys.stderr.flush()
        sys.stdout.flush()
        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(1)

    abort.aborts = True  # type: ignore[attr-defined]
    sys.excepthook = abort
