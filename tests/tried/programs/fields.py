"""Fields: neural operators, networks on the sphere, networks of physics, and equivariant layers."""

from __future__ import annotations

import os
from functools import partial

os.environ.setdefault("DDE_BACKEND", "pytorch")  # DeepXDE reads it when it is imported

import deepxde
import torch
from e3nn import o3, set_optimization_defaults
from e3nn.nn import Gate
from judge import Global, fitted, noise, program, square
from neuralop.losses import H1Loss, LpLoss
from neuralop.models import FNO, TFNO, UNO
from torch import nn
from torch_harmonics import DiscreteContinuousConvS2, InverseRealSHT, RealSHT, RealVectorSHT
from torch_harmonics.examples.models import SphericalFourierNeuralOperator

LIBRARIES = ["neuraloperator", "torch-harmonics", "deepxde", "e3nn"]
GRIDS = [(2, 1, 1, 1), (1, 1, 3, 1), (1, 1, 2, 2)]
POINTS = [(2, 1), (3, 1)]


def operator(model, criterion):
    """Return a step in float32: these operators multiply spectra in complex64."""
    x, target = noise(2, 2, 18, 16).float(), noise(2, 1, 18, 16, seed=1).float()
    return partial(fitted, criterion), model.float(), Global(x.requires_grad_()), Global(target)


@program("neuraloperator", name="FNO with LpLoss (in float32)", grids=GRIDS, tolerance=1e-5)
def fno():
    return operator(FNO(n_modes=(6, 6), in_channels=2, out_channels=1, hidden_channels=8, n_layers=2), LpLoss(d=2))


# The gradient of the last bias is 0.001, the sum of terms of both signs whose magnitudes add up to 2.
@program("neuraloperator", name="TFNO with H1Loss (in float32)", grids=GRIDS, tolerance=1e-4)
def tfno():
    model = TFNO(n_modes=(6, 6), in_channels=2, out_channels=1, hidden_channels=8, n_layers=2, rank=0.5)
    return operator(model, H1Loss(d=2))


@program("neuraloperator", name="UNO with LpLoss (in float32)", grids=GRIDS, tolerance=1e-5)
def uno():
    model = UNO(
        in_channels=2,
        out_channels=1,
        hidden_channels=8,
        n_layers=3,
        uno_out_channels=[8, 8, 8],
        uno_n_modes=[[4, 4]] * 3,
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]],
        channel_mlp_skip="linear",
    )
    return operator(model, LpLoss(d=2))


class OnSphere(nn.Module):
    """A filter of spherical harmonics."""

    def __init__(self):
        super().__init__()
        self.forth, self.back = RealSHT(12, 24), InverseRealSHT(12, 24)
        self.weight = nn.Parameter(torch.ones(self.forth.lmax, 1))

    def forward(self, x):
        return self.back(self.forth(x) * self.weight).relu()


@program("torch-harmonics", name="RealSHT and InverseRealSHT", grids=GRIDS)
def sphere():
    return square, OnSphere(), Global(noise(2, 2, 12, 24).requires_grad_())


@program("torch-harmonics", name="RealVectorSHT", grids=GRIDS)
def winds():
    def step(transform, x):
        spectrum = transform(x)
        spectrum.abs().square().mean().backward()
        return spectrum

    return step, RealVectorSHT(12, 24), Global(noise(2, 2, 12, 24).requires_grad_())


@program("torch-harmonics", name="DiscreteContinuousConvS2 (in float32)", grids=GRIDS, tolerance=1e-5)
def disco():
    model = DiscreteContinuousConvS2(2, 3, (12, 24), (12, 24), kernel_shape=(3,))
    return square, model.float(), Global(noise(2, 2, 12, 24).float().requires_grad_())


@program("torch-harmonics", name="SphericalFourierNeuralOperator (in float32)", grids=GRIDS, tolerance=1e-5)
def spherical_operator():
    model = SphericalFourierNeuralOperator(
        img_size=(12, 24), scale_factor=2, in_chans=2, out_chans=2, embed_dim=8, num_layers=2, residual_prediction=True
    )
    return square, model.float(), Global(noise(2, 2, 12, 24).float().requires_grad_())


def residuals(data, net, steps):
    """Return a training by the losses of ``data``, as ``deepxde.Model`` trains, on points that are split."""

    def fit(net, x):
        optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
        history = []
        for _ in range(steps):
            optimiser.zero_grad()
            losses = data.losses_train(None, net(x), deepxde.losses.get("MSE"), x, None)
            torch.stack(losses).sum().backward()
            optimiser.step()
            history.append(torch.stack(losses).detach())
        return history

    return fit, net, Global(torch.as_tensor(data.train_x).requires_grad_())


@program("deepxde", name="FNN, losses of a Poisson equation, three steps of Adam", grids=POINTS)
def poisson():
    deepxde.config.set_default_float("float64")

    def equation(x, u):
        return -deepxde.grad.hessian(u, x, i=0, j=0) - deepxde.grad.hessian(u, x, i=1, j=1) - 1

    geometry = deepxde.geometry.Rectangle([0, 0], [1, 1])
    boundary = deepxde.icbc.DirichletBC(geometry, lambda x: 0, lambda x, on_boundary: on_boundary)
    data = deepxde.data.PDE(geometry, equation, boundary, 20, 8, "uniform")
    return residuals(data, deepxde.nn.FNN([2, 8, 8, 1], "tanh", "Glorot uniform"), 3)


@program("deepxde", name="FNN, losses of Burgers' equation, three steps of Adam", grids=POINTS)
def burgers():
    deepxde.config.set_default_float("float64")

    def equation(x, u):
        du = deepxde.grad.jacobian(u, x, i=0)
        return du[:, 1:2] + u * du[:, 0:1] - 0.01 * deepxde.grad.hessian(u, x, i=0, j=0)

    line, times = deepxde.geometry.Interval(-1, 1), deepxde.geometry.TimeDomain(0, 1)
    domain = deepxde.geometry.GeometryXTime(line, times)
    boundary = deepxde.icbc.DirichletBC(domain, lambda x: 0, lambda x, on_boundary: on_boundary)
    start = deepxde.icbc.IC(domain, lambda x: x[:, 0:1] ** 2 - 1, lambda x, on_initial: on_initial)
    data = deepxde.data.TimePDE(domain, equation, [boundary, start], 20, 6, 6, train_distribution="uniform")
    return residuals(data, deepxde.nn.FNN([2, 8, 8, 1], "tanh", "Glorot uniform"), 3)


class Equivariant(nn.Module):
    """Harmonics of edges, a tensor product, and a gate."""

    def __init__(self):
        super().__init__()
        self.gate = Gate("4x0e", [torch.relu], "2x0e", [torch.sigmoid], "2x1o")
        self.product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", self.gate.irreps_in)

    def forward(self, x, edges):
        return self.gate(self.product(x, o3.spherical_harmonics("1x0e + 1x1o", edges, normalize=True)))


@program("e3nn", name="harmonics, FullyConnectedTensorProduct, Gate", grids=POINTS)
def equivariant():
    set_optimization_defaults(jit_script_fx=False, jit_mode="eager")
    return square, Equivariant(), Global(noise(7, 10).requires_grad_()), Global(noise(7, 3, seed=1))
