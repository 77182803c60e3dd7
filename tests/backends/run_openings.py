"""Jobs whose world cannot be opened in time, or whose store is stopped, for ``test_opening``: ``NAME FOLDER``."""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

import distdl
from distdl import CommunicationError


def note(folder, name, text):
    """Write a file that is whole as soon as it is there."""
    part = Path(folder, f"{name}.part")
    part.write_text(str(text))
    part.rename(Path(folder, name))


def in_step_and_then_wait(folder):
    """Worker 1 stays away from the second call; worker 0 notes the error that this is."""
    P = distdl.world()
    P.allgather_data(P.rank)
    note(folder, f"pid{P.rank}", os.getpid())
    while not Path(folder, "go").exists():
        time.sleep(0.05)
    if P.rank == 1:
        time.sleep(60)
    begun = time.monotonic()
    try:
        P.allgather_data(P.rank)
    except CommunicationError as error:
        note(folder, "error", f"{time.monotonic() - begun:.2f} {error}")


def stopped_store(folder):
    note(folder, "pid-store", os.getpid())
    distdl.run_workers(functools.partial(in_step_and_then_wait, folder), 2, "gloo")


def late_for_dup(folder):
    """Worker 1 has started MPI, and opens the world once the others have given up and named each other; they go on."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    while rank == 1 and not all(
        any(f"worker {2 - worker} waits" in file.read_text() for file in Path(folder).glob(f"error{worker}.?"))
        for worker in (0, 2)
    ):
        time.sleep(0.05)
    for attempt in range(30):
        begun = time.monotonic()
        try:
            P = distdl.world()
            break
        except CommunicationError as error:
            note(folder, f"error{rank}.{attempt}", f"{time.monotonic() - begun:.2f} {error}")
    assert P.allgather_data(P.rank) == [0, 1, 2]
    note(folder, f"opened{rank}", attempt)


def late_for_init(folder):
    """Worker 1 has not even started MPI."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        time.sleep(600)
    distdl.world()


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
