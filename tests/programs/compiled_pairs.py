"""A compiled model beside the same model as it is: both are called alike, and have to leave the same bits."""

import warnings

import torch
from compiled_nets import bits, noise, weighted
from torch import nn

import distdl


def on_threads(work, workers=2):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        distdl.run_workers(work, workers)


def together(work, workers):
    """What each worker gives."""
    found = {}

    def run():
        found[distdl.world().comm.rank] = work()

    on_threads(run, workers)
    return [found[rank] for rank in range(workers)]


def assert_same(ours, theirs):
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for (what, a), (_, b) in zip(one, other, strict=True):
            assert torch.equal(a, b), f"{what}, step {number}"


def small():
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 3, padding=1))


class Pair:
    """A compiled model, and one that is not, which are called alike."""

    def __init__(self, make=small):
        self.P = distdl.world()
        self.grid = (1, 1, self.P.comm.size, 1)
        self.plain, model = (distdl.distribute(weighted(make()), self.grid) for _ in range(2))
        self.model = distdl.compile(model)

    def x(self, seed=0):
        return distdl.distribute_tensor(noise((2, 1, 12, 8), seed), self.grid).requires_grad_()

    def both(self, use, seed=0, zero=True, rounds=False):
        """What a function of a model and its input leaves, of both; compared. Returns that of the compiled model."""
        found = []
        for model in (self.plain, self.model):
            if zero:
                model.zero_grad()
            given = [bits(one) for one in use(model, self.x(seed))]
            found.append([*given, *(bits(one.grad) for one in model.parameters() if one.grad is not None)])
        for place, (one, other) in enumerate(zip(*found, strict=True)):
            same = torch.allclose(one, other, 1e-5, 1e-5) if rounds else torch.equal(one, other)
            assert same, f"{use.__name__}, {place}"
        return found[1]

    def known(self, steps=4):
        """Train until there is a line."""
        for seed in range(steps):
            self.both(step, seed)
        assert self.lines() == [True], self.model.explain()

    def lines(self):
        return [one.line is not None for one in self.model.programs]


def step(model, x):
    y = model(x)
    y.square().sum().backward()
    return y, x.grad
