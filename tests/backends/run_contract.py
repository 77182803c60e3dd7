"""Run the contract in a job of several processes, and write down what each check gave on each worker.

``python run_contract.py FOLDER`` under mpirun; or ``python run_contract.py FOLDER gloo``, which starts the processes.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from pathlib import Path

from contract import CHECKS

import distdl

WORKERS = 4


def run(folder: str) -> None:
    """Run the checks in order; the first that fails ends the job, for its workers are no longer in step."""
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
