"""Train a few models in a job of four processes. Each worker compares what it has with the model alone."""

from __future__ import annotations

from pathlib import Path

from compiling import other_bits, stepped
from training import Split, alone, differences, distributed
from zoo import ENTRIES

import distdl

FEW = {
    "monai-UNet-2d": Split("rows", (1, 1, 3, 1), idle=1),
    "timm-convnext": Split("plane", (1, 1, 2, 2)),
    "timm-vit": Split("samples-and-columns", (2, 1, 1, 2)),
}
COMPILED = ("monai-UNet-2d", "timm-vit")


def run(folder: str) -> None:
    """Write a line for each model: its name, and what differs. Another file has those with compiled steps."""
    P = distdl.world()
    with Path(folder, f"{P.rank}.models").open("w") as report:
        for entry in ENTRIES:
            if entry.name in FEW:
                lines = differences(distributed(entry, FEW[entry.name], "Adam"), alone(entry, "Adam"))
                print(entry.name, *lines, file=report, flush=True)
    with Path(folder, f"{P.rank}.compiled").open("w") as report:
        for entry in ENTRIES:
            if entry.name in COMPILED:
                ours, theirs = (stepped(entry, FEW[entry.name], entry.module(), each) for each in (True, False))
                print(entry.name, ours.found, *other_bits(ours, theirs), file=report, flush=True)
