"""Which world of workers the caller lives in, and opening it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch

from distdl import environment
from distdl.backends import find, names
from distdl.partition import Partition
from distdl.partition.arguments import Split, check_split
from distdl.transport.communicator import Communicator
from distdl.transport.job import TORCHRUN
from distdl.transport.tracebacks import fold_uncaught
from distdl.workers.launchers import serve_launcher

_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")


class _Here(threading.local):
    """What belongs to this thread: the communicator with which it was started as a worker, and the worlds it opened."""

    def __init__(self) -> None:
        self.communicator: Communicator | None = None
        self.backend = "threads"
        self.worlds: dict[Any, Partition] = {}


_here = _Here()
_process_worlds: dict[Any, Partition] = {}


def enter(communicator: Communicator, backend: str) -> None:
    """Make this thread a worker: ``world()`` is from now on the world of this communicator."""
    _check_opened(communicator, backend)
    _here.communicator = communicator
    _here.backend = backend
    _here.worlds = {}


@contextmanager
def inside(communicator: Communicator, backend: str) -> Iterator[None]:
    """Be a worker of this communicator's world for a while."""
    before = _here.communicator, _here.backend, _here.worlds
    enter(communicator, backend)
    try:
        yield
    finally:
        _here.communicator, _here.backend, _here.worlds = before


def launched() -> str | None:
    """The back-end of the job that this worker was started in; None if it was not started as one of several."""
    if _here.communicator is not None:
        return _here.backend
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return _torch_backend()
    if all(name in os.environ for name in TORCHRUN):
        return _torch_backend()
    return "mpi" if any(name in os.environ for name in _MPIRUN) else None


def world(backend: Any = None) -> Partition:
    """The partition of all workers of a world, unstructured. Every worker calls it; it is the same object every time.

    Args:
        backend: ``serial``, ``threads``, ``mpi``, ``gloo``, ``nccl``, or the name under which another back-end is
            registered; or a communicator of the user's: an mpi4py communicator or a torch.distributed process group,
            whose workers then are the world. None stands for the world in which the caller was launched: by
            ``run_workers``, by torchrun (``DISTDL_BACKEND``; by default NCCL if there is a GPU for each local worker,
            else gloo), by mpirun or srun (MPI); else serial.
    Raises: ValueError for an unknown name; RuntimeError, saying what is missing, if that back-end cannot work here.
    """
    name = (launched() or "serial") if backend is None else backend
    if isinstance(name, str) and not _is_entered(name):
        find(name)
    worlds = _here.worlds if name == "serial" or _is_entered(name) else _process_worlds
    key = name if isinstance(name, str) else _open_over(name)
    for known in (_here.worlds, _process_worlds):
        for ended in [each for each, P in list(known.items()) if not P.active or P.comm.released]:
            known.pop(ended, None)
    if key not in worlds:
        worlds[key] = Partition(_open(name, asked_for=backend is not None))
    return worlds[key]


def opened() -> Partition | None:
    """The world in which the caller was launched; None if opening it now would take messages."""
    name = launched() or "serial"
    return world() if _is_entered(name) or name in _process_worlds else None


def split_of(P: Split, name: str) -> Partition:
    """The partition that is meant by one, or by a shape: that of all workers of :func:`world` has this shape.

    Args:
        name: of the function that has got it, for errors.
    Raises: TypeError for anything else; ValueError for a shape of another number of workers.
    """
    if isinstance(P, Partition):
        return P
    check_split(name, "P", P)
    made: Partition = world().reshape(tuple(P))
    return made


def _is_entered(name: Any) -> bool:
    return _here.communicator is not None and isinstance(name, str) and name == _here.backend


def _torch_backend() -> str:
    chosen = environment.chosen_backend()
    if chosen:
        if not _is_of_processes(chosen):
            raise ValueError(
                f"DISTDL_BACKEND must be gloo or nccl in a job that torchrun launched, or another registered back-end "
                f"whose workers are processes (registered are {', '.join(names())}); it is {chosen!r}"
            )
        return chosen
    local = environment.whole("LOCAL_WORLD_SIZE", 1)
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= local else "gloo"


def _is_of_processes(name: str) -> bool:
    try:
        return find(name).start is None
    except ValueError:
        return False


def _open(name: Any, asked_for: bool) -> Communicator:
    if _is_entered(name) and _here.communicator is not None:
        return _here.communicator
    if not isinstance(name, str):
        return _open_over(name)
    if name != "serial":
        serve_launcher()
    communicator = find(name).opener()
    fold_uncaught()
    _check_opened(communicator, name)
    communicator.started_alone = name == "serial" and not asked_for
    return communicator


def _check_opened(communicator: Any, backend: str) -> None:
    """Check what a back-end's opener, which may be an author's, has returned.

    Raises: TypeError if it is no communicator, or one that was not made by ``Communicator.__init__``; ValueError if it
        has no number among its workers.
    """
    if not isinstance(communicator, Communicator) or "kept" not in vars(communicator):
        what = "one whose __init__ does not call super().__init__()"
        what = what if isinstance(communicator, Communicator) else f"a {type(communicator).__name__}"
        raise TypeError(f"the back-end {backend!r} has to return a distdl.transport.Communicator; it returned {what}")
    rank, size = getattr(communicator, "rank", None), getattr(communicator, "size", None)
    if not (isinstance(rank, Integral) and isinstance(size, Integral) and 0 <= int(rank) < int(size)):
        raise ValueError(
            f"the back-end {backend!r} has to return a communicator with a rank from 0 to size - 1; it returned one "
            f"with rank {rank} and size {size}"
        )


def _open_over(communicator: Any) -> Communicator:
    origin = type(communicator).__module__.partition(".")[0]
    if origin == "mpi4py":
        from distdl.backends.mpi.communicator import MPICommunicator

        return MPICommunicator.over(communicator)
    if isinstance(communicator, torch.distributed.ProcessGroup):
        from distdl.backends.torch_distributed import over

        return over(communicator)
    raise ValueError(
        f"a world is opened by the name of a back-end ({', '.join(names())}), an mpi4py communicator or a "
        f"torch.distributed process group; got {communicator!r}"
    )
