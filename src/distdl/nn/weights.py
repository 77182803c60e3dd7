"""Weights: where the parameters of a contraction are stored, and how they travel as one message."""

from __future__ import annotations

from math import prod

import torch

from distdl.boxes import Shape, balanced
from distdl.layout import Layout
from distdl.partition import Partition


def stored_on(work: Partition, lead: int) -> Partition:
    """The workers that store weights, out x in: those at place 0 of the batch (the first axes) and of space (the last).

    Args:
        lead: number of axes of the batch, with which the work partition begins.
    """
    first = slice(0, 1)
    stored: Partition = work[(*[first] * lead, slice(None), slice(None), *[first] * (work.workers.ndim - lead - 2))]
    return stored


def weight_layouts(stored: Partition, out: int, inputs: int, outputs: int, taps: Shape) -> tuple[Layout, Layout]:
    """The blocks of the weight (outputs x inputs x taps) over out x in, and of the bias (outputs) where in is 0."""
    kernel = [[(0, tap)] for tap in taps]
    grid = stored.reshape(out, -1)
    weights = [balanced(outputs, out), balanced(inputs, grid.workers.shape[1]), *kernel]
    return (
        Layout.of(grid.reshape(*grid.workers.shape, *[1] * len(taps)), weights),
        Layout.of(grid[:, 0].reshape(out), [balanced(outputs, out)]),
    )


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What this worker stores of the parameters, as one vector."""
    if bias is None:
        return weight.reshape(-1)
    if bias.numel():
        return torch.cat([weight.reshape(-1), bias])
    return weight.reshape(-1) + bias.sum()


def unpack(vector: torch.Tensor, weight: Shape | None, bias: Shape | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of these shapes, as views; None where there is no shape."""
    if weight is None:
        return vector, None
    if bias is None:
        return vector.view(weight), None
    w, b = vector.split([prod(weight), prod(bias)])
    return w.view(weight), b
