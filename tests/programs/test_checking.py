"""Replays that are compared with the step as it is: ``check=True`` and ``DISTDL_DEBUG=1``."""

import warnings

import pytest
import torch
from compiled_nets import UNet, bits, dropped, noise, weighted
from compiled_pairs import Pair, on_threads, small, step
from test_exactness import assert_same, together
from torch import nn
from torch.nn import functional

import distdl


class Hidden:
    """An object into which nobody looks, as it has no ``__dict__``."""

    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.0


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.last, self.hidden = nn.Conv2d(2, 1, 3, padding=1), hidden

    def forward(self, x):
        return self.last(self.norm(self.first(x) * self.hidden.factor))


def data(P, seed):
    return distdl.distribute_tensor(noise((2, 1, 12, 8), seed), (1, 1, P.comm.size, 1))


def runs(make, steps, wrap):
    """Train, and return what each step leaves, and how often the function was called."""
    P = distdl.world()
    model = distdl.distribute(weighted(make()), (1, 1, P.comm.size, 1))
    optimiser = torch.optim.AdamW(model.parameters(), 0.01)
    called = []

    def step(x, y):
        called.append(1)
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        return {"loss": loss, "scale": 2}

    step, left = wrap(step), []
    for seed in range(steps):
        optimiser.zero_grad()
        loss = step(data(P, seed), data(P, 9 + seed))["loss"]
        found = [("loss", bits(loss))]
        found += [(name, bits(one.grad)) for name, one in model.named_parameters()]
        optimiser.step()
        left.append(found + [(name, bits(one)) for name, one in model.state_dict().items()])
    return left, len(called)


@pytest.mark.parametrize("make", [UNet, dropped])
def test_a_checked_replay_leaves_what_the_step_leaves(make):
    theirs = together(lambda: runs(make, 7, lambda step: step), 2)
    ours = together(lambda: runs(make, 7, lambda step: distdl.compile(step, check=True)), 2)
    assert [called for _, called in ours] == [4, 4]  # of four replays the first is compared
    assert_same([left for left, _ in ours], [left for left, _ in theirs])


@pytest.mark.parametrize("make", [UNet, dropped])
def test_debugging_compares_each_replay(make, monkeypatch):
    monkeypatch.setenv("DISTDL_DEBUG", "1")
    ours = together(lambda: runs(make, 6, distdl.compile), 2)
    assert [called for _, called in ours] == [6, 6]
    monkeypatch.delenv("DISTDL_DEBUG")
    theirs = together(lambda: runs(make, 6, lambda step: step), 2)
    assert_same([left for left, _ in ours], [left for left, _ in theirs])


def changing(changes, told, workers=2):
    """Train with ``check=True``; what ``changes`` does, nobody sees. Returns the error of each worker."""

    def work():
        P, hidden = distdl.world(), Hidden()
        model = distdl.distribute(weighted(Net(hidden if told == "backward" else Hidden())), (1, 1, P.comm.size, 1))

        @distdl.compile(check=True)
        def step(x, y):
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return None if told == "backward" else [P.comm.size, x * hidden.factor]

        for seed in range(5):
            if seed == 3:
                changes(P, hidden)
            model.zero_grad()
            try:
                step(data(P, seed), data(P, 9 + seed))
            except RuntimeError as error:
                assert "another one than the step" in step.explain()
                step(data(P, seed), data(P, 9 + seed))  # as it is
                return str(error)
        return ""

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return distdl.run_workers(work, workers)


def everywhere(P, hidden):
    hidden.factor = 3.0


def on_worker_1(P, hidden):
    hidden.factor = 3.0 if P.comm.rank == 1 else 1.0


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ("result", "its result[1], by aten.mul.Tensor"),
        ("backward", "model.norm.running_mean, by aten.add_.Tensor in module "),
    ],
)
def test_a_difference_is_an_error_that_says_what_and_where(told, text):
    (first, second) = changing(everywhere, told)
    assert first == second and text in first and "test_checking.py:" in first and "worker 0" in first


def test_a_difference_of_one_worker_is_the_same_error_on_all():
    (first, second) = changing(on_worker_1, "result")
    assert first == second and "on worker 1, its result[1]" in first


def test_nothing_is_told_where_nothing_differs():
    assert changing(lambda P, hidden: None, "result") == ["", ""]


class Backwards(torch.autograd.Function):
    """The identity, whose gradient is multiplied by what is hidden."""

    @staticmethod
    def forward(ctx, x, hidden):
        ctx.hidden = hidden
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.hidden.factor, None


class Twisted(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.inner, self.hidden = small(), hidden

    def forward(self, x):
        return Backwards.apply(self.inner(x), self.hidden)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gradient_of_a_model_that_differs_is_an_error(workers):
    def work():
        hidden = Hidden()
        pair = Pair(lambda: Twisted(hidden))
        pair.model = distdl.compile(pair.model._orig_mod, check=True)
        for seed in range(3):
            pair.both(step, seed)
        hidden.factor = 3.0
        with pytest.raises(RuntimeError, match=r"differs from the step as it is: .*the gradient of argument 0"):
            step(pair.model, pair.x(3))
        pair.both(step, 4)  # as it is
        assert pair.lines() == [False]

    on_threads(work, workers)


@pytest.mark.parametrize("make", [UNet, small])
def test_debugging_compares_gradients_of_a_model(make, monkeypatch):
    """Also if the forward keeps statistics, which are put back before the replay."""
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def of_mean(model, x):
        y = model(x)
        y.mean().backward()
        return y, x.grad

    def work():
        pair = Pair(make)
        for seed in range(6):
            pair.both(step, seed)
        assert pair.model.programs[0].replays == 3, pair.model.explain()
        pair.both(of_mean, 6)  # gradients lie in another way, and are not compared

    for workers in (1, 2):
        on_threads(work, workers)
