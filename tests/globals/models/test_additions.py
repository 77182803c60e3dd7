"""What is added to a model after it has been distributed: workers may have drawn other weights for it."""

import copy
import sys
import threading
import warnings

import pytest
import torch
from nets import GRIDS, OPTIMISERS, assert_close, assert_identical, assert_same_state, batch, network, partition, run
from same import noise
from torch import nn
from torch.nn.utils import parametrizations

import distdl
from distdl.globals.consistency.equality import make_equal


def _drawn(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in (*model.parameters(), *model.buffers()):
            if one.is_floating_point():
                one.copy_(torch.rand(one.shape, generator=generator, dtype=torch.float64) + 0.1)
    return model.double()


def _new_head(model, seed):
    model.last = _drawn(nn.Conv1d(6, 2, 3, padding=1), seed)


def _new_module(model, seed):
    model.inner.append(_drawn(nn.BatchNorm1d(6), seed))


def _new_module_behind_a_removed_one(model, seed):
    model.inner.pop(-1)
    model.inner.append(nn.Tanh())
    model.inner.append(_drawn(nn.Conv1d(6, 6, 1), seed))


def _new_module_of_an_added_one(model, seed):
    model.last = nn.Sequential(nn.Identity())
    model(batch(0)[0])
    model.last[0] = _drawn(nn.Conv1d(6, 2, 1), seed)


def _new_parameter(model, seed):
    model.first.bias = nn.Parameter(_drawn(nn.Linear(1, 6), seed).bias.detach())


def _new_buffers(model, seed):
    model.norm.running_mean = noise(6, seed=seed)
    model.last.register_buffer("factor", noise(2, 1, seed=seed))
    model.last.register_forward_hook(lambda module, inputs, result: result * module.factor)


def _parametrised(model, seed):
    parametrizations.spectral_norm(model.last)
    _drawn(model.last.parametrizations, seed)


CHANGES = [
    _new_head, _new_module, _new_module_behind_a_removed_one, _new_module_of_an_added_one, _new_parameter, _new_buffers,
    _parametrised,
]  # fmt: skip


# (to register a parametrisation, torch iterates on the parameter, which falls back where it is in shares)
@pytest.mark.parametrize(
    ("change", "weights"), [*((one, "replicated") for one in CHANGES), *((one, "sharded") for one in CHANGES[:-1])]
)
def test_all_workers_get_what_the_first_has_added(change, weights):
    def work():
        for grid in GRIDS:
            sequential = network()
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid), weights=weights, fallback="error")
            change(sequential, 0)
            change(model, distdl.world().rank)
            models = (model, sequential)
            optimisers = [OPTIMISERS["sgd"](one.parameters()) for one in models]
            for step in range(2):
                x, target = batch(step)
                for one, steps in zip(models, optimisers, strict=True):
                    steps.zero_grad()
                    y = one(x)
                    (y - target).square().mean().backward()
                    steps.step()
            assert_same_state(*models)
            assert_close(model(x), sequential(x))
            if weights == "replicated":
                assert_identical(model)

    run(work)


def test_weights_that_are_drawn_before_the_first_forward():
    def work():
        for grid in GRIDS:
            sequential = network()
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid))
            _drawn(sequential, 0)
            _drawn(model, distdl.world().rank)
            x, _ = batch(0)
            for one in (model, sequential):
                one(x).square().mean().backward()
            assert_same_state(model, sequential)
            assert_identical(model)

    run(work)


def test_weights_that_one_worker_alone_has_read():
    def work():
        model = distdl.distribute(network(), partition((3, 1)))
        if distdl.world().rank == 0:
            _drawn(model, 0)
        model(batch(0)[0])

    with pytest.raises(distdl.CommunicationError, match="in taking in what was set or written in a model since"):
        distdl.run_workers(work, 4)


def test_what_stays_as_it_was_is_not_compared(monkeypatch):
    compared = []

    def count(*arguments):
        compared.append(threading.get_ident())
        return make_equal(*arguments)

    def work():
        model = distdl.distribute(network(), partition((3, 1)))
        x, _ = batch(0)
        copied = copy.deepcopy(model)
        torch.func.functional_call(model, dict(model.named_parameters()), (x,))
        model.norm.running_mean.zero_()
        model.last = model.last
        for _ in range(2):
            model(x)
        assert threading.get_ident() not in compared
        copied(x)  # (nobody knows of a copy whether it was made alike)
        assert compared.count(threading.get_ident()) == 1
        for one in (copied, model):
            one(x)
        assert compared.count(threading.get_ident()) == 1
        model.last = copied.last
        model(x)
        assert compared.count(threading.get_ident()) == 2

    where = sys.modules["distdl.globals.models.distribute"]
    monkeypatch.setattr(where, "make_equal", lambda *given, **_: None if len(given) < 3 else count(*given))
    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_what_was_added_before_a_copy_is_made_equal_in_the_copy(weights):
    def work():
        sequential, model = network(), distdl.distribute(network(), partition((3, 1)), weights=weights)
        _new_head(sequential, 0)
        _new_head(model, distdl.world().rank)
        copied = copy.deepcopy(model)
        x, _ = batch(0)
        for one in (copied, model):
            alone = copy.deepcopy(sequential)
            assert_close(one(x), alone(x))
            assert_same_state(one, alone)

    run(work)


def test_a_list_that_a_forward_changes_is_looked_at_in_the_next():
    """What it appends stands in a plain dict, as the list has lost a module; then it makes another module."""

    class Changing(nn.Sequential):
        def forward(self, x):
            if not hasattr(self, "made"):
                self.made = None
                self[0].pop(-1)
                self[0].append(nn.ReLU())
                self.made = nn.Tanh()
            return self[0](x)

    def work():
        model = distdl.distribute(
            network(lambda: Changing(nn.Sequential(nn.Conv1d(3, 2, 1), nn.ReLU()))), partition((3, 1))
        )
        sequential = network(lambda: Changing(nn.Sequential(nn.Conv1d(3, 2, 1), nn.ReLU())))
        x, _ = batch(0)
        for _ in range(2):
            assert_close(model(x), sequential(x))
        for one, seed in ((model, distdl.world().rank), (sequential, 0)):
            one[0].append(_drawn(nn.Conv1d(2, 2, 1), seed))
        assert_close(model(x), sequential(x))

    run(work)


def test_additions_that_cannot_be_made_equal_are_one_error():
    def work():
        for add in (
            lambda model: setattr(model, "last", nn.LazyConv1d(2, 1)),
            lambda model: setattr(model, "last", nn.Conv1d(6, 1 + min(distdl.world().rank, 1), 1)),
        ):
            model = distdl.distribute(network(), partition((3, 1)))
            add(model)
            with pytest.raises(ValueError, match="distribute needs"):
                model(batch(0)[0])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # (torch's, of lazy modules)
        distdl.run_workers(work, 4)


def test_a_model_that_was_made_in_inference_mode():
    """Torch does not count what is written into its weights."""

    def work():
        with torch.inference_mode():
            sequential = _drawn(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 0).eval()
            model = distdl.distribute(copy.deepcopy(sequential), partition((3, 1)))
            x = noise(6, 3)
            assert_close(model(x), sequential(x))
        with torch.no_grad():
            assert_close(copy.deepcopy(model)(noise(6, 3)), sequential(noise(6, 3)))

    run(work)
