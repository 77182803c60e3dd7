"""Run several examples in one launched job: ``run_examples.py NAME ...``."""

import importlib.util
import sys
from pathlib import Path

import distdl

EXAMPLES = Path(__file__).parents[2] / "examples"

for name in sys.argv[1:]:
    if distdl.world().rank == 0:
        print(name, flush=True)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    distdl.run_workers(module.main)
