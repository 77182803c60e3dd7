"""
A layer with split weights, written by hand
===========================================

``distdl.distribute`` splits activations. Sometimes it is a weight that is too large for one worker. This page writes a
linear layer whose matrix lies on four workers, in twelve lines. It tests the layer against ``torch.nn.Linear``, and
trains it.

The same two steps make any other layer: say which block of a weight each worker has, and put movements around a
function of torch.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

import distdl
from distdl.nn import SumReduce, local
from distdl.nn.placement import uniform_parameter
from distdl.partition import Layout
from distdl.testing import assert_matches_sequential

# %%
# Which block is whose
# --------------------
#
# The layer computes :math:`y = x W^T`. Let us cut :math:`W` along its inputs, and :math:`x` in the same places. Then
# worker :math:`i` can multiply its part of :math:`x` by its part of :math:`W`, and what is missing is a sum:
#
# .. math:: y = \sum_i x_i W_i^T
#
# A ``Layout`` says which block each worker has. Here is that of a matrix of 6 outputs and 14 inputs, over a grid of
# 1 x 4 workers. 14 is no multiple of 4, which does not matter: the first blocks are longer.


def draw_the_weight():
    P = distdl.world().reshape(1, 4)
    return distdl.draw(Layout.balanced(P, (6, 14)))


distdl.run_workers(draw_the_weight)[0]

# %%
# The sum brings the parts of :math:`y` together on worker 0. ``SumReduce`` is the movement that does this. Its adjoint
# is a broadcast: each worker gets the gradient of :math:`y`. That is all that its gradients need.

distdl.draw("sum-reduce 1x4 1x1 --shape 3x6 --dtype float32")

# %%
# The layer
# ---------


class RowLinear(distdl.nn.Module):
    def __init__(self, P_x, P_y, in_features, out_features):
        super().__init__()
        self.P_x, self.P_y, self.out_features = P_x, P_y, out_features
        self.parameter_layouts = {"weight": Layout.balanced(P_x, (out_features, in_features))}
        self.weight = uniform_parameter(self.parameter_layouts["weight"], bound=in_features**-0.5)
        self.add = SumReduce(P_x, P_y)

    def forward(self, x):
        y = local(F.linear, (x.shape[0], self.out_features), (x, (1, 1)), (self.weight, (1, 1)))
        return self.add(y)


# %%
# Line by line:
#
# - ``parameter_layouts`` tells tests, and ``distdl.save``, where the blocks of the weight belong.
# - ``uniform_parameter`` makes this worker's block, with the values that ``torch.nn.Linear`` would begin with. They
#   are the same on one worker and on many.
# - ``local`` calls ``F.linear`` on this worker's tensors. A worker may have no features at all, if there are fewer
#   than workers. ``F.linear`` would raise an error there. ``local`` gives zeros instead, and they stay connected to
#   :math:`x`, so that this worker takes part in the backward.
# - Nobody writes a backward. That of ``F.linear`` is torch's, and that of ``SumReduce`` is its adjoint.
#
# Test it
# -------
#
# ``assert_matches_sequential`` gives the layer the weights of a sequential one. It compares the outputs, the gradients
# of the inputs, and the gradients of the weights. Its error would name the first cells that differ. We test more
# workers than features, too.


def compare():
    P = distdl.world()
    for features in (14, 4, 3):
        layer = RowLinear(P.reshape(1, 4), P[:1].reshape(1, 1), features, 6).double()
        reference = nn.Linear(features, 6, bias=False).double()
        numbers = torch.Generator().manual_seed(features)
        reference.weight.data = torch.randn(6, features, generator=numbers, dtype=torch.float64)
        assert_matches_sequential(layer, reference, torch.randn(5, features, generator=numbers, dtype=torch.float64))
    return "the same as torch.nn.Linear, for 14, 4 and 3 features"


print(distdl.run_workers(compare)[0])

# %%
# Train it
# --------
#
# The task is to find a matrix again: a picture of four letters. The inputs are noise. Each worker sees only its columns
# of the inputs, and only worker 0 has the outputs. The others have a result without elements. Its sum is 0, but it
# keeps them in the backward.

FONT = {
    "D": "110 101 101 101 110", "I": "111 010 010 010 111", "S": "011 100 010 001 110", "T": "111 010 010 010 010",
}  # fmt: skip
rows = [" ".join(FONT[letter].split()[row] for letter in "DIST") for row in range(5)]
truth = torch.tensor([[float(cell == "1") for cell in row] for row in rows])
numbers = torch.Generator().manual_seed(0)
inputs = torch.randn(200, truth.shape[1], generator=numbers)
outputs = inputs @ truth.T
STEPS = 40


def train():
    torch.manual_seed(0)
    P = distdl.world()
    layer = RowLinear(P.reshape(1, 4), P[:1].reshape(1, 1), truth.shape[1], truth.shape[0])
    x = Layout.balanced(P.reshape(1, 4), inputs.shape).block(inputs)
    optimiser, losses = torch.optim.SGD(layer.parameters(), 0.5), []
    for _ in range(STEPS):
        optimiser.zero_grad()
        y = layer(x)
        loss = F.mse_loss(y, outputs) if P.rank == 0 else y.sum()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses, layer.weight.detach()


results = distdl.run_workers(train)
losses, learned = results[0][0], torch.cat([weight for _, weight in results], 1)
for worker, (_, weight) in enumerate(results):
    print(f"worker {worker} has columns of shape {tuple(weight.shape)} of {tuple(truth.shape)}")
print(f"loss {losses[0]:.3f} at first, {losses[-1]:.0e} at the end")

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.3), layout="constrained", width_ratios=[2, 1])
left.imshow(learned, cmap="Blues", vmin=-0.2, vmax=1.2)
start = 0
for worker, (_, weight) in enumerate(results):
    left.text(start + (weight.shape[1] - 1) / 2, 5.3, f"worker {worker}", ha="center", va="center", fontsize=9)
    start += weight.shape[1]
    left.axvline(start - 0.5, color="black", linestyle="dashed", linewidth=1)
left.set(title="the weight, on four workers", xticks=[], yticks=[], ylim=(5.8, -0.5))
right.semilogy(losses)
right.set(title="loss", xlabel="step")

# %%
# Is it the training of one worker? The same with ``torch.nn.Linear``, beginning with the same weights:

torch.manual_seed(0)
sequential = nn.Linear(truth.shape[1], truth.shape[0], bias=False)
sequential.weight.data = distdl.run_workers(
    lambda: RowLinear(*2 * [distdl.world().reshape(1, 1)], truth.shape[1], truth.shape[0]).weight.detach(), 1
)[0]
optimiser = torch.optim.SGD(sequential.parameters(), 0.5)
for _ in range(STEPS):
    optimiser.zero_grad()
    F.mse_loss(sequential(inputs), outputs).backward()
    optimiser.step()
difference = (sequential.weight - learned).abs().max().item()
print(f"the weights differ by at most {difference:.0e}")

assert difference < 1e-5

# %%
# :doc:`/developers/add-a-layer` goes on: weights that travel to where they are used, several tensors in one message,
# and errors that all workers raise together. :doc:`/guide/own-functions` is for functions, not for layers. Most models
# need neither.
