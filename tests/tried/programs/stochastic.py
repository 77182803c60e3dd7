"""Gaussian processes, optimal transport, and stochastic equations."""

from __future__ import annotations

import geomloss
import gpytorch
import torch
import torchsde
from judge import Global, noise, program, square
from torch import nn

LIBRARIES = ["gpytorch", "geomloss", "torchsde"]
GRIDS = [(2, 1), (3, 1)]

# A kernel that is evaluated late switches this setting off for a while, and threads share settings.
gpytorch.settings.lazily_evaluate_kernels._set_state(False)


class Kernel(nn.Module):
    """The matrix of a kernel."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x):
        return self.kernel(x).to_dense()


def matrix_of(kernel):
    return square, Kernel(gpytorch.kernels.ScaleKernel(kernel)), Global(noise(7, 3).requires_grad_())


@program("gpytorch", name="ScaleKernel(RBFKernel), the matrix", grids=GRIDS)
def rbf():
    return matrix_of(gpytorch.kernels.RBFKernel())


@program("gpytorch", name="ScaleKernel(MaternKernel), the matrix", grids=GRIDS)
def matern():
    return matrix_of(gpytorch.kernels.MaternKernel())


class Exact(gpytorch.models.ExactGP):
    """A process with a scaled RBF kernel."""

    def __init__(self, likelihood):
        super().__init__(None, None, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@program("gpytorch", name="ExactGP, three steps of Adam by its marginal likelihood", grids=GRIDS)
def exact():
    def fit(model, x, y):
        model.train()
        model.set_train_data(x, y, strict=False)
        criterion = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimiser.zero_grad()
            loss = -criterion(model(x), y)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return losses

    x = noise(9, 2)
    return fit, Exact(gpytorch.likelihoods.GaussianLikelihood()), Global(x), Global(x[:, 0].sin(), axes=(0,))


def transported(loss):
    def step(x, y):
        found = loss(x, y)
        found.backward()
        return found

    return step, Global(noise(9, 3).requires_grad_()), Global(noise(7, 3, seed=1))


@program("geomloss", name="SamplesLoss, sinkhorn", grids=GRIDS)
def sinkhorn():
    return transported(geomloss.SamplesLoss("sinkhorn", p=2, blur=0.5, backend="tensorized"))


@program("geomloss", name="SamplesLoss, energy", grids=GRIDS)
def energy():
    return transported(geomloss.SamplesLoss("energy", backend="tensorized"))


class Equation(nn.Module):
    """Drift and diffusion by networks."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self):
        super().__init__()
        self.drift, self.spread = nn.Linear(3, 3), nn.Linear(3, 3)

    def f(self, t, y):
        return self.drift(y).tanh()

    def g(self, t, y):
        return self.spread(y).sigmoid() * 0.1

    def forward(self, y, times, path):
        return torchsde.sdeint(self, y, times, bm=path, method="euler", dt=0.25)


class Path:
    """A Brownian path that is known, so that each worker reads the same."""

    def __init__(self, steps):
        self.steps = steps

    shape = (6, 3)
    levy_area_approximation = "none"

    def __call__(self, start, stop):
        return self.steps[round(float(start) * 4)]


@program("torchsde", name="sdeint, euler, with a path that is given", grids=GRIDS)
def stochastic():
    def step(model, y, times, *steps):
        found = model(y, times, Path(steps))
        found[-1].square().mean().backward()
        return found

    steps = [Global(noise(6, 3, seed=k + 2) / 2) for k in range(4)]
    return step, Equation(), Global(noise(6, 3).requires_grad_()), torch.linspace(0, 1, 3), *steps
