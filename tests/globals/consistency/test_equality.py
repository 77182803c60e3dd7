"""Models that workers build by one seed: threads, which share a generator, draw different weights, and are told so."""

import copy
import linecache
import subprocess
import sys
import warnings

import pytest
import torch
from nets import assert_identical, network, partition, run
from torch import nn

import distdl
from distdl.backends.threaded.communicator import ThreadCommunicator
from distdl.globals.consistency import equality
from distdl.globals.consistency.equality import _parts

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


def test_lists_of_parameters_say_nothing_of_devices():
    model = nn.ParameterList([nn.Parameter(torch.ones(2))])
    assert _parts(model) == ["the model is ParameterList()"]


def test_all_workers_get_the_weights_and_buffers_of_the_first():
    def work():
        me = distdl.world().rank
        model = network(seed=me)
        model.norm.running_mean += me
        if me == 0:
            model.tied.bias.data = model.tied.bias.data.flip(0)  # (also not contiguous)
        distdl.distribute(model, partition((3, 1)))
        assert_identical(model)
        expected = network(seed=0)
        assert torch.equal(model.first.weight, expected.first.weight) and model.norm.running_mean.sum() == 0
        assert torch.equal(model.tied.bias, expected.tied.bias.flip(0))

    run(work)


def _layers(kind, other):
    conv = nn.Conv1d(2, 3, 1)
    if kind == "shape":
        return nn.Sequential(conv, nn.Conv1d(3, 2 + other, 1))
    if kind == "dtype":
        return nn.Sequential(conv, nn.Conv1d(3, 2, 1, dtype=torch.float64 if other else None))
    if kind == "class":
        return nn.Sequential(conv, nn.Tanh() if other else nn.ReLU())
    if kind == "option":
        return nn.Sequential(conv, nn.Dropout(0.3 if other else 0.5))
    return nn.Sequential(conv, nn.ReLU()) if other and kind == "fewer" else nn.Sequential(conv, nn.ReLU(), nn.ReLU())


DIFFERENT = {
    "shape": "on worker 0 1.weight is 2x3x1 of torch.float32, and on worker 2 1.weight is 3x3x1 of torch.float32",
    "dtype": "1.weight is 2x3x1 of torch.float32, and on worker 2 1.weight is 2x3x1 of torch.float64",
    "class": r"on worker 0 1 is ReLU\(\), and on worker 2 1 is Tanh\(\)",
    "option": r"on worker 0 1 is Dropout\(p=0.5, inplace=False\), and on worker 2 1 is Dropout\(p=0.3",
    "fewer": r"on worker 0 2 is ReLU\(\), and on worker 2 nothing more",
    "partition": "on worker 0 the partition is 3x1 on workers 0..2, and on worker 2 the partition is 3x1 on workers 2",
    "weights": "on worker 0 weights='replicated', and on worker 2 weights='sharded'",
    "fallback": "on worker 0 fallback is not 'error', and on worker 2 fallback is 'error'",
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_workers_with_different_models_or_options(kind):
    def work():
        other = distdl.world().rank == 2
        P = distdl.world()[:3].reshape(3, 1)
        if kind == "partition" and other:
            P = distdl.world()[2::-1].reshape(3, 1)
        weights = "sharded" if kind == "weights" and other else "replicated"
        with pytest.raises(ValueError, match=DIFFERENT[kind]):
            fallback = "error" if kind == "fallback" and other else "silent"
            distdl.distribute(_layers(kind, other), P, weights=weights, fallback=fallback)

    run(work)
