"""Modules that a distributed model gets later: those that its forward makes, and those that a user puts into it."""

import copy
import time
from contextlib import nullcontext

import pytest
import torch
from nets import assert_close, assert_identical, assert_same_state, network, partition, run
from same import noise
from torch import nn
from torch.nn.utils import parametrize

import distdl

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
