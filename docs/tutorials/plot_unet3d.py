"""
A 3-d U-Net on a volume that is too large
=========================================

A U-Net finds the pores of a rock in a scan of it. The scan is a volume. Training on it needs more memory than
one worker has. Four workers share it: each holds a quarter of the volume, and of everything that the network computes
from it.

You will see what each worker holds, the training, and that it is the training of one worker.
"""

import copy

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import distdl

# %%
# The network
# -----------
#
# This is plain PyTorch. It halves the volume twice, doubles it twice, and hands what it saw on the way down to the
# way up. Nothing in it knows of workers.


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.norm1 = nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True)
        self.second, self.norm2 = nn.Conv3d(outputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True)

    def forward(self, x):
        x = F.leaky_relu(self.norm1(self.first(x)))
        return F.leaky_relu(self.norm2(self.second(x)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.bottom = Block(1, 8), Block(8, 16), Block(16, 32)
        self.up2, self.merge2 = nn.ConvTranspose3d(32, 16, 2, stride=2), Block(32, 16)
        self.up1, self.merge1 = nn.ConvTranspose3d(16, 8, 2, stride=2), Block(16, 8)
        self.head = nn.Conv3d(8, 2, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool3d(first, 2))
        x = self.bottom(F.max_pool3d(second, 2))
        x = self.merge2(torch.cat([second, self.up2(x)], 1))
        x = self.merge1(torch.cat([first, self.up1(x)], 1))
        return self.head(x)


torch.manual_seed(0)
network = UNet()

# %%
# The volume
# ----------
#
# Real scans have a thousand cells along each side. This one is small, so that the page is built in seconds. The pores
# are where a smooth random field is high. The scanner blurs, adds noise, and sees one end brighter than the other.

SIZE = (36, 32, 24)


def smooth(field, passes):
    for _ in range(passes):
        field = F.avg_pool3d(F.pad(field, (1,) * 6, mode="circular"), 3, 1)
    return field / field.std()


pores = (smooth(torch.randn(1, 1, *SIZE), 6) > 0.3).long()
trend = torch.linspace(0, 1, SIZE[0]).reshape(-1, 1, 1)
scan = smooth(1.0 - pores, 1) + trend + 0.5 * torch.randn(1, 1, *SIZE)
pores = pores[:, 0]

# %%
# Does it fit?
# ------------
#
# Say that a worker has 8 MiB. :func:`distdl.summary` says what each worker will hold in a step of training. It runs
# nothing, so you can ask on a laptop before you ask for a cluster. ``(1, 1, 2, 2, 1)`` is the grid of workers: it has
# one number for each dim of the volume, which are batch, channels, and three of space. Here two dims of space are
# halved.

GRID = (1, 1, 2, 2, 1)
LIMIT = 8 * 2**20

tables = [distdl.summary(network, GRID, scan.shape, worker=worker) for worker in range(4)]
needed = {"one worker\nalone": tables[0].sequential.peak}
needed |= {f"worker {worker}\nof four": table.totals.peak for worker, table in enumerate(tables)}

figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
bars = axes.bar(needed.keys(), [peak / 2**20 for peak in needed.values()], color=["#c44e52"] + 4 * ["#4795c9"])
axes.bar_label(bars, fmt="%.1f")
axes.axhline(LIMIT / 2**20, color="black", linestyle="dashed", linewidth=1)
axes.set(ylabel="MiB at most in a step", ylim=(0, 1.12 * max(needed.values()) / 2**20))
axes.spines[["top", "right"]].set_visible(False)

assert needed["one worker\nalone"] > LIMIT > max(table.totals.peak for table in tables)

# %%
# One worker alone does not fit below the dashed line. Each of four does. They hold a little more than a quarter, since
# each has all weights, and a margin of its neighbours' cells around its block.
#
# Train
# -----
#
# Three lines are new. ``distribute`` gives each worker the model. ``distribute_tensor`` gives each worker its block of
# the volume, and of the answer, which has no channels: ``axes`` names the axes of the grid that its dims belong to.
# The optimiser, the loss and the step stay as they are.
#
# :func:`distdl.run_workers` runs ``main`` on four workers. Here they are threads. On a cluster,
# ``mpirun -n 4 python train.py`` starts the same ``main``.

STEPS = 20


def train(model, x, y):
    optimiser, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def main():
    P = distdl.world().reshape(*GRID)
    model = distdl.distribute(copy.deepcopy(network), P)
    x = distdl.distribute_tensor(scan, P)
    y = distdl.distribute_tensor(pores, P, axes=(0, 2, 3, 4))
    losses = train(model, x, y)
    with torch.no_grad():
        found = model(x).argmax(1)
    return losses, tuple(x.to_local().shape), found.full_tensor()


results = distdl.run_workers(main, 4)
for worker, (_, shape, _) in enumerate(results):
    print(f"worker {worker} has a block of {shape} of the volume of {tuple(scan.shape)}")

# %%
# ``full_tensor`` has brought the answer together, so that we can look at it. The lines are where the blocks meet. The
# network sees across them: each convolution fetches the cells that it reads beyond its block.

losses, _, found = results[0]
right = (found == pores).float().mean().item()
print(f"{100 * right:.1f} % of all cells are classified as they should be")

figure, panels = plt.subplots(1, 3, figsize=(8, 3), layout="constrained")
shown = {"the scan": scan[0, 0], "the pores": pores[0], "what the network finds": found[0]}
for axes, (title, volume) in zip(panels, shown.items(), strict=True):
    axes.imshow(volume[:, :, 12], cmap="gray" if title == "the scan" else "cividis")
    axes.axhline(SIZE[0] / 2 - 0.5, color="white", linewidth=1)
    axes.axvline(SIZE[1] / 2 - 0.5, color="white", linewidth=1)
    axes.set(title=title, xticks=[], yticks=[])

assert right > 0.9

# %%
# Is it the same?
# ---------------
#
# This volume is small, so one worker can train on it after all. The losses agree. What differs is the order in which
# sums are rounded, so the last digits drift apart as training goes on.

alone = train(copy.deepcopy(network), scan, pores)
for step in (0, 1, 2, STEPS - 1):
    print(f"step {step:2}: loss {alone[step]:.6f} on one worker, {losses[step]:.6f} on four")

assert all(abs(a - b) < 1e-4 for a, b in zip(alone[:3], losses[:3], strict=True))

# %%
# For your own model, :func:`distdl.suggest` finds the grid: :doc:`/guide/split`. For its training loop, with mixed
# precision, checkpoints and the rest, see :doc:`/guide/training`. ``examples/unet3d.py`` of the repository is a larger
# program of this kind, which measures the memory while it trains.
