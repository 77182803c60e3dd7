"""Weights: where a convolution works and stores its parameters."""

from __future__ import annotations

from distdl.geometry.boxes import Shape, balanced
from distdl.partition import Partition
from distdl.partition.groups import dims
from distdl.partition.layout import Layout


def own_work(name: str, space: int, groups: int, P_x: Partition) -> Partition:
    """Where a convolution works whose input and output are cut up alike.

    Raises: ValueError that names the layer, if P_x does not fit.
    """
    shape = P_x.workers.shape
    if len(shape) != space + 2 or (shape[1] != 1 and groups == 1):
        raise ValueError(
            f"{name} needs P_x: batch x 1 x {space} dims of space, or with groups: batch x channels x {space} dims of "
            f"space; got {dims(shape)} and groups {groups}"
        )
    work: Partition = P_x.reshape(*shape[:2], 1, *shape[2:])
    return work


def shared_work(name: str, space: int, groups: int, P_x: Partition, P_y: Partition, P_w: Partition) -> Partition:
    """Where a convolution works that has a partition for it. With groups, in is 1: a worker reads the channels of its
    own groups, wherever they are.

    Raises: ValueError that names the layer, if the partitions do not fit.
    """
    work: Partition = P_w.reshape(1, *P_w.workers.shape) if P_w.workers.ndim == space + 2 else P_w
    p_x, p_y, (batch, *p_w) = (P.workers.shape for P in (P_x, P_y, work))
    inner = p_x[1:2] if groups > 1 and p_w[1:2] == [1] else p_w[1:2]
    if len(p_w) != space + 2 or p_x != (batch, *inner, *p_w[2:]) or p_y != (batch, p_w[0], *p_w[2:]):
        raise ValueError(
            f"{name} needs P_x: batch x p_in x space, P_y: batch x p_out x space and P_w: batch x p_out x p_in x space "
            f"(without batch if that is 1) with {space} dims of space; "
            f"got P_x: {dims(p_x)}, P_y: {dims(p_y)}, P_w: {dims(P_w.workers.shape)}"
        )
    return work if groups == 1 else work[:, :, :1]


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
