"""Published names of the MPI partitions. mpi4py is imported when one of them is used."""

from importlib import import_module
from typing import Any

_NAMES = {"Partition": "MPIPartition", "CartesianPartition": "MPICartesianPartition"}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("distdl.backends.mpi.partition"), _NAMES[name])
