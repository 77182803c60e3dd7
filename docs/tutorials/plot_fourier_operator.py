"""
A Fourier neural operator for Darcy flow
========================================

Water seeps through soil. Where the soil lets it pass easily, it flows; where not, it builds up. An equation says which
pressure follows from a given soil, and a solver takes its time for it. A *neural operator* learns the answers of the
solver, and then gives them at once.

The Fourier neural operator is the best known of its kind (`Li et al., 2020 <https://arxiv.org/abs/2010.08895>`__).
It is a good test for a library that splits tensors: each of its layers takes a Fourier transform, which needs every
cell of the image.
"""

import copy

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import distdl

# %%
# Data from a solver
# ------------------
#
# The equation is that of Darcy flow on a square, with the pressure :math:`u = 0` at the border:
#
# .. math:: -\nabla \cdot (a \, \nabla u) = 1
#
# The soil :math:`a` is 12 where a smooth random field is positive, and 3 elsewhere. The solver balances what flows in
# and out of each cell. That is one linear equation for each cell, small enough to be solved as a dense matrix.

N = 28  # cells along each side


def soil(samples):
    """Where a smooth random field is positive."""
    frequencies = (torch.fft.fftfreq(N, 1 / N)[:, None] ** 2 + torch.fft.rfftfreq(N, 1 / N) ** 2) * 40
    waves = torch.fft.rfft2(torch.randn(samples, N, N, dtype=torch.float64)) / (frequencies + 9) ** 1.5
    waves[:, 0, 0] = 0  # so that a half of each soil lets water pass
    return torch.where(torch.fft.irfft2(waves, s=(N, N)) > 0, 12.0, 3.0)


def solve(a):
    """The pressure for each of several soils ``(samples, N, N)``."""
    cells = torch.arange(N * N).reshape(N, N)
    matrix = torch.zeros(len(a), N * N, N * N, dtype=a.dtype)
    for dim in (0, 1):
        first, second = cells.narrow(dim, 0, N - 1).flatten(), cells.narrow(dim, 1, N - 1).flatten()
        flow = 2 / (1 / a.flatten(1)[:, first] + 1 / a.flatten(1)[:, second]) * N**2
        for one, other in ((first, second), (second, first)):
            matrix[:, one, one] += flow
            matrix[:, one, other] -= flow
        for border in (cells.select(dim, 0), cells.select(dim, N - 1)):
            matrix[:, border, border] += 2 * a.flatten(1)[:, border] * N**2
    return torch.linalg.solve(matrix, torch.ones(len(a), N * N, dtype=a.dtype)).reshape(a.shape)


torch.manual_seed(0)
soils = soil(56)
pressures = solve(soils)
inputs = ((soils - 7.5) / 4.5).float().unsqueeze(1)
outputs = (pressures / pressures.std()).float().unsqueeze(1)
print(f"{len(soils)} soils of {N} x {N} cells; 48 to learn from, 8 to test")

# %%
# The network
# -----------
#
# A layer goes to frequencies, multiplies the lowest of them by weights, and comes back. Beside that is a convolution of
# 1 x 1. ``torch.fft`` is all that it needs, and nothing of it knows of workers.

WIDTH, MODES = 16, 7


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        shape = (WIDTH, WIDTH, MODES, MODES)
        self.low = nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / WIDTH)
        self.high = nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / WIDTH)

    def forward(self, x):
        waves = torch.fft.rfft2(x)
        mix = "bixy,ioxy->boxy"
        low = torch.einsum(mix, waves[:, :, :MODES, :MODES], self.low)
        high = torch.einsum(mix, waves[:, :, -MODES:, :MODES], self.high)
        rows, columns = waves.shape[2] - 2 * MODES, waves.shape[3] - MODES
        low = F.pad(low, (0, columns, 0, rows))
        return torch.fft.irfft2(torch.cat([low, F.pad(high, (0, columns))], 2), s=x.shape[2:])


class FourierOperator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv2d(3, WIDTH, 1)
        self.spectral = nn.ModuleList(Spectral() for _ in range(3))
        self.beside = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(3))
        self.project = nn.Sequential(nn.Conv2d(WIDTH, 32, 1), nn.GELU(), nn.Conv2d(32, 1, 1))
        places = torch.linspace(-1, 1, N)
        self.register_buffer("places", torch.stack(torch.meshgrid(places, places, indexing="ij"))[None])

    def forward(self, x):
        x = self.lift(torch.cat([x, self.places.expand(len(x), -1, -1, -1)], 1))
        for spectral, beside in zip(self.spectral, self.beside, strict=True):
            x = F.gelu(spectral(x) + beside(x))
        return self.project(x)


network = FourierOperator()

# %%
# Train it on four workers
# ------------------------
#
# Each worker has a quarter of every image. ``rfft2`` transforms one dim after the other. Before each, the workers
# exchange blocks, so that this dim is whole and another one is split. So no worker needs the whole tensor.
# ``fallback="error"`` makes sure of it: it asks for an error if a function of torch has to run on one worker.

GRID = (1, 1, 2, 2)
STEPS, BATCH = 72, 12


def train(model, batch_of):
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=STEPS)
    losses = []
    for step in range(STEPS):
        first = step * BATCH % 48
        x, y = batch_of(inputs[first : first + BATCH]), batch_of(outputs[first : first + BATCH])
        optimiser.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimiser.step()
        rate.step()
        losses.append(loss.item())
    return losses


def main():
    P = distdl.world().reshape(*GRID)
    model = distdl.distribute(copy.deepcopy(network), P, fallback="error")
    losses = train(model, lambda batch: distdl.distribute_tensor(batch, P))
    with torch.no_grad():
        predicted = model(distdl.distribute_tensor(inputs[48:], P))
    return losses, predicted.full_tensor()


losses, predicted = distdl.run_workers(main, 4)[0]
error = ((predicted - outputs[48:]).norm() / outputs[48:].norm()).item()
print(f"loss {losses[0]:.3f} at first, {losses[-1]:.4f} at the end")
print(f"relative error on soils that it has not seen: {100 * error:.1f} %")

assert error < 0.2

# %%
# Two of the soils that it has not seen:

figure, panels = plt.subplots(2, 4, figsize=(9.5, 4.6), layout="constrained")
top = outputs[48:50].max().item()
for row, axes in enumerate(panels):
    truth, found = outputs[48 + row, 0], predicted[row, 0]
    axes[0].imshow(soils[48 + row], cmap="copper")
    axes[1].imshow(truth, vmin=0, vmax=top)
    image = axes[2].imshow(found, vmin=0, vmax=top)
    difference = axes[3].imshow(found - truth, cmap="RdBu_r", vmin=-0.2 * top, vmax=0.2 * top)
    for panel in axes:
        panel.set(xticks=[], yticks=[])
figure.colorbar(image, ax=panels[:, 2])
figure.colorbar(difference, ax=panels[:, 3])
for panel, title in zip(panels[0], ("soil", "solver", "network", "error"), strict=True):
    panel.set_title(title)

# %%
# Is it the same?
# ---------------
#
# One worker alone learns the same:

alone = train(copy.deepcopy(network), lambda batch: batch)
for step in (0, 1, 2, STEPS - 1):
    print(f"step {step:2}: loss {alone[step]:.6f} on one worker, {losses[step]:.6f} on four")

assert all(abs(a - b) < 1e-4 * a for a, b in zip(alone[:3], losses[:3], strict=True))

# %%
# The losses of later steps drift apart by rounding. To compare every tensor of two steps, and not only losses, see
# :doc:`plot_verify`. The models of the ``neuraloperator`` package run unmodified as well: :doc:`/details/tried`.
