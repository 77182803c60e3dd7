"""Weights of which every worker stores a share: the same training as with whole weights, in a share of the memory."""

import copy
import weakref

import pytest
import torch
from nets import (
    GRIDS,
    OPTIMISERS,
    assert_close,
    assert_same_state,
    assert_trains_alike,
    batch,
    network,
    partition,
    run,
    sharded,
)
from same import noise
from torch import nn
from torch.nn.utils import prune

import distdl


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_training(optimiser):
    def work():
        for grid in GRIDS[:2]:
            sequential = network()
            model = sharded(sequential, grid)
            assert_trains_alike(model, sequential, optimiser, [True, False, True, False])

    run(work)


class _ReadTwice(nn.Module):
    """A weight that is read without a graph first, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(noise(6, 5))
        self.v = nn.Parameter(noise(5, seed=2), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            norm = self.w.square().sum() + self.v.sum()
        return x @ self.w / norm + self.v


def test_a_weight_that_is_read_first_without_a_graph_gets_its_gradient():
    def work():
        sequential, x = _ReadTwice(), noise(4, 6, seed=3)
        model = sharded(sequential, (2, 1))
        for one in (sequential, model):
            one(x).square().sum().backward()
        torch.testing.assert_close(model.w.grad.full_tensor(), sequential.w.grad, rtol=1e-12, atol=1e-12)

    distdl.run_workers(work, 3)


def test_weights_that_are_computed():
    def make():
        model = nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv1d(6, 2, 3, padding=1))
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrizations.spectral_norm(model[2]).eval()
        return model

    def work():
        sequential = network(make)
        distdl.distribute(sequential, partition((1, 1)))  # (only so that buffers are the same on all workers)
        model = sharded(network(make), (2, 1, 2))
        model.load_state_dict(sequential.state_dict())
        for step in range(2):
            x, target = batch(step)
            for one in (model, sequential):
                (one(x) - target).square().mean().backward()
            assert_same_state(model, sequential)

    run(work)


def test_what_a_model_in_shares_refuses():
    def work():
        model = sharded(network(), (2, 1))
        saved = network(seed=1).state_dict()
        with pytest.raises(ValueError, match=r"load_state_dict\(assign=True\) would put whole tensors in the places"):
            model.load_state_dict(saved, assign=True)
        assert all(type(one) is distdl.GlobalTensor for one in model.parameters())
        with pytest.raises(ValueError, match="summary needs a model that is not distributed yet"):
            distdl.summary(model, partition((2, 1)), (4, 3, 11))
        replicated = distdl.distribute(network(), partition((2, 1)))
        sequential = network()
        for one in (replicated, sequential):
            one.load_state_dict(saved, assign=True)
        assert_same_state(replicated, sequential)

    run(work)


def test_shares_take_another_dtype_where_they_are():
    """Warnings are errors: nothing comes together for that."""

    def work():
        model, sequential = sharded(network(), (2, 1)), network()
        assert_same_state(model.float(), sequential.float())
        assert_same_state(model.to(torch.float64), sequential.double())
        assert all(type(one) is distdl.GlobalTensor for one in model.parameters())

    run(work)


def test_gradients_take_another_dtype_along_with_their_shares():
    def work():
        model = distdl.distribute(network().double(), partition((2, 1)), weights="sharded")
        model(batch(0)[0].double()).sum().backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        before = [parameter.grad.full_tensor() for parameter in trained]
        model.float()
        for parameter, gradient in zip(trained, before, strict=True):
            assert torch.equal(parameter.grad.full_tensor(), gradient.float())
            parameter.grad.data = gradient.float() + 1
            assert torch.equal(parameter.grad.full_tensor(), gradient.float() + 1)

    distdl.run_workers(work, 3)


def test_parametrisations_of_parameters_in_shares():
    def work():
        sequential = network()
        model = sharded(sequential, (2, 1, 2))
        for one in (model, sequential):
            nn.utils.parametrizations.weight_norm(one.first)
            nn.utils.parametrizations.weight_norm(one.last, dim=None)
            nn.utils.parametrize.register_parametrization(one.inner[0], "bias", nn.Tanh())
        for one in (model, sequential):
            x, target = batch(0)
            (one(x) - target).square().mean().backward()
            torch.optim.SGD(one.parameters(), 0.1).step()
        assert_same_state(model, sequential)
        assert type(model.inner[0].parametrizations.bias.original) is distdl.GlobalTensor

    run(work)


@pytest.mark.parametrize("before", [0, 1])
def test_errors_of_pruning_say_how_weights_in_shares_are_pruned(before):
    """The code that they give prunes what ``l1_unstructured`` prunes on one worker."""

    def main():
        P = distdl.world()
        alone = nn.Conv1d(2, 5, 3, padding=1, dtype=torch.float64)
        with torch.no_grad():
            alone.weight.copy_(noise(5, 2, 3))
            alone.bias.copy_(noise(5))
        module, refused = (
            distdl.distribute(copy.deepcopy(alone), P.reshape(1, 1, -1), weights="sharded") for _ in range(2)
        )
        for one in (alone, module, refused) if before else ():
            prune.identity(one, "weight")
        if before:  # (the mask of what is left of the mask before is a tensor that nobody else sees)
            prune.l1_unstructured(module, "weight", 0.5)
        else:
            with pytest.raises(RuntimeError, match="of the whole weight: ") as caught:
                prune.l1_unstructured(refused, "weight", 0.5)
            code = str(caught.value).partition("of the whole weight: ")[2]
            exec(code, {"module": module, "prune": prune, "torch": torch})
        prune.l1_unstructured(alone, "weight", 0.5)
        assert torch.equal(module.weight_mask, alone.weight_mask)
        losses = []
        for one in (alone, module):
            loss = one(noise(2, 2, 7)).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
        assert_close(module.weight_orig.grad, alone.weight_orig.grad)

    distdl.run_workers(main, 4)


@pytest.mark.parametrize("used", [False, True])
def test_who_refers_to_a_parameter_has_its_share(used):
    """An optimiser that was made before the model was distributed, with its state, and a gradient."""

    def work():
        sequential = network()
        before = copy.deepcopy(sequential)
        models = (before, sequential)
        optimisers = [OPTIMISERS["sgd"](one.parameters()) for one in models]
        held = [one.last.weight for one in models]
        if used:
            for one, optimiser in zip(models, optimisers, strict=True):
                for _ in range(2):
                    one(batch(0)[0]).square().mean().backward()
                    optimiser.step()
        model = distdl.distribute(before, partition((2, 1, 2)), weights="sharded", fallback="error")
        assert model.last.weight is held[0] and type(held[0]) is distdl.GlobalTensor
        assert model.tied.weight is model.inner[0].weight
        for step in (1, 2):
            x, target = batch(step)
            for one, optimiser, weight in zip((model, sequential), optimisers, held, strict=True):
                ((one(x) - target).square().mean() + weight.square().sum()).backward()
                optimiser.step()
        assert_same_state(model, sequential)

    run(work)


@pytest.mark.parametrize("held_by", ["a graph", "a weak reference"])
def test_parameters_that_something_holds_on_to_are_replaced(held_by):
    def work():
        model, x = network(), batch(0)[0]
        before = dict(model.named_parameters())
        kept = model(x).sum() if held_by == "a graph" else weakref.ref(model.scale)
        distdl.distribute(model, partition((3, 1)), weights="sharded")
        if isinstance(kept, torch.Tensor):
            kept.backward()
        model.norm.reset_running_stats()
        model(x).sum().backward()
        for name, one in model.named_parameters():
            assert one is not before[name]
            if held_by == "a graph" and one.grad is not None:
                assert_close(one.grad, before[name].grad)

    run(work)


def test_two_models_may_have_a_parameter_in_common():
    def pair():
        models = [network(lambda: nn.Linear(3, 3), seed) for seed in (1, 2)]
        models[1].weight = models[0].weight
        return models

    def work():
        sequential, models = pair(), pair()
        for one, grid in zip(models, ((3, 1), (1, 2)), strict=True):
            distdl.distribute(one, partition(grid), weights="sharded")
        assert models[0].weight is models[1].weight
        x = noise(5, 3)
        for first, second in (models, sequential):
            optimiser = OPTIMISERS["sgd"]([*first.parameters(), second.bias])
            for _ in range(2):
                optimiser.zero_grad()
                (first(x).sin() * second(x)).mean().backward()
                optimiser.step()
        for ours, theirs in zip(models, sequential, strict=True):
            assert_same_state(ours, theirs)

    run(work)


@pytest.mark.parametrize(
    ("first", "second", "kept"), [("replicated", "sharded", "whole"), ("sharded", "replicated", "in shares")]
)
def test_a_parameter_that_two_models_have_lies_in_both_alike(first, second, kept):
    def work():
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        other.weight = one.weight
        distdl.distribute(one, partition((3, 1)), weights=first)
        with pytest.raises(ValueError, match=f"weight is a parameter of another .* has it {kept}"):
            distdl.distribute(other, partition((3, 1)), weights=second)

    run(work)


class _InOneMemory(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.c = nn.Buffer(torch.zeros(4))
        tie(self)


TIES = {
    "tied": ("a.weight and b.weight do", lambda m: setattr(m.b.weight, "data", m.a.weight.data)),
    "transposed": ("a.weight and b.weight", lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight.data.t()))),
    "row and whole": ("a.weight and b.bias", lambda m: setattr(m.b.bias, "data", m.a.weight.data[3])),
    "buffer": ("b.bias and c do", lambda m: setattr(m, "c", m.b.bias.data)),
}


@pytest.mark.parametrize("tie", TIES)
def test_weights_in_one_memory_are_refused_in_shares(tie):
    text, write = TIES[tie]

    def work():
        with pytest.raises(ValueError, match=text):
            distdl.distribute(_InOneMemory(write), partition((2, 1)), weights="sharded")
        distdl.distribute(_InOneMemory(write), partition((2, 1)))

    run(work)


def test_weights_apart_in_one_memory_are_taken_in_shares():
    def tie(model):
        flat, columns = torch.zeros(8), torch.zeros(4, 8)
        model.a.bias.data, model.b.bias.data = flat[:4], flat[4:]
        model.a.weight.data, model.b.weight.data = columns[:, :4], columns[:, 4:]

    run(lambda: distdl.distribute(_InOneMemory(tie), partition((2, 1)), weights="sharded"))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_model_that_keeps_what_it_has_computed_is_copied_nowhere():
    layers = [nn.utils.weight_norm(nn.Linear(5, 2).double()) for _ in range(4)]

    def work():
        P = distdl.world()
        model = distdl.distribute(nn.Sequential(layers[P.rank]), P.reshape(2, 2), weights="sharded")
        model(distdl.distribute_tensor(noise(4, 5), P.reshape(2, 2))).sum().backward()
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(model)

    distdl.run_workers(work, 4)
