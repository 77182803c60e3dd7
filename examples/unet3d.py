"""Segment a volume that is too large for one worker, with a 3-d U-Net written in plain torch.

    distdl run -n 4 examples/unet3d.py       (or: python examples/unet3d.py, with threads)

The network below knows nothing of distdl. ``distdl.distribute`` splits its activations over 2 x 2 x 1 blocks of the
volume::

                 z                       each worker has the weights, its block of every activation, and the cells
              +-----+-----+              around it that a convolution reads, which come from their owners
             /     /     /|
            +-----+-----+ |
            |  0  |  2  | +   x          the same loss, the same gradients, the same weights after every step as on
            |     |     |/|              one worker; about a quarter of the memory
            +-----+-----+ |
            |  1  |  3  | +
            |     |     |/
            +-----+-----+

The volume is a rock as a micro-tomograph sees it: excursion sets of Gaussian random fields, which are the standard
model of porous media (Quiblier, J. Colloid Interface Sci. 98, 1984), with the structure of a sandstone: grains, pores
between them that connect over many grain sizes, and clay that coats the grains. The scanner adds blur, noise and a
trend of brightness, so that no threshold separates the three, and a network has to look at shapes.

It prints what each worker holds at most, beside the sequential run, and stops if a worker needs more than the limit.

With --compile, it then trains the network once more with a step that is recorded and replayed (distdl.compile). It
prints the losses, which are the same in every bit, and how long a step takes as it is and compiled.
"""

import copy
import sys
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import nn
from torch.nn import functional as F

import distdl
from distdl.workers.footprint import Footprint

SIZE = (40, 36, 28)  # cells of the volume; nothing has to be divisible by anything
LIMIT = 10 << 20  # bytes that one worker may hold
STEPS = 4
TIMED = 5
CLASSES = 3  # grain, pore, clay


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first = nn.Conv3d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.InstanceNorm3d(outputs, affine=True)
        self.second = nn.Conv3d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.InstanceNorm3d(outputs, affine=True)

    def forward(self, x):
        x = F.leaky_relu(self.norm1(self.first(x)), inplace=True)
        return F.leaky_relu(self.norm2(self.second(x)), inplace=True)


class UNet(nn.Module):
    """An encoder that halves the volume, a decoder that doubles it, and what the one knows handed to the other."""

    def __init__(self, channels=(8, 16, 32)):
        super().__init__()
        inputs = (1, *channels[:-1])
        self.down = nn.ModuleList(Block(i, o) for i, o in zip(inputs, channels, strict=True))
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(o, i, 2, stride=2) for i, o in zip(channels[-2::-1], channels[:0:-1], strict=True)
        )
        self.merge = nn.ModuleList(Block(2 * i, i) for i in channels[-2::-1])
        self.head = nn.Conv3d(channels[0], CLASSES, 1)

    def forward(self, x):
        kept = []
        for block in self.down[:-1]:
            x = block(x)
            kept.append(x)
            x = F.max_pool3d(x, 2)
        x = self.down[-1](x)
        for up, merge, beside in zip(self.up, self.merge, reversed(kept), strict=True):
            x = up(x)
            missing = [n - m for n, m in zip(beside.shape[2:], x.shape[2:], strict=True)]
            x = F.pad(x, [width for n in reversed(missing) for width in (0, n)], mode="replicate")
            x = merge(torch.cat([beside, x], 1))
        return self.head(x)


def smooth(field, passes):
    for _ in range(passes):
        field = F.avg_pool3d(F.pad(field, (1,) * 6, mode="circular"), 3, 1)
    return (field - field.mean()) / field.std()


def rock():
    """A volume ``(1, 1, *SIZE)`` as a scanner sees it, and the class of each cell."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, 1, 1, *SIZE, generator=generator)
    grains, coating = smooth(noise[0], 6), smooth(noise[1], 2)
    classes = torch.zeros(1, 1, *SIZE, dtype=torch.long)
    classes[grains > 0.4] = 1  # pores: a third of the volume, and connected
    classes[(grains > 0.1) & (grains <= 0.4) & (coating > -0.3)] = 2  # clay lines the pores
    brightness = torch.tensor([1.0, 0.0, 0.55])[classes]
    trend = torch.linspace(0, 0.3, SIZE[0]).reshape(-1, 1, 1)  # beam hardening
    seen = F.avg_pool3d(F.pad(brightness, (1,) * 6, mode="replicate"), 3, 1) + trend + 0.15 * noise[2]
    return seen, classes[:, 0]


def dice(scores, classes):
    """One minus the overlap of prediction and truth: a loss that a user writes, with sums over space."""
    truth = torch.zeros_like(scores).scatter_(1, classes.unsqueeze(1), 1.0)
    found, dims = scores.softmax(1), (0, 2, 3, 4)
    return 1 - (2 * (found * truth).sum(dims) / (found.sum(dims) + truth.sum(dims))).mean()


def step_of(model):
    """The function that computes the loss, and the gradients."""

    def step(x, classes):
        scores = model(x)
        loss = F.cross_entropy(scores, classes) + dice(scores, classes)
        loss.backward()
        return loss

    return step


def train(model, step, x, classes):
    """The losses of a few steps."""
    optimiser, losses = torch.optim.AdamW(model.parameters(), 2e-3), []
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = step(x, classes)
        optimiser.step()
        losses.append(loss.item())
    return losses


def train_compiled(model, x, classes):
    """The losses of a few steps with a compiled step; and how many milliseconds a step takes as it is, and compiled."""
    as_it_is = step_of(model)
    step = distdl.compile(as_it_is)
    losses = train(model, step, x, classes)
    medians = []
    for one in (as_it_is, step):
        times = []
        for _ in range(3 + TIMED):  # a compiled step is replayed after three calls, if there were none before
            model.zero_grad()
            began = perf_counter()
            one(x, classes)
            times.append(1000 * (perf_counter() - began))
        medians.append(median(times[3:]))
    return losses, medians


def build():
    torch.manual_seed(0)
    return UNet()


def main(compiles=False):
    P = distdl.world()
    grid = P[:4].reshape(1, 1, 2, 2, 1)
    seen, truth = rock() if P.rank == 0 else (None, None)  # one worker has the volume
    for turn in range(P.size):  # one worker after another: threads draw from one generator
        if turn == P.rank:
            model = build()
        P.allgather_data(0)
    alone = None
    if P.rank == 0:
        with Footprint() as sequential:
            copied = copy.deepcopy(model)
            alone = train(copied, step_of(copied), seen, truth)
            del copied

    again = distdl.distribute(copy.deepcopy(model), grid, fallback="error") if compiles else None
    model = distdl.distribute(model, grid, fallback="error")
    x = distdl.distribute_tensor(seen, grid)
    classes = distdl.distribute_tensor(truth, grid, axes=(0, 2, 3, 4))  # they have no channels
    del seen, truth
    with Footprint() as own:
        losses = train(model, step_of(model), x, classes)
    if compiles:
        of_lines, times = train_compiled(again, x, classes)

    peaks = P.allgather_data(own.peak)
    if P.rank == 0:
        print("loss, sequential: ", *(f"{loss:.6f}" for loss in alone))
        print("loss, distributed:", *(f"{loss:.6f}" for loss in losses))
        print(
            f"sequential holds at most {sequential.peak / 2**20:.1f} MiB, more than the limit of "
            f"{LIMIT / 2**20:.0f} MiB"
        )
        for worker, peak in enumerate(peaks[:4]):
            print(f"worker {worker} holds at most   {peak / 2**20:.1f} MiB")
        if compiles:
            print("loss, compiled:   ", *(f"{loss:.6f}" for loss in of_lines))
            print("a step without the optimiser: {:.0f} ms as it is, {:.0f} ms compiled".format(*times))
            assert of_lines == losses, "the losses of compiled steps have other bits"
        assert sequential.peak > LIMIT >= max(peaks), "a worker holds more than the limit"
        assert all(abs(a - b) < 1e-3 for a, b in zip(alone, losses, strict=True))


if __name__ == "__main__":
    distdl.run_workers(partial(main, "--compile" in sys.argv[1:]), 4)
