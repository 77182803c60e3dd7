"""torchdiffeq: solvers of ordinary differential equations."""

from __future__ import annotations

from functools import partial

import torch
from judge import Global, noise, program
from torch import nn
from torchdiffeq import odeint, odeint_adjoint

LIBRARIES = ["torchdiffeq"]
GRIDS = [(2, 1, 1, 1), (1, 1, 3, 1)]


class Field(nn.Module):
    """A right-hand side over a plane."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 3, padding=1)).double()

    def forward(self, t, y):
        return self.net(y) - t * y


def solve(field, y, solver, **options):
    end = solver(field, y, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), **options)
    end[-1].square().mean().backward()
    return end


def parts(function):
    return function, Field(), Global(noise(3, 3, 7, 6).requires_grad_())


@program("torchdiffeq", name="odeint, rk4", grids=GRIDS)
def fixed():
    return parts(partial(solve, solver=odeint, method="rk4"))


@program("torchdiffeq", name="odeint, dopri5", grids=GRIDS)
def adaptive():
    return parts(partial(solve, solver=odeint, method="dopri5"))


@program("torchdiffeq", name="odeint_adjoint, dopri5", grids=GRIDS, tolerance=1e-6)
def adjoint():
    return parts(partial(solve, solver=odeint_adjoint, method="dopri5"))
