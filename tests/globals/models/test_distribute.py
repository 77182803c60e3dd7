"""A distributed model trains as the sequential one does: losses, gradients, weights, and what else belongs to it."""

import copy
import inspect
import threading
import warnings
from collections import OrderedDict

import pytest
import torch
from nets import (
    GRIDS,
    OPTIMISERS,
    Checkpointed,
    Regularised,
    assert_close,
    assert_identical,
    assert_same_state,
    assert_trains_alike,
    backward_of_parameters,
    backward_thrice,
    batch,
    network,
    partition,
    run,
)
from same import noise
from torch import nn
from torch.utils.checkpoint import checkpoint

import distdl


def distributed(model, grid, weights):
    return distdl.distribute(copy.deepcopy(model), partition(grid), weights=weights, fallback="error")


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training(optimiser, set_to_none):
    def work():
        for grid in GRIDS if set_to_none else GRIDS[:1]:
            sequential = network()
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid), fallback="error")
            assert_trains_alike(model, sequential, optimiser, [set_to_none] * 5)
            assert_identical(model)

    run(work)


def test_all_gradients_travel_in_one_message_and_weights_in_none():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv1d(3, 6, 1), nn.GELU(), nn.Conv1d(6, 6, 1), nn.PReLU(6), nn.Conv1d(6, 2, 1)
            )
            self.scale = nn.Parameter(torch.ones(2, 1))

        def forward(self, x):
            return self.layers(x) * self.scale.exp() + self.scale.mean()

    def work():
        model = distdl.distribute(network(Plain), partition((2, 1, 2)))
        x = distdl.distribute_tensor(batch(0)[0], partition((2, 1, 2)))
        y = model(x)
        with distdl.ledger() as book:
            y = model(x)
        assert not book.entries, str(book)
        loss = y.square().sum()
        with distdl.ledger() as book:
            loss.backward()
        (weights,) = [one for one in book.entries if "gradients of replicated tensors" in one.layer]
        assert weights.calls == 1
        # the only other is that of the loss, which goes back from one worker to all
        assert sum(one.calls for one in book.entries) == 2, str(book)

    run(work)


def test_several_forwards_before_one_backward():
    def work():
        sequential = network()
        model = distdl.distribute(copy.deepcopy(sequential), partition((2, 1, 2)), fallback="error")
        for one in (model, sequential):
            loss = 0.0
            for step in range(3):
                x, target = batch(step)
                loss = loss + (one(x) - target).abs().mean() / 3
            loss.backward()
            x, target = batch(4)
            (one(x) - target).square().mean().backward()  # and it adds up over backwards
        assert_same_state(model, sequential)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_a_backward_may_run_twice_and_be_differentiated(weights):
    def work():
        sequential = network()
        model = distributed(sequential, (3, 1, 1), weights)
        for one in (model, sequential):
            backward_thrice(one)
        assert_same_state(model, sequential)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("by", ["inside", "list", "result", "outside", "alone", "gradient", "twice"])
def test_losses_of_parameters(by, weights):
    def work():
        sequential = network(lambda: Regularised(by))
        model = distributed(sequential, (2, 1, 2), weights)
        x, target = batch(0)
        target = distdl.distribute_tensor(target, partition((2, 1, 2)))
        losses = []
        for one, wanted in ((model, target), (sequential, target.full_tensor())):
            losses.append(backward_of_parameters(one, by, x, wanted).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        assert_same_state(model, sequential)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("by", ["module", "function", "nested", "whole"])
def test_activation_checkpointing(by, weights):
    def work():
        for grid in GRIDS:
            sequential = network(lambda: Checkpointed(by))
            model = distributed(sequential, grid, weights)
            for one in (model, sequential):
                loss = 0.0
                for step in range(2):
                    x, target = batch(step)
                    y = checkpoint(one, x, use_reentrant=False) if by == "whole" else one(x)
                    loss = loss + (y - target).square().mean()
                loss.backward()
            assert_same_state(model, sequential)

    run(work)


def test_weights_that_are_computed():
    def make():
        model = nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv1d(6, 2, 3, padding=1))
        with torch.no_grad():  # (what parametrisations begin with follows from these)
            model[0].weight.copy_(noise(6, 3, 3))
            model[2].weight.copy_(noise(2, 6, 3))
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrizations.orthogonal(model[2], orthogonal_map="cayley", use_trivialization=False)
        return model

    def work():
        sequential = network(make)
        model = distdl.distribute(copy.deepcopy(sequential), partition((2, 1, 2)), fallback="error")
        optimisers = [OPTIMISERS["adamw"](one.parameters()) for one in (model, sequential)]
        for step in range(3):
            x, target = batch(step)
            for one, optimiser in zip((model, sequential), optimisers, strict=True):
                optimiser.zero_grad()
                (one(x) - target).square().mean().backward()
                optimiser.step()
            assert_same_state(model, sequential)

    run(work)


class Tokens(nn.Module):
    """Some of the samples are replaced by a token, as the models do that fill in masked patches."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 11))

    def forward(self, x, mask):
        tokens = self.token.expand(4, 3, -1)
        mask = mask.unsqueeze(-1).type_as(tokens)
        chosen = (mask > 0).to(tokens)
        x = x * self.token.exp()
        return x * (1 - mask) + tokens.to(x) * chosen + self.token.type_as(other=x)


@pytest.mark.parametrize("grid", [(3, 1), (1, 2)])
def test_the_dtype_of_a_parameter(grid):
    def work():
        sequential = network(Tokens)
        model = distdl.distribute(copy.deepcopy(sequential), partition((*grid, 1)), fallback="error")
        x, _ = batch(0)
        mask = x[..., 0] > 0
        sequential(x, mask).square().sum().backward()
        given = distdl.distribute_tensor(x, partition((*grid, 1))).requires_grad_()
        model(given, distdl.distribute_tensor(mask, partition(grid))).square().sum().backward()
        assert_same_state(model, sequential)

    run(work)


def test_a_module_that_a_forward_makes_is_moved_to_where_its_input_is():
    class Resampled(nn.Module):
        def forward(self, x):
            smooth = nn.Conv1d(3, 3, 3, bias=False, groups=3).to(x).requires_grad_(False)
            smooth.weight.fill_(0.5)
            return smooth(x)

    def work():
        x, _ = batch(0)
        model = distdl.distribute(Resampled(), partition((1, 1, 2)), fallback="error")
        y = model(distdl.distribute_tensor(x, partition((1, 1, 2))))
        torch.testing.assert_close(y.full_tensor(), Resampled()(x))

    run(work)


class Named(OrderedDict):
    """A dict whose values are attributes, too, as libraries return them and pass them on."""

    def __getattr__(self, name):
        return self[name]


def test_what_a_forward_takes_is_known_and_is_what_it_gets():
    class Told(nn.Module):
        def forward(self, x, told=None, scale: float = 1.0):
            return x * told.other * scale

    def work():
        model = distdl.distribute(Told(), partition((3, 1)), fallback="error")
        assert inspect.signature(model.forward) == inspect.signature(Told().forward)
        assert inspect.signature(copy.deepcopy(model).forward) == inspect.signature(Told().forward)
        x, plain = batch(0)[0], noise(4, 3, 11, seed=5)
        for given in (Named(other=plain), Named(other=distdl.distribute_tensor(plain, partition((3, 1))))):
            assert_close(model(x, told=given, scale=2), Told()(x, Named(other=plain), 2.0))
            assert_close(model(x, given), Told()(x, Named(other=plain)))
        untouched = Named(other=3.0)
        assert distdl.distribute(Same(), partition((3, 1)))(untouched) is untouched
        assert distdl.distribute(Same(), partition((3, 1)))(nested) is nested

    class Same(nn.Module):
        def forward(self, given):
            return given

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # (torch calls these a prototype)
        nested = torch.nested.nested_tensor([noise(3, 2), noise(1, 2)])  # which has no shape
    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_a_state_dict_is_that_of_the_sequential_model(weights):
    """Of the model, of a module in it, and of a copy, which is a model by itself."""

    def work():
        saved = network(seed=1).state_dict()
        model = distributed(network(), (3, 1), weights)
        model.load_state_dict(saved)
        sequential = network()
        sequential.load_state_dict(model.state_dict())
        assert_same_state(model, sequential)
        part = model.inner.state_dict()
        assert all(torch.equal(part[name], value) for name, value in sequential.inner.state_dict().items())
        twin = copy.deepcopy(model)
        x, target = batch(0)
        for one in (twin, sequential):
            (one(x) - target).square().mean().backward()
        assert_same_state(twin, sequential)
        assert model.first.weight.grad is None and isinstance(twin.first.weight, nn.Parameter)
        if weights == "replicated":
            assert twin.first.weight.data_ptr() != model.first.weight.data_ptr()

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_gradient_scaling(weights):
    def work():
        sequential = network()
        model = distributed(sequential, (2, 1, 2), weights)
        for one in (model, sequential):
            optimiser = OPTIMISERS["sgd"](one.parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
            for step in range(4):
                x, target = batch(step)
                optimiser.zero_grad()
                loss = (one(x) - target).square().mean()
                if step == 1:
                    loss = loss * float("inf")  # this step is left out
                scaler.scale(loss).backward()
                if step < 3:
                    scaler.unscale_(optimiser)
                    nn.utils.clip_grad_norm_(one.parameters(), 1.0)
                scaler.step(optimiser)
                scaler.update()
            one.scale_at_last = scaler.get_scale()
        assert model.scale_at_last == sequential.scale_at_last
        for (name, p), q in zip(model.named_parameters(), sequential.parameters(), strict=True):
            assert_close(p, q, name)

    run(work)


def test_lazy_modules_are_refused():
    def work():
        with pytest.raises(ValueError, match="parameters have their shapes; weight gets it in a forward"):
            distdl.distribute(nn.LazyLinear(3), partition((3, 1)))

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_weights_without_values_are_refused(weights):
    def work():
        P = partition((3, 1))
        with torch.device("meta" if P.comm.rank == 1 else "cpu"):
            model = nn.Linear(4, 3).double()
        with pytest.raises(ValueError, match=r"on worker 1, weight is on the meta device.*to_empty"):
            distdl.distribute(model, P, weights=weights)
        if P.comm.rank == 1:
            model.to_empty(device="cpu")
        model = distdl.distribute(model, P, weights=weights)
        expected = nn.functional.linear(noise(6, 4), *model.state_dict().values())
        assert torch.allclose(model(noise(6, 4)).full_tensor(), expected)

    run(work)


def test_models_may_share_what_has_no_state():
    """As an activation that is the default argument of a constructor."""

    def work():
        shared, linear = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.0)), torch.nn.Linear(7, 7).double()
        x, P = noise(4, 7), partition((2, 1))
        for seed in (1, 2):
            own = torch.nn.Linear(7, 7, bias=False).double()
            with torch.no_grad():
                own.weight.copy_(noise(7, 7, seed=seed))
            model = distdl.distribute(torch.nn.Sequential(own, shared), P)
            assert_close(model(distdl.distribute_tensor(x, P)).full_tensor(), torch.tanh(x @ noise(7, 7, seed=seed).T))
        distdl.distribute(torch.nn.Sequential(linear), P)
        with pytest.raises(ValueError, match="its module 1 is distributed already, over"):
            distdl.distribute(torch.nn.Sequential(shared, linear), P)

    run(work)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_cannot_be_distributed():
    def work():
        P = partition((3, 1))
        with pytest.raises(ValueError, match=r"weights to be one of .*replicated.*; got 'half'"):
            distdl.distribute(network(), P, weights="half")
        with pytest.raises(ValueError, match="fallback to be one of warn, error, silent; got 'maybe'"):
            distdl.distribute(network(), P, fallback="maybe")
        model = distdl.distribute(network(), P)
        with pytest.raises(ValueError, match="Net is distributed already, over"):
            distdl.distribute(model, P)
        with pytest.raises(ValueError, match=r"its module 0 is distributed already, over"):
            distdl.distribute(nn.Sequential(model), P)
        with pytest.raises(ValueError, match=r"its module 0 is compiled by torch.jit"):
            distdl.distribute(nn.Sequential(scripted), P)

    scripted = torch.jit.script(nn.Linear(2, 2))
    run(work)


def test_an_error_in_the_forward_leaves_the_model_as_it_was():
    def work():
        sequential = network()
        model = distdl.distribute(copy.deepcopy(sequential), partition((3, 1)), fallback="error")
        with pytest.raises(RuntimeError):
            model(noise(4, 5, 11))  # (5 channels instead of 3)
        x, target = batch(0)
        for one in (model, sequential):
            (one(x) - target).square().mean().backward()
        assert_same_state(model, sequential)

    run(work)


def test_a_distributed_model_is_copied_whatever_its_forward_has_as_defaults():
    class Locked(torch.nn.Linear):
        def forward(self, x, lock=threading.Lock()):  # noqa: B008 (it cannot be copied)
            return super().forward(x)

    def work():
        model = distdl.distribute(Locked(3, 2), distdl.world().reshape(2, 1))
        copied = copy.deepcopy(model)
        assert inspect.signature(copied.forward) == inspect.signature(model.forward)
        assert copied(torch.ones(6, 3)).shape == (6, 2)

    distdl.run_workers(work, 2, "threads")
