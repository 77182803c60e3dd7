"""A distributed model trains as the sequential one does: losses, gradients, weights, and what else belongs to it."""

import copy
import functools
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


def test_a_backward_may_run_twice_and_be_differentiated():
    def work():
        sequential = network()
        model = distdl.distribute(copy.deepcopy(sequential), partition((3, 1, 1)), fallback="error")
        for one in (model, sequential):
            backward_thrice(one)
        assert_same_state(model, sequential)

    run(work)


@pytest.mark.parametrize("by", ["inside", "list", "result", "outside", "alone", "gradient", "twice"])
def test_losses_of_parameters(by):
    def work():
        sequential = network(lambda: Regularised(by))
        model = distdl.distribute(copy.deepcopy(sequential), partition((2, 1, 2)), fallback="error")
        x, target = batch(0)
        target = distdl.distribute_tensor(target, partition((2, 1, 2)))
        losses = []
        for one, wanted in ((model, target), (sequential, target.full_tensor())):
            losses.append(backward_of_parameters(one, by, x, wanted).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        assert_same_state(model, sequential)

    run(work)


class _Frozen(nn.Module):
    """A layer, and a weight of the model's own, that are frozen for a while in the middle of each forward."""

    def __init__(self, by):
        super().__init__()
        self.layer = nn.Conv1d(3, 3, 3, padding=1)
        self.weight = nn.Parameter(torch.ones(2, 3, 1))
        self.by = by

    def _train(self, wanted):
        if self.by == "list":
            for parameter in self.parameters():
                parameter.requires_grad = wanted
        elif self.by == "module":
            self.requires_grad_(wanted)
        else:
            assert self.weight.requires_grad_(wanted).requires_grad is wanted
            self.layer.weight.requires_grad = wanted
            assert self.layer.weight.requires_grad is wanted

    def forward(self, x):
        y = nn.functional.conv1d(self.layer(x), self.weight)
        self._train(False)
        z = nn.functional.conv1d(self.layer(x + y.mean()), self.weight)
        self._train(True)
        return y + z * nn.functional.conv1d(self.layer(x), self.weight)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("by", ["list", "module", "name"])
@pytest.mark.parametrize("wanted", [True, False])
def test_weights_that_are_frozen_in_the_middle_of_a_forward(weights, by, wanted):
    def work():
        for grid in GRIDS[:2]:
            sequential = network(lambda: _Frozen(by)).requires_grad_(wanted)
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid), weights=weights, fallback="error")
            for step in range(2):
                x, target = batch(step)
                for one in (model, sequential):
                    one.zero_grad()
                    one.requires_grad_(wanted)
                    (one(x) - target).square().mean().backward()
                assert_same_state(model, sequential)

    run(work)


class _Named(nn.Module):
    """Its forward asks what is a parameter, and gives its parameters other names."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 2, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(2, 1))
        self.frozen = nn.Parameter(torch.ones(2, 1), requires_grad=False)

    def forward(self, x):
        asked = (self.gain, self.frozen, self.get_parameter("conv.weight"), self.gain * 1, self.gain.detach(), x)
        assert [isinstance(one, nn.Parameter) for one in asked] == [True] * 3 + [False] * 3
        with pytest.raises(TypeError, match="cannot assign"):
            self.gain = self.gain * 2
        self.other = self.gain
        weight, self.conv.weight = self.conv.weight, nn.Parameter(self.conv.weight.detach() * 2)
        y = self.conv(x)
        self.conv.weight = weight
        return (self.conv(x) + y.detach()) * self.other + self.gain * self.frozen


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_what_a_forward_reads_in_the_place_of_a_parameter_is_a_parameter(weights):
    def work():
        sequential = network(_Named)
        model = distdl.distribute(copy.deepcopy(sequential), partition((2, 1, 2)), weights=weights, fallback="error")
        for step in range(2):
            x, target = batch(step)
            for one in (model, sequential):
                (one(x) - target).square().mean().backward()
            assert_same_state(model, sequential)
            assert model.other is model.gain

    run(work)


class _Inner(nn.Module):
    """Its forward trains a copy of a weight, and makes a parameter of one the first time."""

    def __init__(self, by):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.by = by

    def _trained(self, x):
        weight = self.weight.detach().clone()
        fast = nn.Parameter(weight) if self.by == "parameter" else weight.requires_grad_()
        assert fast.is_leaf and fast.requires_grad and isinstance(fast, nn.Parameter) is (self.by == "parameter")
        optimiser = torch.optim.SGD([fast], 0.1, momentum=0.9)
        for _ in range(2):
            loss = (fast @ x.detach() - 1).square().mean() + 0.1 * fast.square().sum()
            if self.by == "optimiser":
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            elif self.by == "grad":
                fast.data -= 0.1 * torch.autograd.grad(loss, fast)[0]
            else:
                loss.backward()
                with torch.no_grad():
                    fast.sub_(fast.grad, alpha=0.1)
                fast.grad = None
        return fast.detach()

    def forward(self, x):
        if not hasattr(self, "other"):
            self.other = nn.Parameter(self.weight.detach() * 2)
            self.frozen = nn.Parameter(self.weight.detach() * 3, requires_grad=False)
        return (self.weight + self.other) @ x + (self.frozen * self._trained(x)) @ x


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("by", ["optimiser", "grad", "backward", "parameter"])
def test_leaves_that_a_forward_makes_of_weights_are_variables(weights, by):
    def work():
        for grid in GRIDS:
            sequential = network(lambda: _Inner(by))
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid), weights=weights, fallback="error")
            for step in range(3):
                x, target = batch(step)
                for one in (model, sequential):
                    one.zero_grad()
                    (one(x) - target).square().mean().backward()
                    torch.optim.SGD(one.parameters(), 0.1).step()
                assert_same_state(model, sequential)

    run(work)


@pytest.mark.parametrize("by", ["module", "function", "nested"])
def test_activation_checkpointing(by):
    def work():
        for grid in GRIDS:
            sequential = network(lambda: Checkpointed(by))
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid), fallback="error")
            for one in (model, sequential):
                loss = 0.0
                for step in range(2):
                    x, target = batch(step)
                    loss = loss + (one(x) - target).square().mean()
                loss.backward()
            assert_same_state(model, sequential)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("by", ["part", "nested", "mixed", "plain"])
def test_checkpoints_outside_of_the_forward(by, weights):
    """What a checkpoint recomputes reads the weights as it has read them, also where forwards have gone before."""

    def parts(model, x):
        again = functools.partial(checkpoint, use_reentrant=False)
        if by == "part":
            return again(lambda x: model.body(x) * model.weight, x)
        if by == "nested":
            return again(lambda x: again(model.body, x).sin() * model.weight, x)
        if by == "mixed":
            return again(lambda x: model.body(model(x).sum(1, keepdim=True) * x), x)
        return model.body(x) * again(lambda one: one * model.weight.sin(), noise(6, 1))

    def work():
        sequential = network(lambda: Checkpointed("module"))
        twin = copy.deepcopy(sequential)
        model = distdl.distribute(twin, partition((2, 1, 2)), fallback="error", weights=weights)
        for one in (model, sequential):
            for step in range(2):
                x, target = batch(step)
                x = distdl.distribute_tensor(x, partition((2, 1, 2))) if one is model else x
                loss = (one(x) - target).square().mean() + parts(one, x).square().mean()
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


def test_checkpoints_are_those_of_the_sequential_model():
    def work():
        saved = network(seed=1).state_dict()
        model = distdl.distribute(network(), partition((3, 1)), fallback="error")
        model.load_state_dict(saved)
        sequential = network()
        sequential.load_state_dict(model.state_dict())
        assert_same_state(model, sequential)
        twin = copy.deepcopy(model)  # a model by itself
        x, target = batch(0)
        for one in (twin, sequential):
            (one(x) - target).square().mean().backward()
        assert_same_state(twin, sequential)
        assert model.first.weight.grad is None
        assert twin.first.weight.data_ptr() != model.first.weight.data_ptr()

    run(work)


def test_gradient_scaling():
    def work():
        sequential = network()
        model = distdl.distribute(copy.deepcopy(sequential), partition((2, 1, 2)), fallback="error")
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
                scaler.unscale_(optimiser)
                nn.utils.clip_grad_norm_(one.parameters(), 1.0)
                scaler.step(optimiser)
                scaler.update()
            one.scale_at_last = scaler.get_scale()
        assert model.scale_at_last == sequential.scale_at_last
        for (name, p), q in zip(model.named_parameters(), sequential.parameters(), strict=True):
            assert_close(p, q, name)

    run(work)


@pytest.mark.parametrize("steps", [200, pytest.param(1000, marks=pytest.mark.every_case)])
def test_replicas_stay_the_same_for_many_steps(steps):
    def work():
        model = distdl.distribute(network(lambda: nn.Conv1d(2, 2, 3, padding=1)), partition((1, 1, 2)))
        optimiser = torch.optim.SGD(model.parameters(), 0.003, momentum=0.9)
        x = noise(1, 2, 5)
        first = last = None
        for _ in range(steps):
            optimiser.zero_grad()
            loss = (model(x) - 1).square().sum()
            loss.backward()
            optimiser.step()
            last = loss
            first = loss if first is None else first
        assert float(last) < 0.5 * float(first)
        assert_identical(model)

    run(work, 3)


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


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_gradient_that_is_made_of_activations(make, options, weights):
    """It is a global tensor, also where the parameter is a plain one; a backward adds to it."""
    sequential = nn.Linear(5, 3).double()

    def steps(model, x):
        optimiser = make(model.parameters(), 0.1, **options)
        for _ in range(2):
            with torch.no_grad():
                model.bias.grad = model(x).sum(0)
            optimiser.step()
            model(x).square().sum().backward()
        return list(model.state_dict().values()), [one.grad for one in model.parameters()]

    state, gradients = steps(copy.deepcopy(sequential), noise(4, 5))

    def work():
        P = distdl.world()[:2].reshape(2, 1)
        model, x = (
            distdl.distribute(copy.deepcopy(sequential), P, weights=weights),
            distdl.distribute_tensor(noise(4, 5), P),
        )
        if make is torch.optim.Adam and options == {"foreach": True} and weights == "replicated":
            with pytest.raises(TypeError, match="_foreach_lerp_ would write a global tensor into a plain one"):
                steps(model, x)
            return
        ours, theirs = steps(model, x)
        for one, other in zip([*ours, *theirs], [*state, *gradients], strict=True):
            assert_close(one, other)

    distdl.run_workers(work, 3)


def test_the_scaler_of_a_program_in_double_precision():
    def work():
        P = distdl.world().reshape(2, 1)
        model = distdl.distribute(nn.Linear(3, 2), P)
        scaler, optimiser = distdl.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), 0.1)
        scaler.scale(model(distdl.distribute_tensor(torch.ones(4, 3), P)).sum()).backward()
        scaler.step(optimiser)
        scaler.update()
        return scaler.get_scale()

    torch.set_default_dtype(torch.float64)
    try:
        assert distdl.run_workers(work, 2, "threads") == [8.0, 8.0]
    finally:
        torch.set_default_dtype(torch.float32)


class _Flat(nn.Module):
    """Layers whose weights are parts of one parameter, which each forward gives them."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(noise(22))
        self.layers = nn.ModuleList([nn.Conv1d(3, 2, 3, padding=1), nn.Linear(1, 2)])
        for layer in self.layers:
            del layer.weight, layer.bias

    def forward(self, x):
        conv, linear = self.layers
        conv.weight, conv.bias = self.flat[:18].view(2, 3, 3), self.flat[18:20]
        linear.weight, linear.bias = self.flat[20:, None], self.flat[:2]
        return conv(x) + linear(x[:, :1, :1])[..., :1] + linear(x[..., :1].mean(1, keepdim=True)).mean()


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_layers_whose_weights_each_forward_gives_them(weights):
    def work():
        sequential = network(_Flat)
        model = distdl.distribute(copy.deepcopy(sequential), partition((2, 1, 2)), weights=weights)
        for step in range(2):
            x, target = batch(step)
            for one in (model, sequential):
                one.zero_grad()
                (one(x) - target).square().mean().backward()
            assert_same_state(model, sequential)

    run(work)
