"""torch.optim, and other optimisers: three steps of a small network."""

from __future__ import annotations

from functools import partial

import prodigyopt
import pytorch_optimizer
import schedulefree
import torch
from judge import Global, noise, program
from torch import nn

LIBRARIES = ["pytorch_optimizer", "schedulefree", "prodigyopt"]
GRIDS = [(2, 1, 1, 1), (1, 1, 3, 1)]


def train(make, model, x, target):
    model.train()
    optimiser = make(model.parameters())
    if hasattr(optimiser, "train"):
        optimiser.train()
    losses = []
    for _ in range(3):

        def closure():
            optimiser.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            return loss

        losses.append(optimiser.step(closure).item())
    return losses


def parts(make):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1))
    return partial(train, make), model, Global(noise(4, 3, 9, 8)), Global(noise(4, 2, 9, 8, seed=1))


def enter(library, name, make):
    for weights in ("replicated", "sharded"):
        program(library, name=f"{name}, {weights} weights", grids=GRIDS, weights=weights)(partial(parts, make))


enter("torch", "SGD with momentum", partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True))
enter("torch", "AdamW", partial(torch.optim.AdamW, lr=1e-2))
enter("torch", "LBFGS with line search", partial(torch.optim.LBFGS, line_search_fn="strong_wolfe", max_iter=4))
enter("torch", "RMSprop", partial(torch.optim.RMSprop, lr=1e-3))
enter("torch", "Adafactor", partial(torch.optim.Adafactor, lr=1e-2))
enter("pytorch_optimizer", "Lion", partial(pytorch_optimizer.Lion, lr=1e-3))
enter("pytorch_optimizer", "AdaBelief", partial(pytorch_optimizer.AdaBelief, lr=1e-3))
enter("schedulefree", "AdamWScheduleFree", partial(schedulefree.AdamWScheduleFree, lr=1e-2))
enter("prodigyopt", "Prodigy", prodigyopt.Prodigy)
