"""Provision: how weights and running statistics come to the blocks that a normalisation works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod
from operator import or_

import torch

from distdl.exchange import Operator
from distdl.geometry.boxes import Intervals, Shape, balanced, shape
from distdl.ops.setup import Site
from distdl.partition import Layout, Partition, Signature
from distdl.partition.layout import Lookup
from distdl.plan import Plan
from distdl.plan.planning import broadcast, copy
from distdl.tensors.derivatives import NONE


def weights_for(site: Site, needed: Mapping[int, Intervals], row: Shape, weights: Sequence[Signature]) -> Operator:
    """Weight and bias, from the workers that store them to those that have their part of x, as one message."""
    layout, dtype, count = weights[0].layout, weights[0].dtype, len(weights)
    derivatives = reduce(or_, (one.derivatives for one in weights))
    stored = dict(zip(needed, layout.intervals, strict=True))
    P_x = site.partition
    home = layout.partition.reshape([n if dim in needed else 1 for dim, n in enumerate(P_x.workers.shape)])
    plan = _rows_plan(site, home, stored, needed, count)
    own = [one.local for one in weights]
    if plan is None:
        return site.identity(dtype, derivatives, *own)
    return site.operator(plan, dtype, derivatives, own, [row] * count)


def statistics_for(site: Site, needed: Mapping[int, Intervals], row: Shape) -> Operator:
    """The running mean and variance, from workers that keep those of a balanced block to those that use others."""
    P_x = site.partition
    kept = {dim: balanced(intervals[-1][1], len(intervals)) for dim, intervals in needed.items()}
    home = P_x[tuple(slice(None if dim in needed else 1) for dim in range(P_x.workers.ndim))]
    if kept == needed:
        return site.identity(torch.float64, NONE, *[(prod(row),)] * 2)
    plan = _rows_plan(site, home, kept, needed, 2)
    own = prod(shape(_over(home, kept)[site.me])) if site.me in home else 0
    assert plan is not None
    return site.operator(plan, torch.float64, NONE, [(own,)] * 2, [row] * 2)


def _rows_plan(
    site: Site,
    home: Partition,
    stored: Mapping[int, Intervals],
    needed: Mapping[int, Intervals],
    rows: int,
) -> Plan | None:
    """How rows move from the blocks that are stored to those that are needed; None if they are all there."""
    if needed == stored and home == site.partition:
        return None
    if needed != stored:
        return copy(_over(home, stored, rows), _over(site.partition, needed, rows), site.me)
    blocks = _over(home, stored)
    return broadcast(home, site.partition, Lookup(tuple(blocks), lambda w: (rows, *shape(blocks[w]))), site.me)


def _over(P: Partition, blocks: Mapping[int, Intervals], rows: int = 0) -> Layout:
    """A row over the workers of P: split in the dims in which it varies; or, in dim 0, several rows."""
    along = [blocks.get(dim, [(0, 1)] * places) for dim, places in enumerate(P.workers.shape)]
    return Layout.along(P.reshape(1, *P.workers.shape), [[(0, rows)], *along]) if rows else Layout.along(P, along)
