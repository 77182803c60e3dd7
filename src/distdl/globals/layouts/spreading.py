"""How labels are split over workers. Each dim of a tensor has a label, as in an einsum.

Dims of several tensors with the same label have the same index. This file computes layouts only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from distdl.geometry.boxes import Interval, balanced
from distdl.globals.layouts.context import Context, KnownLayout

Labels = tuple[Hashable, ...]

SPACIOUS = 4
"""The least cells for each worker in a dim that is split in the place of another, so that uneven parts cost less."""


@dataclass(frozen=True)
class Spread:
    """How labels are split: an array of workers with an axis for each label, and the intervals along it."""

    labels: Labels
    workers: Any
    intervals: tuple[tuple[Interval, ...], ...]

    def places(self, label: Hashable) -> int:
        """Into how many parts a label is split."""
        return int(self.workers.shape[self.labels.index(label)])

    def along(self, label: Hashable) -> tuple[Interval, ...]:
        return self.intervals[self.labels.index(label)]

    def longest(self, label: Hashable) -> int:
        """Cells along a label that one worker has, at most."""
        return max((stop - start for start, stop in self.along(label)), default=0)

    def volume(self, labels: Sequence[Hashable]) -> int:
        """Cells of a tensor with these labels that one worker has, at most."""
        return prod(self.longest(label) for label in labels)

    def whole_along(self, label: Hashable, candidates: Sequence[Hashable]) -> Spread:
        """The spread in which a label is whole, and its workers split another one further.

        That is the candidate of which a worker has the most cells. The new intervals lie inside of the old ones. If no
        candidate has more than one cell on a worker, the workers at the first place do all, and the others nothing.
        """
        axis = self.labels.index(label)
        places = self.workers.shape[axis]
        extent = max(stop for _, stop in self.intervals[axis])
        intervals = list(self.intervals)
        intervals[axis] = ((0, extent),)
        others = [one for one in candidates if one != label and self.longest(one) > 1]
        if not others:
            return replace(self, workers=self.workers.take([0], axis), intervals=tuple(intervals))
        to = self.labels.index(max(others, key=self.longest))
        behind = to if to < axis else to - 1
        workers = np.moveaxis(self.workers, axis, -1)  # without the axis, and then with it behind the one it splits
        workers = np.moveaxis(workers, -1, behind + 1)
        merged = list(np.delete(np.array(self.workers.shape), axis))
        merged[behind] *= places
        workers = np.expand_dims(workers.reshape(merged), axis)
        intervals[to] = tuple(
            (start + i, start + j) for start, stop in intervals[to] for i, j in balanced(stop - start, places)
        )
        return Spread(self.labels, workers, tuple(intervals))

    def layout(self, context: Context, labels: Sequence[Hashable]) -> KnownLayout:
        """The layout of a tensor with these labels. Other labels must not be split."""
        order = [self.labels.index(label) for label in labels]
        rest = [axis for axis in range(len(self.labels)) if axis not in order]
        workers = self.workers.transpose(order + rest).reshape([self.workers.shape[axis] for axis in order])
        return context.layout(workers, [self.intervals[axis] for axis in order])


def spread_of(layout: KnownLayout, labels: Sequence[Hashable], order: Labels, extents: dict[Hashable, int]) -> Spread:
    """The spread of all labels as a tensor splits them. Labels that it lacks are whole.

    Args:
        labels: of the tensor's dims.
        order: all labels.
        extents: of all labels. A dim of extent 1 is broadcast, and its label is split evenly over the dim's places.
    """
    workers = layout.partition.workers
    rest = [label for label in order if label not in labels]
    workers = workers.reshape(workers.shape + (1,) * len(rest))
    have = [*labels, *rest]
    intervals = dict(zip(labels, layout.intervals, strict=True))
    for label in order:
        along = intervals.get(label)
        if along is None:
            intervals[label] = ((0, extents[label]),)
        elif max(stop for _, stop in along) != extents[label]:  # of extent 1, and broadcast
            intervals[label] = balanced(extents[label], len(along))
    return Spread(order, workers.transpose([have.index(label) for label in order]), tuple(intervals[i] for i in order))


def pencils(layout: KnownLayout, dims: Sequence[int]) -> KnownLayout:
    """The layout in which these dims are whole, and other dims are split further instead."""

    def make() -> KnownLayout:
        labels = tuple(range(len(layout.rulers)))
        spread = spread_of(layout, labels, labels, dict(enumerate(layout.extents)))
        for dim in dims:
            if spread.places(dim) > 1:
                spread = spread.whole_along(dim, [other for other in labels if other not in dims])
        return spread.layout(layout.context, labels)

    return layout.context.keep(("pencils", layout, tuple(dims)), make)
