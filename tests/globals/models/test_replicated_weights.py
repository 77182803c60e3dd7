"""Parameters that every worker has whole, and what stands in their places in a forward."""

import copy
from copy import deepcopy

import pytest
import torch
from launched import assert_close, on_workers, split
from nets import GRIDS, assert_identical, assert_same_state, batch, network, partition, run
from same import noise
from torch import nn
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.globals.models import buckets

x35 = noise(3, 5)


@on_workers
def test_a_computed_parameter_of_a_functional_call_keeps_its_gradient():
    def loss(model, x):
        weights = {"w": x.exp().mean(0), "v": x.detach()[0]}
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = (torch.nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))

        def forward(self, x):
            return x * self.w + self.v

    x_plain, x = x35.clone().requires_grad_(), split(x35).requires_grad_()
    model = distdl.distribute(Scaled(), x.layout.partition)
    for _ in range(2):
        loss(Scaled(), x_plain).backward()
        loss(model, x).backward()
        assert_close(x.grad, x_plain.grad)
    assert model.w.grad is None and torch.equal(model.w, torch.ones(5))


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@on_workers
def test_a_parameter_that_another_model_has_computed(weights):
    def train(models, x):
        hyper, model = models
        bias = hyper(2.0)
        y = torch.func.functional_call(model, {"bias": bias}, (x,))
        (y.square().mean() + bias.sum()).backward()
        return [p.grad for one in models for p in one.parameters()]

    class Hyper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(noise(5))

        def forward(self, factor):
            return self.w.sin() * factor

    def models():
        linear = torch.nn.Linear(5, 5, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(noise(5, 5))
            linear.bias.copy_(noise(5))
        return Hyper(), linear

    x = split(x35)
    ours = train([distdl.distribute(one, x.layout.partition, weights) for one in models()], x)
    for one, other in zip(ours, train(models(), x35), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other)


MAY_ONLY_READ = "in shares, which a forward may only read"


class Merged(nn.Module):
    """A layer that evaluates by another one, whose weights it computes anew (as SPAN and other merged layers do)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.second(self.first(x))
        self.both.weight.data = self.second.weight.data @ self.first.weight.data
        with torch.no_grad():
            self.both.bias.copy_(self.second.weight @ self.first.bias + self.second.bias)
        return self.both(x)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_weights_that_an_evaluation_computes(weights):
    torch.manual_seed(0)
    merged = Merged().double()
    y = merged.eval()(x35)

    def work() -> None:
        P = distdl.world()[:2].reshape(2, 1)
        model = distdl.distribute(Merged().double(), P, weights=weights)
        model.load_state_dict(initial)
        x = distdl.distribute_tensor(x35, P)
        if weights == "sharded":
            with torch.no_grad(), pytest.raises(RuntimeError, match=MAY_ONLY_READ):
                model.eval()(x)
            return
        with torch.no_grad():
            assert_close(model.eval()(x), y)
        for name, one in model.state_dict().items():
            torch.testing.assert_close(one, merged.state_dict()[name])
        assert_close(model(x), y)

    initial = {name: torch.zeros_like(one) if "both" in name else one for name, one in merged.state_dict().items()}
    distdl.run_workers(work, 3)


class Started(nn.Module):
    """A layer whose first batches set its scale, as those of normalising flows do."""

    def __init__(self, start) -> None:
        super().__init__()
        self.linear, self.start, self.left = nn.Linear(5, 5), start, 2
        self.scale = nn.Parameter(torch.ones(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        alias = None
        if self.left:
            self.left -= 1
            alias = self.start(self, x.std(0, keepdim=True))
        return x * self.scale + (0 if alias is None else alias)


def _assigned(model, std):
    model.scale += std


def _assigned_data(model, std):
    model.scale.data += std


def _kept(model, std):
    alias = model.scale.data
    alias.view(-1)[1:] = std[0, 1:]
    return alias * 2


def _read_before(model, std):
    read = model.scale * 2
    with torch.no_grad():
        read = read * model.scale.data.norm()
        model.scale.data[0, 1:] *= 0.5
    return read


STARTS = {
    "data": lambda model, std: model.scale.data.copy_(std),
    "view of data": lambda model, std: model.scale.data.view(-1)[1:].copy_(std[0, 1:]).sum(),
    "number": lambda model, std: model.scale.data[0, 2].fill_(std.sum()),
    "assigned data": _assigned_data,
    "kept data": _kept,
    "without gradients": torch.no_grad()(lambda model, std: model.scale.copy_(std)),
    "view": torch.no_grad()(lambda model, std: model.scale.view(-1)[1:].mul_(std[0, 1:]).sum()),
    "assigned": torch.no_grad()(_assigned),
    "data without gradients": torch.no_grad()(lambda model, std: model.scale.data.add_(std)),
    "data behind a graph": _read_before,
    "plain data": torch.no_grad()(lambda model, std: model.scale.data.mul_(0.3)),
    "plain": torch.no_grad()(lambda model, std: model.scale.mul_(0.3)),
}


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_weights_that_the_first_batches_set(start, weights):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Started(start)).double()
    wanted = _two_steps(deepcopy(model), x35)

    def work() -> None:
        P = distdl.world()[1:].reshape(2, 1)
        distributed = distdl.distribute(deepcopy(model), P, weights=weights)
        x = distdl.distribute_tensor(x35, P)
        if weights == "sharded":
            with pytest.raises(RuntimeError, match=MAY_ONLY_READ):
                distributed(x)
            return
        for ours, theirs in zip(_two_steps(distributed, x), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)

    distdl.run_workers(work, 3)


def test_a_backward_does_not_read_what_a_later_forward_has_written():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Started(STARTS["plain"])).double()

    def work() -> None:
        P = distdl.world()[1:].reshape(2, 1)
        distributed = distdl.distribute(deepcopy(model), P)
        x = distdl.distribute_tensor(x35, P)
        y = distributed(x)
        distributed(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    distdl.run_workers(work, 3)


class Masked(nn.Linear):
    """A layer that masks its weight in each forward, as PixelCNN's do."""

    def __init__(self, style: str) -> None:
        super().__init__(5, 5)
        self.style = style
        self.register_buffer("mask", torch.ones(5, 5).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.style == "set":
            self.weight.data = self.weight.data * self.mask
        elif self.style == "assigned":
            self.weight.data *= self.mask
        else:
            self.weight.data.mul_(self.mask)
        return super().forward(x)


class Listed(nn.Linear):
    """A layer that sets its weights where nobody reads them by name."""

    def __init__(self, style: str) -> None:
        super().__init__(5, 5)
        self.style, self.halved = style, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.style == "vector":
            vector = nn.utils.parameters_to_vector(self.parameters()).detach()
            nn.utils.vector_to_parameters(vector.clamp(-0.2, 0.2), self.parameters())
        elif self.style == "without gradients":
            with torch.no_grad():
                for p in self.parameters():
                    p.data = p.clamp(-0.2, 0.2)
        elif self.style == "applied":
            self._apply(lambda p: p.clamp(-0.2, 0.2))
        elif self.style == "transposed":
            for p in self.parameters():
                p.data = p.data.t()
        elif self.style == "transposed by name":
            self.weight.data = self.weight.data.t()
        elif self.style == "between two uses":
            y = super().forward(x)
            self.weight.data = self.weight.data / 2
            return y + super().forward(x)
        elif self.style == "after a use":
            y = super().forward(x)
            self.weight.data = self.weight.data / 2
            return y
        elif self.style == "after a use as it is":
            y = x @ self.weight + self.weight.square().sum() + x * self.bias
            self.weight.data = self.weight.data / 2
            self.bias.data = self.bias.data / 2
            return y
        elif self.style == "after a use of all of it":
            y = x @ self.weight[:] + self.weight.view(5, 5).pow(3).sum() + (x[0, 0] * self.weight.detach()).sum()
            self.weight.data = self.weight.data / 2
            return y
        elif self.style == "before a checkpoint":
            for p in self.parameters():
                p.data = p.data / 2
            return checkpoint(super().forward, x, use_reentrant=False)
        elif self.style == "in a checkpoint":
            return checkpoint(self._halved, x, use_reentrant=False)
        else:
            return self.to(torch.float32)(x.float()).double() if x.dtype is torch.float64 else super().forward(x)
        return super().forward(x)

    def _halved(self, x: torch.Tensor) -> torch.Tensor:
        if not self.halved:  # (and not when it is recomputed)
            self.halved = True
            for p in self.parameters():
                p.data = p.data / 2
        return super().forward(x)


def _two_steps(model, x):
    optimiser = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        model(x).square().sum().backward()
        optimiser.step()
    return list(model.state_dict().values())


def _assert_steps_are_sequential(model, weights, writes=True):
    wanted = _two_steps(deepcopy(model), x35)

    def work() -> None:
        P = distdl.world()[:2].reshape(2, 1)
        distributed = distdl.distribute(deepcopy(model), P, weights=weights)
        x = distdl.distribute_tensor(x35, P)
        if weights == "sharded" and writes:
            with pytest.raises(RuntimeError, match=MAY_ONLY_READ):
                distributed(x)
            return
        for ours, theirs in zip(_two_steps(distributed, x), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("style", ["set", "assigned", "written"])
def test_weights_that_are_masked_in_each_forward(style, weights):
    torch.manual_seed(0)
    model = nn.Sequential(Masked(style), nn.Tanh(), Masked(style)).double()
    _assert_steps_are_sequential(model, weights)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("style", [
    "vector", "without gradients", "applied", "of another dtype", "transposed",
    "transposed by name", "between two uses", "after a use", "after a use as it is", "after a use of all of it",
    "before a checkpoint", "in a checkpoint",
])  # fmt: skip
def test_weights_that_are_set_as_a_list_in_each_forward(style, weights, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", 200)  # (several buckets, of which some are read later)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Listed(style), nn.Tanh(), Listed(style)).double()
    _assert_steps_are_sequential(model, weights, writes="after a use" in style or style in WRITTEN_BY_NAME)


WRITTEN_BY_NAME = ("transposed by name", "between two uses")


class Halving(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.linear, self.tied = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.tied.weight = self.linear.weight

    def forward(self, x, sets):
        x = self.before(x)
        if sets:
            self.linear.weight.data = self.linear.weight.data / 2
        return self.linear(x).sigmoid() + self.tied(x)


def test_data_that_a_second_forward_sets_is_not_read_by_the_graph_of_the_first():
    """Also where the weight has been read from its state_dict before."""
    torch.manual_seed(0)
    model = Halving().double()

    def outcome(model, x):
        optimiser, found = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(2):
            optimiser.zero_grad()
            (model(x, False) + model(x, True)).square().sum().backward()
            found += [one.grad.clone() for one in model.parameters()]
            found += [one.clone() for one in model.state_dict().values()]
            optimiser.step()
        return found

    x = noise(4, 3, 5)
    wanted = outcome(deepcopy(model), x)

    def work() -> None:
        P = distdl.world()[1:].reshape(2, 1, 1)
        distributed = distdl.distribute(deepcopy(model), P)
        for ours, theirs in zip(outcome(distributed, distdl.distribute_tensor(x, P)), wanted, strict=True):
            assert_close(ours, theirs)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_parameters_of_a_distributed_model_are_not_swapped(weights):
    """torch swaps no tensor to which something refers, as a distributed model does."""

    def work():
        model = distdl.distribute(network(lambda: nn.Linear(4, 3)), partition((2, 1)), weights=weights)
        parameters, x = list(model.parameters()), distdl.distribute_tensor(noise(5, 4), partition((2, 1)))
        y = model(x).full_tensor()
        with pytest.raises(RuntimeError, match="Couldn't swap Linear"):
            model.float()
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        torch.testing.assert_close(model(x).full_tensor(), y)
        with pytest.raises(RuntimeError, match='While swapping the parameter named "weight"'):
            model.load_state_dict(model.state_dict())

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        distdl.run_workers(work, 3)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


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
