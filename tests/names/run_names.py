"""Run the checks of some modules of this folder on all processes of one MPI job: ``run_names.py MODULE ...``.

Rank 0 prints the name of each check.
"""

import importlib
import sys
from pathlib import Path

from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent))

for module in sys.argv[1:]:
    for name, check in list(vars(importlib.import_module(module)).items()):
        if name.startswith("check_"):
            check()
            MPI.COMM_WORLD.Barrier()
            if MPI.COMM_WORLD.rank == 0:
                print(name, flush=True)
