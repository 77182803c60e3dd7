"""One epoch of the example LeNet, in a launched job: too few to have learned all, enough to compare each step."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import lenet_digits

import distdl

lenet_digits.EPOCHS = 1
lenet_digits.LEAST_ACCURACY = 0.0
distdl.run_workers(lenet_digits.main)
