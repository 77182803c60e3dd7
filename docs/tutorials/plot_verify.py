"""
A mistake that raises no error
==============================

A distributed model that is wrong seldom crashes. It computes something else, and trains. This page takes two models
with a mistake of this kind. :func:`distdl.verify` finds it, and says in which module.
"""

import copy
import textwrap

import matplotlib.pyplot as plt
import torch
from torch import nn

import distdl

# %%
# A model that is right
# ---------------------
#
# It has a layer of our own, ``Contrast``. This subtracts the mean of all pixels of a picture, and divides by their
# standard deviation.


def contrast(x):
    return (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)


class Contrast(nn.Module):
    def forward(self, x):
        return contrast(x)


def build(layer):
    torch.manual_seed(0)
    return nn.Sequential(layer, nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 3, padding=1)).double()


# %%
# ``verify`` trains a copy of the model on worker 0 alone, and another one on all workers. It compares everything that
# the two compute: the output of each module, all gradients, and the weights after each step. So take a small input. Let
# its sizes be uneven, since mistakes like to hide where everything can be divided by two. And take float64, where a
# mistake stands out most.

rows, columns = torch.meshgrid(torch.linspace(0, 1, 45), torch.linspace(0, 1, 61), indexing="ij")
picture = (rows + 2 * columns + 0.3 * torch.sin(25 * rows) * torch.sin(25 * columns))[None, None].double()
GRID = (1, 1, 2, 2)


def show(result):
    for line in str(result).splitlines():
        print(textwrap.fill(line, 110, subsequent_indent=" " * 16))


certificate = distdl.run_workers(lambda: distdl.verify(build(Contrast()), GRID, picture))[0]
show(certificate)

# %%
# This is a certificate. It says how many tensors were compared, what the largest difference is, and that rounding
# explains more than that. How much rounding explains is not a guess: ``verify`` finds it by running the sequential
# program again, with inputs and weights that differ in their last bit.
#
# The mean goes over the whole picture, although each worker has a quarter of it. ``x.mean`` is a function of torch, and
# distdl knows what it has to add up.
#
# A model that is wrong
# ---------------------
#
# Now somebody wants to be fast. :func:`distdl.local_map` calls a function on each worker's block, and nothing is
# sent:


class FastContrast(nn.Module):
    def forward(self, x):
        return distdl.local_map(contrast)(x)


# %%
# No error comes. The shapes are right. The values are near zero, as they should be. Look at them, and the mistake is
# plain: each block has a mean of its own.


def apply(layer):
    def main():
        model = distdl.distribute(copy.deepcopy(layer), GRID)
        return model(distdl.distribute_tensor(picture, GRID)).full_tensor()

    return distdl.run_workers(main)[0][0, 0]


right, wrong = apply(Contrast()), apply(FastContrast())
figure, panels = plt.subplots(1, 3, figsize=(9, 2.5), layout="constrained")
for axes, (title, shown) in zip(
    panels, {"Contrast": right, "FastContrast": wrong, "difference": wrong - right}.items(), strict=True
):
    image = axes.imshow(shown, cmap="RdBu_r", vmin=-2.5, vmax=2.5)
    axes.set(title=title, xticks=[], yticks=[])
figure.colorbar(image, ax=panels)

assert torch.allclose(right, contrast(picture)[0, 0])
assert (wrong - right).abs().max() > 1

# %%
# But nobody looks at the values inside of a network. ``verify`` does. It raises an error on every worker:


def verified(model):
    def main():
        try:
            return distdl.verify(model, GRID, picture)
        except AssertionError as error:
            return error

    return distdl.run_workers(main)[0]


error = verified(build(FastContrast()))
show(error)

assert error.difference["forward"]["name"] == "0"

# %%
# Read the line of the forward first. It names module ``0``, which is ``FastContrast``. Everything behind it is wrong
# because of it, so it is not worth looking at.
#
# A wrong backward
# ----------------
#
# The other kind of mistake is harder to see. Here the forward is right: the function passes on its input. Its backward
# divides the gradient by its norm, so that no gradient is too large. On a block, that is the norm of the block:


class Tame(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class FastTame(nn.Module):
    def forward(self, x):
        return distdl.local_map(Tame.apply)(x)


model = build(Contrast())
model.insert(2, FastTame())
error = verified(model)
show(error)

assert error.difference["backward"]["name"] == "1"

# %%
# The line of the forward names a weight after the first step. The loss before it agrees, so all outputs were right. The
# line of the backward leads to the place: the gradient of the output of ``2`` agrees, and that of the output of ``1``
# differs. Between these two stands module ``2``, which is ``FastTame``.
#
# The cure is to leave out ``local_map`` in both layers. Then ``Tame`` gets the whole gradient as a global tensor:


class RightTame(nn.Module):
    def forward(self, x):
        return Tame.apply(x)


model[2] = RightTame()
certificate = verified(model)
show(certificate)

assert certificate.compared["outputs"] == 12

# %%
# The same from the command line is ``distdl verify networks:build --input 1x1x45x61 --partition 1x1x2x2``, which a test
# of yours may call. :doc:`/guide/verify` has all of it, also for programs that are distributed by DTensor, by FSDP, or
# by hand.
