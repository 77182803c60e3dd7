"""One model in all kinds, and a short training of it."""

from __future__ import annotations

import torch
from torch import nn

import distdl
from distdl.nn import DistributedBatchNorm, DistributedConv2d, DistributedDropout, DistributedLinear

KINDS = ("plain", "replicated", "sharded", "modules")
OPTIMISERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 0.01),
}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Network(nn.Module):
    """A convolution, a batch norm, dropout, a linear layer: in plain torch, or as layers of distdl.nn over P."""

    def __init__(self, P=None, dropout=0.0):
        super().__init__()
        if P is None:
            self.conv, self.norm = nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5)
            self.drop, self.fc = nn.Dropout(dropout), nn.Linear(5, 3)
        else:
            n = P.size
            grid = P.reshape(1, 1, n, 1)
            self.conv = DistributedConv2d(grid, in_channels=2, out_channels=5, kernel_size=3, padding=1)
            self.norm = DistributedBatchNorm(P.reshape(1, n, 1, 1), 5)
            self.drop = DistributedDropout(grid, dropout)
            self.fc = DistributedLinear(P[:1].reshape(1, 1), P.reshape(1, n), P.reshape(n, 1), 5, 3)

    def forward(self, x):
        return self.fc(self.drop(self.norm(self.conv(x)).relu()).mean((2, 3)))


def make(kind, P, seed=0, dropout=0.0):
    """A model of a kind in float64; of one seed, all kinds have the same weights."""
    alone = Network(dropout=dropout).double()
    for number, parameter in enumerate(alone.parameters()):
        parameter.data.copy_(noise(*parameter.shape, seed=100 * seed + number))
    if kind == "plain":
        return alone
    if kind != "modules":
        return distdl.distribute(alone, P.reshape(1, 1, P.size, 1), weights=kind)
    model = Network(P, dropout).double()
    distdl.import_state(model, alone.state_dict())
    return model


def equip(model, optimiser="adamw"):
    """An optimiser and a scheduler; two groups of parameters, the second with other options."""
    named = list(model.named_parameters())
    groups = [
        {"params": [one for name, one in named if name.startswith(("conv", "norm"))]},
        {"params": [one for name, one in named if name.startswith("fc")], "lr": 0.003},
    ]
    steps = OPTIMISERS[optimiser](groups)
    return steps, torch.optim.lr_scheduler.MultiStepLR(steps, [2, 3], 0.5)


def train(model, steps, schedule, P, first, last):
    """Some steps of a training; returns the losses."""
    losses = []
    for step in range(first, last):
        x, target = noise(4, 2, 7, 6, seed=50 + step), noise(4, 3, seed=70 + step)
        plain = type(model) is Network and isinstance(model.conv, nn.Conv2d) and "forward" not in vars(model)
        if not plain:
            x = distdl.distribute_tensor(x, P.reshape(1, 1, P.size, 1))
        steps.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        steps.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def assert_equal(found, expected, path="the state"):
    """Two structures with tensors in them are equal, to the last bit."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor) and found.dtype == expected.dtype, path
        assert torch.equal(found, expected), f"{path} differs: {found} and {expected}"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), (path, found.keys(), expected.keys())
        for key in expected:
            assert_equal(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected), path
        for place, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_equal(a, b, f"{path}/{place}")
    else:
        assert found == expected and type(found) is type(expected), (path, found, expected)
