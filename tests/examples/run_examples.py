"""Run several examples in one job: ``run_examples.py NAME[=ARGUMENT] ...``, alone or launched.

A launched job makes fewer steps of training: the back-ends differ in how they move tensors, not in what a network
learns later. Alone, the examples run as they stand.
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import distdl

EXAMPLES = Path(__file__).parents[2] / "examples"
FEWER = {
    # too few to have learned all, enough to compare each step
    "lenet_digits": {"EPOCHS": 1, "BATCH": 64, "LEAST_ACCURACY": 0.0},
    # the second step is the first with what the optimiser keeps, so it holds as much memory as any later one
    "unet3d": {"STEPS": 2},
    # only worker 0 trains; what is decoded needs no likeness
    "vae_decode": {"STEPS": 15},
}

launched = distdl.world().size > 1
for word in sys.argv[1:]:
    name, *arguments = word.split("=")
    if distdl.world().rank == 0:
        print(f"# {name}", flush=True)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for option, value in FEWER.get(name, {}).items() if launched else ():
        assert hasattr(module, option), (name, option)
        setattr(module, option, value)
    distdl.run_workers(partial(module.main, *arguments))
