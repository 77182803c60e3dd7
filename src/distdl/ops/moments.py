r"""Moments: means and variances over dims of a tensor that is split, in one exchange.

Each worker measures its block. What it measures are *entries*, one for each mean that its block has a part in: mean and
variance of its cells. How many cells there are follows from the layout and does not travel. The workers that need a
mean gather its entries and merge them, all in the same balanced order:

.. math:: s = \frac{n_b}{n_a + n_b}, \quad \delta = \mu_b - \mu_a, \quad \mu = (1 - s) \mu_a + s \mu_b, \quad
          v = (1 - s) v_a + s v_b + s (1 - s) \delta^2

So all get the same bits, and no square of a mean is subtracted from a mean of squares. Entries are float64: beside a
mean of 1e6 they keep the digits of a variance of 1.

Along each dim of the tensor, means are kept apart, merged over the whole extent, or merged in groups of entries:

.. code-block:: text

    batch norm over 2x2x1: channels kept,      what workers 0 and 2 gather and merge
    batch and space merged                     for each of their channels

        batch \ channels   0-2      3-5
                       +--------+--------+
                   0-4 |  w. 0  |  w. 1  |         worker 0's entry:  mean, variance
                       +--------+--------+
                   5-8 |  w. 2  |  w. 3  |         worker 2's entry:  mean, variance
                       +--------+--------+

Source: Chan, Golub & LeVeque, Updating formulae and a pairwise algorithm for computing sample variances (1979).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import gcd, prod

import torch

from distdl.geometry.boxes import Box, Interval, Intervals, Shape, runs, shape, within
from distdl.ops.merging import Measure, Merge, merged
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.plan import Plan
from distdl.plan.planning import copy
from distdl.tensors.connection import local, zeros_on
from distdl.transport.folding import fold


@dataclass(frozen=True)
class Along:
    """How the moments of a tensor are split along one of its dims.

    Attributes:
        owned: the entries that each place measures.
        needed: the entries that each place gathers.
        counts: the cells behind each of the consecutive entries that merge into one mean.
        spread: over how many entries a mean goes back: over all of a group; else 1.
        merges: whether a worker's cells along the dim share an entry.
    """

    owned: tuple[Interval, ...]
    needed: tuple[Interval, ...]
    counts: tuple[int, ...] = (1,)
    spread: int = 1
    merges: bool = False

    @classmethod
    def kept(cls, cells: Intervals, needed: Sequence[Interval] | None = None) -> Along:
        """A mean for each cell of the dim. A place needs those of its cells, or the given ones."""
        return cls(tuple(cells), tuple(cells if needed is None else needed))

    @classmethod
    def merged(cls, cells: Intervals) -> Along:
        """One mean over the dim. Every place that has cells measures one entry, and all places need all entries."""
        counts = tuple(stop - start for start, stop in cells if stop > start)
        return cls(runs([stop > start for start, stop in cells]), ((0, len(counts)),) * len(cells), counts, merges=True)

    @classmethod
    def grouped(cls, entries: Intervals, size: int) -> Along:
        """A mean for every ``size`` entries. A place needs all entries of the groups in which it has a part.

        >>> Along.grouped(((0, 3), (3, 6)), 2).needed
        ((0, 4), (2, 6))
        """
        needed = tuple((i // size * size, -(-j // size) * size) if j > i else (i, i) for i, j in entries)
        return cls(tuple(entries), needed, (1,) * size, size)


def subgroup(cells: Intervals, size: int) -> int:
    """How many cells may share an entry, where ``size`` cells have one mean and blocks may cut through them.

    >>> subgroup(((0, 4), (4, 8)), 4), subgroup(((0, 6), (6, 8)), 4), subgroup(((0, 3), (3, 8)), 4)
    (4, 2, 1)
    """
    return gcd(size, *(start for start, _ in cells))


@dataclass(frozen=True)
class Moments:
    """The moments of a tensor that is split over a partition, as this worker sees them.

    Attributes:
        along: for each dim of the tensor.
        centred: whether they are mean and variance; otherwise the mean of the squares.
        everywhere: workers of which each gathers all entries, also where it has no part of the tensor; None if a place
            gathers those that it needs.
    """

    partition: Partition
    along: tuple[Along, ...]
    centred: bool
    everywhere: Partition | None = None

    @cached_property
    def owned(self) -> Layout:
        """The entries that each worker measures; dim 0 is for mean and variance."""
        return self._layout([one.owned for one in self.along])

    @cached_property
    def needed(self) -> Layout:
        """The entries that each worker gathers."""
        needed = [one.needed for one in self.along]
        if self.everywhere is None:
            return self._layout(needed)
        return Layout.everywhere(self.everywhere, (self._kinds, *(max(j for _, j in along) for along in needed)))

    def _layout(self, intervals: Sequence[Intervals]) -> Layout:
        places = self.partition.reshape(1, *self.partition.workers.shape)
        return Layout.along(places, [[(0, self._kinds)], *intervals])

    @property
    def _kinds(self) -> int:
        return 2 if self.centred else 1

    def plan(self) -> Plan | None:
        """The movement of entries, from owned to needed; None if every worker measures just what it needs."""
        owned, needed = self.owned, self.needed
        return None if owned.intervals == needed.intervals else copy(owned, needed, self.partition.comm.rank)

    @cached_property
    def _own(self) -> Box:
        return self.owned.box_of(self.partition.comm.rank)

    @property
    def measured(self) -> Shape:
        """Shape of the entries that this worker measures."""
        return (self._kinds, *shape(self._own)[1:])

    @cached_property
    def gathered(self) -> Box:
        """The box of the entries that this worker gathers."""
        return self._needed[1:]

    @property
    def _needed(self) -> Box:
        return self.needed.box_of(self.partition.comm.rank)

    @property
    def arriving(self) -> Shape:
        """Shape of the entries that this worker gathers."""
        return (self._kinds, *shape(self._needed)[1:])

    @cached_property
    def merged(self) -> list[int]:
        """The dims along which this worker's cells share an entry."""
        return [dim for dim, one in enumerate(self.along) if one.merges]

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(map(prod, product(*[one.counts for one in self.along])))

    @cached_property
    def count(self) -> int:
        """The number of cells behind a mean."""
        return sum(self._counts)

    def centre(self, x: torch.Tensor) -> torch.Tensor:
        """The means of the block's cells, nearly, and as constants: subtracting them costs no digits."""
        if x.numel():
            return x.detach().mean(self.merged, keepdim=True)
        return x.new_zeros([1 if one.merges else n for one, n in zip(self.along, x.shape, strict=True)])

    def measure(self, x: torch.Tensor, centre: torch.Tensor | None) -> torch.Tensor:
        """This worker's entries, where x is what is left of its block after subtracting the centre, if there is one."""
        smallest = [1] * x.dim()
        if centre is not None and not x.numel():
            centre = x.new_zeros(smallest)

        def entries(block: torch.Tensor) -> torch.Tensor:
            measured: torch.Tensor = Measure.apply(block, centre, self.merged)
            return measured

        return local(entries, self.measured, (x, smallest))

    def merge(self, entries: torch.Tensor, differentiable: bool = True) -> torch.Tensor:
        """Means and variances, which are dim 0, of all entries that this worker has gathered."""
        merge: Callable[..., torch.Tensor] = Merge.apply if differentiable else merged
        return self._fold(entries, lambda states: merge(states, self._counts))

    def total(self, entries: torch.Tensor) -> torch.Tensor:
        """The sums of all entries with one mean, of entries that add up."""
        return self._fold(entries, lambda states: fold(states.unbind(), torch.add))

    def _fold(self, entries: torch.Tensor, several: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """One of all entries with one mean; ``several`` makes it of them, in dim 0."""
        paired, order, means, absent = self._folding
        kinds = entries.shape[0]
        states = entries.reshape(kinds, *paired).permute(order).reshape(len(self._counts), kinds, *means)
        if not self._counts:
            return zeros_on(states, states.shape[1:])
        folded: torch.Tensor = states[0] if len(self._counts) == 1 else several(states)
        return folded.sum(absent, keepdim=True) if absent else folded

    @cached_property
    def _folding(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """How gathered entries are brought into an order in which those of one mean are in dim 0."""
        extents = self.arriving[1:]
        merging = [len(one.counts) for one in self.along]
        means = [n // k if k else 1 for n, k in zip(extents, merging, strict=True)]
        paired = [n for pair in zip(means, merging, strict=True) for n in pair]
        order = [*range(2, len(paired) + 1, 2), 0, *range(1, len(paired) + 1, 2)]
        # a worker that gathers nothing has one mean along merged dims all the same: of no cell, but it broadcasts
        absent = [dim for dim, (one, n) in enumerate(zip(self.along, extents, strict=True), 1) if one.merges and not n]
        return paired, order, means, absent

    def of(self, means: torch.Tensor, box: Box | None = None) -> torch.Tensor:
        """Of the means, those of this worker's own entries, or of a box of entries; along merged dims, there is one."""
        for dim, repeats, start, length in self._own_means if box is None else self._means_of(box):
            if repeats > 1:
                means = means.repeat_interleave(repeats, dim)
            if length is not None:
                means = means.narrow(dim, start, length)
        return means

    @cached_property
    def _own_means(self) -> list[tuple[int, int, int, int | None]]:
        return self._means_of(self._own[1:])

    def _means_of(self, box: Box) -> list[tuple[int, int, int, int | None]]:
        """For each dim in which the means of a box are not those that this worker has: how they follow from them.

        As dim, how often each mean is repeated, and then the first one and how many, if not all.
        """
        means, found = self._folding[2], []
        for dim, (one, (start, stop), n) in enumerate(
            zip(self.along, within(box, self.gathered), means, strict=True), 1
        ):
            length = None if one.merges or (start, stop) == (0, n * one.spread) else stop - start
            if one.spread > 1 or length is not None:
                found.append((dim, one.spread, start, length))
        return found
