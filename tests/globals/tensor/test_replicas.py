"""Weights as a forward has read them: they stay the weights, or are refused once these are written."""

import copy
import math

import pytest
import torch
from nets import GRIDS, assert_close, assert_same_state, batch, network, partition, run, sharded
from same import noise
from torch import nn
from torch.nn import functional as F

import distdl
import distdl.nn as dnn


def _train(*models):
    """Three steps, after each of which both models have the same losses, gradients and weights."""
    optimisers = [torch.optim.SGD(one.parameters(), 0.05, momentum=0.9) for one in models]
    for step in range(3):
        x, target = batch(step)
        losses = []
        for one, optimiser in zip(models, optimisers, strict=True):
            optimiser.zero_grad()
            losses.append(nn.functional.mse_loss(one(x), target))
            losses[-1].backward()
            optimiser.step()
        assert_close(*losses)
        assert_same_state(*models)


class _Kept(nn.Module):
    """Its forward uses what it has read before its weights were written or frozen, or without gradients."""

    def __init__(self, by):
        super().__init__()
        self.layer = nn.Conv1d(3, 2, 3, padding=1)
        self.weight = nn.Parameter(noise(2, 3))
        self.by, self.kept = by, []

    def forward(self, x):
        if self.by == "no_grad":
            with torch.no_grad():
                weight, bias = self.weight, self.layer.bias
                assert weight.requires_grad and not weight.detach().requires_grad
        elif self.by in ("step", "data"):
            self.kept = self.kept or [self.weight, self.layer.bias]
            weight, bias = self.kept
        else:
            weight, bias = self.weight, self.layer.bias
        if self.by == "list":
            for parameter in self.parameters():
                parameter.data.mul_(0.9)
        elif self.by == "data":
            for parameter in self.parameters():
                parameter.data = parameter.data * 0.9
        elif self.by == "frozen":
            self.requires_grad_(False)
            x = x + (weight @ x).mean() + bias.sum()
            self.requires_grad_(True)
        return self.layer(x) + weight @ x + torch.stack([bias, bias * 2]).sum(0)[:, None]


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].exp()


class _KeptFor(nn.Module):
    """Its forward gives what its first forward has read to what is no function of torch."""

    def __init__(self, user):
        super().__init__()
        self.weight, self.user, self.kept = nn.Parameter(noise(3, 1)), user, []

    def forward(self, x):
        self.kept = self.kept or [self.weight]
        x = self.user(x, self.kept[0])
        return x[:, :2] + x[:, 1:]


def _locally(function, *args):
    return distdl.local_map(function)(*args) if type(args[0]) is distdl.GlobalTensor else function(*args)


_USERS = {
    "an autograd function": lambda x, w: x * _Exp.apply(w),
    "an argument of local_map": lambda x, w: _locally(torch.mul, x, w),
    "known to local_map": lambda x, w: _locally(lambda block: block * w[:1], x),
}


@pytest.mark.parametrize("user", _USERS.values(), ids=_USERS)
def test_what_was_read_is_the_weight_for_functions_of_blocks_and_autograd_functions(user):
    def work():
        for grid in ((2, 1, 1), (1, 1, 2)):
            sequential = network(lambda: _KeptFor(user))
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid), weights="sharded", fallback="error")
            _train(model, sequential)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("by", ["step", "data", "list", "no_grad", "frozen"])
def test_what_was_read_in_the_place_of_a_weight_stays_the_weight(weights, by):
    if weights == "sharded" and by in ("data", "list"):
        return  # (errors: a forward may only read weights in shares)

    def work():
        for grid in GRIDS:
            sequential = network(lambda: _Kept(by))
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid), weights=weights, fallback="error")
            _train(model, sequential)

    run(work)


def test_a_view_of_a_weight_in_shares_that_was_written_since_is_an_error():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.kept = nn.Parameter(noise(2, 3)), {}

        def forward(self, x):
            if not self.kept:
                self.kept = {
                    "data": self.weight.data,
                    "row": self.weight[:1].detach(),
                    "copy": self.weight.data.clone(),
                }
            return self.weight @ x

    def work():
        x = distdl.distribute_tensor(batch(0)[0], partition((2, 1, 2)))
        model = sharded(network(Views), (2, 1, 2))
        before = model(x)
        kept = model.kept["data"] @ x
        assert_close(kept, before)
        with torch.no_grad():
            model.weight.mul_(2)
        for name in ("data", "row"):
            with pytest.raises(RuntimeError, match="has been written since"):
                model.kept[name] @ x
            with pytest.raises(RuntimeError, match="has been written since"):
                model.kept[name].norm()
        assert_close(model.kept["copy"] @ x, before)
        old, model.weight.data = model.weight.data, torch.zeros(2, 3)
        model.weight.data = old
        assert_close(model(x), 2 * before)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_a_cache_that_asks_whether_a_weight_was_written_is_renewed(weights):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.version, self.made = nn.Parameter(noise(2, 3)), None, 0

        def forward(self, x):
            if self.version != self.weight._version:
                self.version, self.cache = self.weight._version, self.weight.detach() * 2
                self.made += 1
            return (self.weight + self.cache) @ x

    def work():
        sequential = network(Cached)
        model = distdl.distribute(copy.deepcopy(sequential), partition((2, 1, 2)), weights=weights, fallback="error")
        _train(model, sequential)
        with torch.no_grad():
            model(batch(0)[0]), sequential(batch(0)[0])
        assert model.made == sequential.made

    run(work)


class Using(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


def _indices(weight, count):
    return (weight[:count].detach().abs() * 7).long() % 3


def _set(x, weight):
    y = x * 1
    y[_indices(weight, 2)] = 0.0
    return y * x


FOLLOWING = {
    "statistics": lambda x, w: F.batch_norm(x, w[:3].detach(), w[3:6].detach() ** 2, w[6:9], w[9:12]),
    "statistics of instances": lambda x, w: F.instance_norm(
        x, w[:3].detach(), w[3:6].detach() ** 2, w[6:9], w[9:12], use_input_stats=False
    ),
    "index": lambda x, w: x[_indices(w, 4)],
    "index_select": lambda x, w: x.index_select(2, _indices(w, 4)),
    "topk": lambda x, w: x.index_select(2, w[:11].topk(3).indices) * w[:3],
    "index_put": lambda x, w: x.index_put((_indices(w, 2),), w[:11].detach()),
    "index_add": lambda x, w: x.index_add(0, _indices(w, 2), x[:2]),
    "repeat_interleave": lambda x, w: x.repeat_interleave(_indices(w, 4) + 1, 0),
    "gather": lambda x, w: x.gather(2, _indices(w, 11).expand(4, 3, 11)),
    "set": _set,
    "mask": lambda x, w: x.masked_fill(w[:11].detach() > 0, 0.0),
}


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize("grid", [(1, 1, 2), (2, 1, 1), (1, 2, 1)])
def test_gradients_of_what_stands_beside_indices_masks_and_statistics_of_weights(name, grid):
    def work():
        sequential = network(lambda: Using(FOLLOWING[name]))
        model = distdl.distribute(copy.deepcopy(sequential), partition(grid), fallback="silent")
        x = noise(4, 3, 11, seed=3)
        ours = distdl.distribute_tensor(x, partition(grid)).requires_grad_()
        found = torch.autograd.grad(model(ours).square().sum(), [ours, model.weight], allow_unused=True)
        x.requires_grad_()
        expected = torch.autograd.grad(sequential(x).square().sum(), [x, sequential.weight], allow_unused=True)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                assert_close(one, other, tolerance=1e-9)

    run(work, math.prod(grid))


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.sin(self.layer(x)) + 0.3 * x)


def _differentiated(model, x):
    """The gradients of x and of a model's parameters, and those of the square of the gradient of x."""
    y = model(x.requires_grad_())
    given = [x, *model.parameters()]
    first = torch.autograd.grad((y * y.cos()).sum(), given, create_graph=True)
    first[0].square().sum().backward()
    return [*first, *(one.grad for one in given)]


LAYERS = {
    "convolution": lambda: nn.Conv1d(3, 3, 3, padding=1),
    "circular convolution": lambda: nn.Conv1d(3, 3, 5, padding=2, padding_mode="circular"),
    "transposed convolution": lambda: nn.ConvTranspose1d(3, 3, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "group norm": lambda: nn.GroupNorm(1, 3),
    "instance norm": lambda: nn.InstanceNorm1d(3, affine=True),
    "layer norm": lambda: nn.LayerNorm(11),
    "rms norm": lambda: nn.RMSNorm(11),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("grid", [(1, 1, 3), (2, 1, 2)])
def test_a_layer_that_is_used_twice(layer, grid):
    def work():
        sequential = network(lambda: Twice(LAYERS[layer]()))
        model = distdl.distribute(copy.deepcopy(sequential), partition(grid), fallback="error")
        x, _ = batch(0)
        ours = _differentiated(model, distdl.distribute_tensor(x, partition(grid)))
        theirs = _differentiated(sequential, x)
        assert len(ours) == len(theirs) >= 4
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other, tolerance=1e-9)

    run(work, math.prod(grid))


def test_a_module_that_is_used_twice():
    def work():
        P = partition((1, 1, 3))
        sequential = network(lambda: Twice(nn.Conv1d(3, 3, 3, padding=1)))
        layer = dnn.DistributedConv1d(P, in_channels=3, out_channels=3, kernel_size=3, padding=1).double()
        if P.rank == 0:
            layer.load_state_dict(sequential.layer.state_dict())
        x, _ = batch(0)
        ours = _differentiated(Twice(layer), distdl.distribute_tensor(x, P))
        theirs = _differentiated(sequential, x)
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if place % 3 == 0 or P.rank == 0:  # (which has the weights)
                assert_close(one, other, tolerance=1e-9)

    run(work, 3)
