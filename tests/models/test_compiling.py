"""Models by other people, with a compiled step: the bits are those of the step as it is, and the table is right.

``make test`` runs a few models, each on one partition; ``make models`` runs all of them on several.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import run_models
from compiling import EXPECTED, STEPS, other_bits, stepped
from launchers import LIMIT
from run_suites import WORKERS
from training import Split, splits_of
from zoo import ENTRIES, Entry

import distdl

PAGE = Path(__file__).parents[2] / "docs" / "details" / "compiled-models.md"
BY_NAME = {entry.name: entry for entry in ENTRIES}
FEW = [
    ("monai-UNet-2d", Split("rows", (1, 1, 3, 1), idle=1), "replicated"),
    ("timm-convnext", Split("plane", (1, 1, 2, 2)), "sharded"),
    ("timm-mixer", Split("samples", (2, 1, 1, 1)), "replicated"),
]
ALL = [
    pytest.param(entry, split, weights, id=f"{entry.name}-{split}-{weights}")
    for entry in ENTRIES
    for workers, name, weights in (
        (2, "samples", "replicated"),
        (3, "rows", "replicated"),
        (3, "idle", "sharded"),
        (4, "plane", "replicated"),
        (6, "samples-and-rows", "replicated"),
    )
    for split in splits_of(workers, len(entry.shape) - 2)
    if split.name == name
]


def assert_same_bits(entry: Entry, split: Split, weights: str) -> None:
    """Every loss, gradient, statistic and weight has the bits of the step as it is; the table says what was found."""
    module = entry.module()

    def run(compiled: bool) -> list[Any]:
        return distdl.run_workers(lambda: stepped(entry, split, module, compiled, weights=weights), split.workers)

    ours, theirs = run(True), run(False)
    for worker, (mine, others) in enumerate(zip(ours, theirs, strict=True)):
        lines = other_bits(mine, others)
        assert not lines, "\n".join([f"{entry.name}, {split}, {weights}, worker {worker}", *lines])
        assert mine.found == EXPECTED[entry.name], f"worker {worker} has found otherwise than the table says"


@pytest.mark.parametrize(("name", "split", "weights"), FEW, ids=str)
def test_a_few_models(name, split, weights):
    assert_same_bits(BY_NAME[name], split, weights)


@pytest.mark.every_model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("entry", "split", "weights"), ALL)
def test_every_model(entry, split, weights):
    assert_same_bits(entry, split, weights)


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_few_models_on_processes(backend, suites):
    folder, output = suites(backend)
    wanted = [f"{name} {EXPECTED[name]}" for name in run_models.COMPILED]
    for rank in range(WORKERS):
        file = folder / f"{rank}.compiled"
        assert file.exists() and file.read_text().splitlines() == wanted, f"worker {rank}\n{output}"


def test_the_table_has_every_model():
    assert list(EXPECTED) == [entry.name for entry in ENTRIES]


def test_the_page_has_the_table():
    rows = [f"| {entry.name} | {entry.loss.__name__} | {EXPECTED[entry.name]} |" for entry in ENTRIES]
    assert "\n".join(["| model | loss | its step |", "| --- | --- | --- |", *rows, ""]) in PAGE.read_text()


def test_a_difference_is_found():
    """In one bit of one weight, or a gradient that is missing."""
    entry, split = BY_NAME["timm-mixer"], Split("alone", (1, 1, 1, 1))
    module = entry.module()
    ours, theirs = (distdl.run_workers(lambda: stepped(entry, split, module), 1)[0] for _ in range(2))
    assert len(ours.left) == STEPS and not other_bits(ours, theirs)
    weight = next(name for name in ours.left[-1] if name.endswith("weight") and not name.startswith("gradient"))
    ours.left[-1][weight].view(-1)[-1] *= 1 + 1e-15
    ours.left[2][f"gradient of {weight}"] = None
    assert other_bits(ours, theirs) == [f"step 2: gradient of {weight}", f"step {STEPS - 1}: {weight}"]
