"""What is tested on the back-ends whose workers are processes, all in one job, for starting one is what costs.

``python run_suites.py FOLDER`` under mpirun; or ``python run_suites.py FOLDER gloo``, which starts the processes. The
contract comes first, then the properties of the layers, then a few models. Each writes down what each worker found.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from pathlib import Path

import properties
import run_models
from contract import CHECKS

import distdl

WORKERS = 4


def run(folder: str) -> None:
    """Run all in order; the first that fails ends the job, for its workers are no longer in step."""
    run_contract(folder)
    properties.run(folder)
    run_models.run(folder)


def run_contract(folder: str) -> None:
    """Write a line for each check."""
    rank = distdl.world().rank
    with Path(folder, f"{rank}.jsonl").open("w") as report:
        for name, check in CHECKS.items():
            try:
                check()
            except BaseException:
                print(json.dumps([name, traceback.format_exc()]), file=report, flush=True)
                raise
            print(json.dumps([name, "ok"]), file=report, flush=True)


if __name__ == "__main__":
    folder, backend = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    distdl.run_workers(functools.partial(run, folder), WORKERS, backend)
