"""Twenty runs by each of 2, 3 and 4 workers, some of which come late: ``python run_bits.py [BACKEND]``, or by mpirun.

Prints what each worker found; all runs have to leave the same bits.
"""

import json
import sys

from contract.bits import bits, late

import distdl

RUNS = 20


def runs():
    """The digests of each number of workers, which are those of all runs."""
    found = []
    for workers in (2, 3, 4):
        for run in range(RUNS):
            with late(seed=run):
                digests = bits(workers)
            if not run:
                found.append(digests)
            assert digests == found[-1], f"run {run} of {workers} workers leaves {digests}, the first {found[-1]}"
    return found


if __name__ == "__main__":
    found = distdl.run_workers(runs, 4, *sys.argv[1:])
    if distdl.world().rank == 0:
        print(json.dumps(found))
