"""Models that workers build by one seed: threads, which share a generator, draw different weights, and are told so."""

import copy
import linecache
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import distdl
from distdl.backends.threaded.communicator import ThreadCommunicator
from distdl.globals.consistency import equality

WORKERS = 3


def _build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 3))


def _build_in_turn(P):
    for turn in range(P.size):
        if turn == P.rank:
            model = _build()
        P.allgather_data(0)
    return model


def _build_from_one_sequence(P):
    """What threads may build that seed at the same time: each draws what follows on what another has drawn."""
    torch.manual_seed(0)
    P.allgather_data(0)
    for turn in range(P.size):
        if turn == P.rank:
            model = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1))
        P.allgather_data(0)
    return model


def _said(main):
    """What workers that run ``main`` are told."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        distdl.run_workers(main, WORKERS)
    return told


def _distribute_twice():
    P = distdl.world()
    for _ in range(2):
        model = _build_from_one_sequence(P)
        kept = copy.deepcopy(model) if P.rank == 0 else None
        distdl.distribute(model, P.reshape(1, 1, -1, 1))
        states = P.allgather_data(dict(model.state_dict()))
        assert P.rank > 0 or all(torch.equal(one["1.weight"], kept[1].weight) for one in states)


def _add_later():
    P = distdl.world()
    model = distdl.distribute(_build_in_turn(P), P.reshape(1, 1, -1, 1))
    model.append(_build_from_one_sequence(P)[1])
    model(torch.rand(1, 2, 6, 6, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    "main, first, line", [(_distribute_twice, "1.weight", "distdl.distribute("), (_add_later, "4.weight", "model(")]
)
def test_threads_that_drew_different_weights_are_told_once(main, first, line):
    (told,) = _said(main)
    assert f"the first is {first}" in str(told.message) and told.filename == __file__
    assert line in linecache.getline(__file__, told.lineno)


def _only_worker_0_loads(P, model):
    if P.rank == 0:
        model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})


def _only_worker_0_assigns(P, model):
    if P.rank == 0:
        model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()}, assign=True)


def _only_worker_0_has_values(P, model):
    loaded = {name: one + 1 for name, one in model.state_dict().items()}
    model.to("meta")
    if P.rank == 0:
        model.load_state_dict(loaded, assign=True)
    else:
        model.to_empty(device="cpu")


@pytest.mark.parametrize("change", [_only_worker_0_loads, _only_worker_0_assigns, _only_worker_0_has_values])
def test_workers_are_told_nothing_where_worker_0_alone_has_loaded_weights(change):
    def main():
        P = distdl.world()
        model = _build_from_one_sequence(P)
        change(P, model)
        distdl.distribute(model, P.reshape(1, 1, -1, 1))

    assert not _said(main)


def test_workers_are_told_nothing_where_nobody_has_set_a_seed(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(equality, "_SEED", torch.initial_seed())
    assert not _said(_distribute_twice)


def test_processes_are_told_nothing_of_seeds_of_their_own(monkeypatch):
    monkeypatch.setattr(ThreadCommunicator, "threads", False)
    assert not _said(_distribute_twice)


def _train(model):
    """The losses of some steps of a model that is distributed over all workers, or that one worker has alone."""
    P = distdl.world()
    distdl.distribute(model, P.reshape(1, 1, -1, 1))
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.rand(2, 2, 9, 7, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def _train_what_each_builds():
    return _train(_build())


def _train_what_was_built_in_turn():
    return _train(_build_in_turn(distdl.world()))


def _train_copies():
    model = _build()
    return lambda: _train(copy.deepcopy(model))


@pytest.mark.parametrize("cure", [_train_copies, lambda: _train_what_was_built_in_turn])
def test_threads_get_the_weights_of_a_seed_in_each_launch(cure):
    (expected,) = distdl.run_workers(_train_what_each_builds, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            for losses in distdl.run_workers(cure(), 4):
                assert losses == pytest.approx(expected, rel=1e-5)


def test_a_seed_counts_that_was_set_before_distdl_was_imported():
    code = "import torch; torch.manual_seed(0); from distdl.globals.consistency.equality import _SEED; print(_SEED)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == f"{torch.Generator().initial_seed()}\n", found.stderr
