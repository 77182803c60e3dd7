"""What is added to a model after it has been distributed: workers may have drawn other weights for it."""

import copy
import sys
import threading
import time
import warnings
from contextlib import nullcontext

import pytest
import torch
from nets import GRIDS, OPTIMISERS, assert_close, assert_identical, assert_same_state, batch, network, partition, run
from same import noise
from torch import nn
from torch.nn.utils import parametrizations, parametrize

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


WEIGHTS = ["replicated", "sharded"]


class Centred(nn.Module):
    """Takes the mean of each channel away, and keeps it: in a buffer, or in a parameter that it makes of it."""

    def __init__(self, x, kept):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3, 1), 1.5, dtype=torch.float64))
        self.kept = kept
        if kept == "parameter":
            self.mean = nn.Parameter(x.detach().mean((0, 2), keepdim=True))
        else:
            self.register_buffer("mean", x.detach().mean((0, 2), keepdim=True) if kept == "first" else None)

    def forward(self, x):
        if self.kept == "each":
            self.mean = x.detach().mean((0, 2), keepdim=True)
        return (x - self.mean) * self.scale


class Lazy(nn.Module):
    def __init__(self, kept="first"):
        super().__init__()
        self.kept, self.conv = kept, nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        if not hasattr(self, "centred"):
            self.centred = nn.Sequential(Centred(y, self.kept), nn.Tanh())
        return self.centred(y)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kept", ["first", "each", "parameter"])
def test_what_a_forward_makes_has_the_state_of_the_sequential_model(kept, weights):
    def work():
        P = partition((1, 1, 3))
        alone, model = network(lambda: Lazy(kept)), distdl.distribute(network(lambda: Lazy(kept)), P, weights=weights)
        for step in range(2):
            x = noise(2, 3, 11, seed=step)
            for one, given in ((alone, x), (model, distdl.distribute_tensor(x, P))):
                one.zero_grad()
                y = one(given)
                y.square().sum().backward()
            assert_close(y, alone(x))
            assert_same_state(model, alone)
        copied = copy.deepcopy(model)
        copied.load_state_dict(alone.state_dict())
        assert_close(copied(distdl.distribute_tensor(x, P)), alone(x))

    run(work)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_module_that_is_put_in_the_place_of_another_is_the_same_on_every_worker(weights):
    """Each worker has made one with other weights."""

    def work():
        P = partition((1, 1, 3))
        model = distdl.distribute(network(lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU())), P, weights=weights)
        model[1] = nn.Sequential(nn.ReLU(), nn.Conv1d(4, 2, 1)).double()
        model.add_module("norm", nn.BatchNorm1d(2).double())
        model(distdl.distribute_tensor(noise(2, 3, 11, seed=1), P))
        for parameter in model[1].parameters():
            assert type(parameter) is nn.Parameter  # (they stay whole)
        if weights == "replicated":
            assert_identical(model)
        alone = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Sequential(nn.ReLU(), nn.Conv1d(4, 2, 1)))
        alone.add_module("norm", nn.BatchNorm1d(2))
        alone.double().load_state_dict(model.state_dict())
        for one, x in ((alone, noise(2, 3, 11)), (model, distdl.distribute_tensor(noise(2, 3, 11), P))):
            optimiser = torch.optim.SGD(one.parameters(), 0.1)
            one(x).square().sum().backward()
            optimiser.step()
        assert_same_state(model, alone)

    run(work)


def test_fallbacks_name_the_path_of_a_later_module():
    class Clipped(nn.Module):
        def forward(self, x):
            return torch.alias_copy(x)

    def work():
        P = partition((1, 1, 3))
        model = distdl.distribute(nn.Sequential(nn.Sequential(nn.Identity())), P, fallback="error")
        model[0][0] = Clipped()
        with pytest.raises(NotImplementedError, match=r"0\.0: alias_copy"):
            model(distdl.distribute_tensor(noise(1, 2, 7), P))

    run(work)


class _Symmetric(torch.nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T

    def right_inverse(self, w):
        return w.triu()


@pytest.mark.timeout(120)  # the compiler alone takes seconds to import
@pytest.mark.parametrize("is_around", [True, False])
def test_what_caches_parametrised_weights_is_compiled_in_one_piece(is_around):
    """As without this package: whoever imports it need not distribute anything."""
    model = torch.nn.Linear(3, 3).double()
    parametrize.register_parametrization(model, "weight", _Symmetric())
    x = noise(2, 3)

    def twice(x):
        with parametrize.cached():
            return model(x) + model(x)

    compiled = torch.compile(model if is_around else twice, backend="eager", fullgraph=True)
    for _ in range(2):
        with torch.no_grad():
            model.parametrizations.weight.original.mul_(2)
        expected = model(x) if is_around else twice(x)
        with parametrize.cached() if is_around else nullcontext():
            assert_close(compiled(x), expected)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_a_parametrised_weight_is_set_to_a_plain_tensor(weights):
    """What it is computed from gets the values, and stays the parameter that the optimiser has."""

    def work():
        model = distdl.distribute(torch.nn.Linear(4, 4, bias=False).double(), partition((2, 1)), weights=weights)
        parametrize.register_parametrization(model, "weight", _Symmetric())
        original = model.parametrizations.weight.original
        model.weight = noise(4, 4).triu()
        assert model.parametrizations.weight.original is original
        x = noise(6, 4)
        assert_close(model(distdl.distribute_tensor(x, partition((2, 1)))), x @ _Symmetric()(noise(4, 4)))

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_parametrisations_are_cached_for_each_thread(weights):
    """A worker that is still in the context of torch's cache does not keep the old weights of those that have left."""

    def outcome(model, x, leave=lambda: None):
        parametrize.register_parametrization(model, "weight", _Symmetric())
        found = []
        for _ in range(2):
            with parametrize.cached():
                assert model.weight is model.weight
                found.append(model(x).sum())
                leave()
            assert not torch.is_grad_enabled() or model.weight is not model.weight
            with torch.no_grad():
                model.parametrizations.weight.original.mul_(2)
            found.append(model(x).sum())
        return found

    def made():
        model = torch.nn.Linear(4, 4, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(noise(4, 4))
        return model

    expected = outcome(made(), noise(6, 4))

    def work():
        world = distdl.world()
        P = world[:2].reshape(2, 1)
        model = distdl.distribute(made(), P, weights=weights)
        found = outcome(model, distdl.distribute_tensor(noise(6, 4), P), lambda: time.sleep(0.05 * world.rank))
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs)

    distdl.run_workers(work, 3)
