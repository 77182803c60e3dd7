"""Models by other people, unmodified: trained on several workers they give the numbers that they give alone.

``make test`` runs a few models, each on one partition; ``make models`` runs all of them on all partitions.
"""

from __future__ import annotations

import copy

import pytest
import run_models
import torch
from launchers import LIMIT
from run_suites import WORKERS
from training import STEPS, Split, alone, differences, distributed, held, identical, splits_of
from zoo import ENTRIES, Entry

import distdl

BY_NAME = {entry.name: entry for entry in ENTRIES}
FEW = [
    ("monai-UNet-3d", Split("rows", (1, 1, 3, 1, 1), idle=1)),
    ("monai-UNETR-2d", Split("samples-and-columns", (2, 1, 1, 2))),
    ("timm-resnet", Split("plane", (1, 1, 2, 3))),
    ("timm-convnext", Split("columns", (1, 1, 1, 3))),
    ("timm-vit", Split("rows", (1, 1, 2, 1))),
    ("timm-swin", Split("plane", (1, 1, 2, 2))),
]
ALL = [
    pytest.param(entry, split, ("SGD", "Adam")[number % 2], id=f"{entry.name}-{split}")
    for entry in ENTRIES
    for number, split in enumerate(
        split for workers in (2, 3, 4, 6) for split in splits_of(workers, len(entry.shape) - 2)
    )
]


def assert_trains(entry: Entry, split: Split, optimizer: str) -> None:
    """Output, losses, every gradient and every weight are those of the model alone, and the same on every worker."""
    wanted, module = alone(entry, optimizer), entry.module()
    results = distdl.run_workers(lambda: distributed(entry, split, optimizer, module), split.workers)
    lines = differences(results[0], wanted)
    assert not lines, "\n".join([f"{entry.name}, {split}, {optimizer}", *lines])
    strays = [worker for worker, result in enumerate(results) if not identical(result, results[0])]
    assert not strays, f"workers {strays} hold other bits than worker 0"


def assert_told(entry: Entry, split: Split) -> None:
    """The peak of ``summary`` is within 1.3 of the tensors that a worker holds in a step, which has a loss, too."""
    module = entry.module()
    peaks = distdl.run_workers(lambda: held(entry, split, module), split.workers)
    for worker in {0, len(peaks) - split.idle - 1}:
        told, real = distdl.summary(module, split.grid, entry.shape, worker=worker), peaks[split.idle + worker]
        assert 1 / 1.3 <= told.totals.peak / real <= 1.3, f"worker {worker} holds {real} bytes\n{told}"


@pytest.mark.parametrize(("name", "split"), FEW, ids=str)
def test_a_few_models(name, split):
    assert_trains(BY_NAME[name], split, "Adam")


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_few_models_on_processes(backend, suites):
    folder, output = suites(backend)
    for rank in range(WORKERS):
        file = folder / f"{rank}.models"
        assert file.exists() and file.read_text().splitlines() == list(run_models.FEW), f"worker {rank}\n{output}"


@pytest.mark.every_model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("entry", "split", "optimizer"), ALL)
def test_every_model(entry, split, optimizer):
    assert_trains(entry, split, optimizer)


@pytest.mark.parametrize(("name", "split"), FEW[::2], ids=str)
def test_what_a_few_models_hold_is_what_their_summary_says(name, split):
    assert_told(BY_NAME[name], split)


@pytest.mark.every_model
@pytest.mark.parametrize("split", ["samples", "rows", "plane"])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_what_every_model_holds_is_what_its_summary_says(entry, split):
    (found,) = (one for one in splits_of(4, len(entry.shape) - 2) if one.name == split)
    assert_told(entry, found)


def test_names_are_unique():
    assert len(BY_NAME) == len(ENTRIES)


@pytest.mark.parametrize("name", ["monai-UNet-2d", "timm-mixer"])
def test_training_alone_repeats_itself_and_changes_every_weight(name):
    """What the other tests compare with: the same each time, and not trivially so."""
    entry = BY_NAME[name]
    first = alone(entry, "Adam")
    again = alone.__wrapped__(entry, "Adam")
    assert identical(first, again) and len(first.losses) == STEPS
    assert all(gradient is not None and gradient.any() for gradient in first.gradients.values())
    start = entry.module().state_dict()
    assert not any(torch.equal(start[weight], first.state[weight]) for weight in start)


def test_a_difference_is_found():
    """In one element of one weight, or a gradient that is missing."""
    trained = alone(BY_NAME["timm-mixer"], "Adam")
    other = copy.deepcopy(trained)
    weight = next(iter(other.state))
    other.state[weight].view(-1)[-1] += 1e-6
    other.gradients["the input"] = None
    assert len(differences(other, trained)) == 2 and not identical(other, trained)
