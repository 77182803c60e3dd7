"""Weights as a forward has read them: they stay the weights, or are refused once these are written."""

import copy

import pytest
import torch
from nets import GRIDS, assert_close, assert_same_state, batch, network, partition, run, sharded
from same import noise
from torch import nn

import distdl


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
