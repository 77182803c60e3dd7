"""The limit of MPI's own start: importing mpi4py calls MPI_Init, which waits until every process of the job has come.

That wait holds Python's lock, so only another process can end it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from distdl import environment

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
# its input ends when the process that it watches has started, or has ended
_WATCH = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    print(sys.argv[3], file=sys.stderr, flush=True)
    os.kill(int(sys.argv[2]), signal.SIGKILL)
"""


@contextmanager
def limited_start() -> Iterator[None]:
    """Within, MPI may start. After the time limit (``DISTDL_TIMEOUT``) this process is killed, and an error printed."""
    if "mpi4py.MPI" in sys.modules:  # it has started
        yield
        return
    seconds = environment.timeout()
    command = [sys.executable, "-I", "-S", "-c", _WATCH, str(seconds), str(os.getpid()), _error(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE):  # which closes its input, and waits for its end
        yield


def _error(seconds: float) -> str:
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), None)
    who = "a worker" if rank is None else f"worker {rank}"
    return (
        f"distdl: {who} waited longer than {seconds:g} s (DISTDL_TIMEOUT) in MPI_Init for other processes of its job, "
        f"and ends. A process comes there by its first distdl.world() or `from mpi4py import MPI`; at least one has "
        f"not. (MPI cannot tell which before all have come.)"
    )
