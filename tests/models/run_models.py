"""Train a few models in a job of four processes: ``run_models.py`` under mpirun, or ``run_models.py gloo``.

Each worker compares what it has with the model alone; worker 0 prints the name of each model that is equal everywhere.
"""

from __future__ import annotations

import sys

from training import Split, alone, differences, distributed
from zoo import ENTRIES

import distdl

FEW = {
    "monai-UNet-2d": Split("rows", (1, 1, 3, 1), idle=1),
    "timm-convnext": Split("plane", (1, 1, 2, 2)),
    "timm-vit": Split("samples-and-columns", (2, 1, 1, 2)),
}


def main() -> None:
    P = distdl.world()
    for entry in ENTRIES:
        if entry.name in FEW:
            lines = differences(distributed(entry, FEW[entry.name], "Adam"), alone(entry, "Adam"))
            found = P.allgather_data("\n".join(lines))
            if P.rank == 0:
                print(
                    entry.name, *(f"worker {worker}: {text}" for worker, text in enumerate(found) if text), flush=True
                )


if __name__ == "__main__":
    distdl.run_workers(main, 4, *sys.argv[1:])
