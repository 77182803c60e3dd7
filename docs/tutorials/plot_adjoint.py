"""
A primitive and its adjoint
===========================

distdl is made of a few movements of data, and each has a backward. This page takes one of them, the broadcast, and
shows why its backward is a sum, and how to test that it is the right one.
"""

import textwrap

import matplotlib.pyplot as plt
import numpy as np
import torch

import distdl
from distdl.nn import Broadcast
from distdl.testing import assert_adjoint

# %%
# The movement
# ------------
#
# Three workers have a tensor each. Four workers stand in the column below each of them, twelve in all, and every one
# needs a copy of the tensor of its column. In distdl's words, a partition of 1 x 3 workers feeds one of 4 x 3.
# :func:`distdl.draw` draws it: the broadcast, and its adjoint beside it. Each colour is a worker.

distdl.draw("broadcast 1x3 4x3")

# %%
# In the adjoint, every arrow is turned round. What comes back to one worker from four is added up there.
#
# Why a sum? The loss depends on a worker's tensor through all of its copies. So its gradient is the sum of theirs:
#
# .. math:: y_t = x_{s(t)} \qquad \partial x_s = \sum_{t:\; s(t) = s} \partial y_t
#
# Here :math:`s(t)` is the worker that feeds worker :math:`t`.
#
# Run it
# ------
#
# ``main`` runs on twelve workers. A worker that has no tensor passes one without elements. Each worker then sends back
# its own number as the gradient.


def main():
    P = distdl.world()
    P_x, P_y = P[:3].reshape(1, 3), P.reshape(4, 3)
    layer = Broadcast(P_x, P_y)
    x = torch.full((1, 2), 10.0 * (P.rank + 1)) if P.rank < 3 else torch.empty(1, 0)
    x.requires_grad_()
    y = layer(x)
    y.backward(torch.full_like(y, float(P.rank)))
    return y.tolist(), x.grad.tolist()


results = distdl.run_workers(main, 12)
print("what each worker got:")
for row in range(4):
    print("   ", *(results[3 * row + column][0] for column in range(3)))
print("gradients of worker 0, 1 and 2:")
print("   ", *(gradient for _, gradient in results[:3]))

for worker, (y, gradient) in enumerate(results):
    assert y == [2 * [10.0 * (worker % 3 + 1)]]
    assert worker >= 3 or gradient == [2 * [float(sum(range(worker, 12, 3)))]]

# %%
# Worker 0 has fed the workers 0, 3, 6 and 9. Its gradient is 0 + 3 + 6 + 9 = 18.
#
# As a matrix
# -----------
#
# A movement of data is linear. So it is a matrix: a row for each cell that arrives, a column for each cell that is
# sent, and a 1 where the one is a copy of the other. Nobody multiplies by it. But it can be drawn, and it says what the
# adjoint is: the transpose.
#
# The matrix of the broadcast has twelve rows and three columns here, if each tensor is one cell. We can read it
# from the layer itself: send a 1 from one worker and 0 from the others.


def forward_matrix():
    P = distdl.world()
    layer = Broadcast(P[:3].reshape(1, 3), P.reshape(4, 3))
    columns = []
    for sender in range(3):
        x = torch.full((1, 1), float(P.rank == sender)) if P.rank < 3 else torch.empty(1, 0)
        columns.append(layer(x).item())
    return columns


def adjoint_matrix():
    P = distdl.world()
    layer = Broadcast(P[:3].reshape(1, 3), P.reshape(4, 3))
    columns = []
    for sender in range(12):
        x = torch.zeros(1, 1 if P.rank < 3 else 0, requires_grad=True)
        y = layer(x)
        y.backward(torch.full_like(y, float(P.rank == sender)))
        columns.append(x.grad.sum().item())
    return columns


forward = np.array(distdl.run_workers(forward_matrix, 12))
adjoint = np.array(distdl.run_workers(adjoint_matrix, 12)[:3])

figure, panels = plt.subplots(1, 2, figsize=(7, 3.6), layout="constrained", width_ratios=[1, 2])
for axes, matrix, title in zip(panels, (forward, adjoint), ("broadcast", "its adjoint"), strict=True):
    axes.imshow(matrix, cmap="Blues", vmin=0, vmax=1.4)
    for (row, column), value in np.ndenumerate(matrix):
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", color="#bbb" if value == 0 else "black")
    axes.set(title=title, xlabel="worker that sends", ylabel="worker that gets")
    axes.set(xticks=range(matrix.shape[1]), yticks=range(matrix.shape[0]))

assert np.array_equal(adjoint, forward.T)

# %%
# Test an adjoint
# ---------------
#
# Matrices of real layers are too large to be written down. There is a test that needs none. Take any :math:`x` and any
# :math:`\partial y`. If :math:`F^*` is the adjoint of :math:`F`, these two numbers are the same, where a product is the
# sum over all workers:
#
# .. math:: \langle F x, \; \partial y \rangle = \langle x, \; F^* \partial y \rangle


def both_products():
    P = distdl.world()
    layer = Broadcast(P[:3].reshape(1, 3), P.reshape(4, 3))
    numbers = torch.Generator().manual_seed(P.rank)
    x = torch.randn(1, 5 if P.rank < 3 else 0, generator=numbers, dtype=torch.float64).requires_grad_()
    y = layer(x)
    dy = torch.randn(y.shape, generator=numbers, dtype=torch.float64)
    y.backward(dy)
    assert_adjoint(layer, x, dy)
    return (y * dy).sum().item(), (x * x.grad).sum().item()


left, right = np.sum(distdl.run_workers(both_products, 12), axis=0)
print(f"<Fx, dy>  = {left:.12f}")
print(f"<x, F*dy> = {right:.12f}")

assert abs(left - right) < 1e-12

# %%
# ``assert_adjoint`` of ``distdl.testing`` does this in one line. It says nothing if all is well. Here is a layer whose
# backward takes a mean where it should take a sum, a mistake that trains, but with too small a rate:


class Mean(torch.autograd.Function):
    """Changes nothing in the forward, and divides by four in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 4


class WrongBroadcast(Broadcast):
    def forward(self, x):
        return Mean.apply(super().forward(x))


def test_the_wrong_one():
    P = distdl.world()
    layer = WrongBroadcast(P[:3].reshape(1, 3), P.reshape(4, 3))
    x = torch.ones(1, 2 if P.rank < 3 else 0, dtype=torch.float64)
    try:
        assert_adjoint(layer, x)
    except AssertionError as error:
        return str(error)


message = distdl.run_workers(test_the_wrong_one, 12)[0]
for line in message.splitlines()[:6]:
    print(textwrap.fill(line, 110, subsequent_indent="  "))

assert "the backward is not the adjoint" in message

# %%
# All workers raise the same error. For small tensors, it names the cells where the two differ: here the first four.
#
# The other movements have pages of their own: :doc:`/primitives/index`. :doc:`/concepts/index` says how they are all
# made of one idea, and :doc:`/guide/draw` what else can be drawn.
