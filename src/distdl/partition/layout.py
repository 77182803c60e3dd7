"""Layout: which box of a global tensor each worker of a partition holds, or needs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from distdl.environment.arguments import check_fields, known
from distdl.environment.types import Count
from distdl.geometry.boxes import Box, Interval, Intervals, Shape, balanced, meet, runs, shape, slices
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import IntArray, dims
from distdl.partition.partition import Partition


@dataclass(frozen=True)
class Ruler:
    """The intervals of one dim, one for each place along the axis that splits it. They may overlap (windows do)."""

    intervals: tuple[Interval, ...]

    @cached_property
    def _search(self) -> tuple[list[int], list[int], list[int], bool]:
        filled = [place for place, (start, stop) in enumerate(self.intervals) if stop > start]
        starts = [self.intervals[place][0] for place in filled]
        stops = [self.intervals[place][1] for place in filled]
        return filled, starts, stops, starts == sorted(starts) and stops == sorted(stops)

    def meeting(self, interval: Interval) -> list[int]:
        """Places whose interval shares a cell with the given one.

        Found by bisection, if starts and stops never decrease from place to place (as in tilings and windows).
        """
        start, stop = interval
        filled, starts, stops, sorted_ = self._search
        if stop <= start:
            return []
        if sorted_:
            return filled[bisect_right(stops, start) : bisect_left(starts, stop)]
        return [place for place, i, j in zip(filled, starts, stops, strict=True) if i < stop and start < j]


@dataclass(frozen=True, eq=False)
class Lookup(Mapping[int, Shape]):
    """Shapes of many workers, of which a plan for one worker needs few."""

    workers: Sequence[int]
    shape_of: Callable[[int], Shape]

    def __getitem__(self, worker: int) -> Shape:
        return self.shape_of(worker)

    def __iter__(self) -> Iterator[int]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self.workers)


@dataclass(frozen=True, eq=False)
class Layout(Mapping[int, Box]):
    """A Cartesian grid of boxes over the workers of a partition: a ruler for each dim, a place on it for each index.

    As a mapping it goes from a worker to its box, in cells of the global tensor.
    """

    partition: Partition
    rulers: tuple[Ruler, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        places = tuple(len(ruler.intervals) for ruler in self.rulers)
        if places != self.partition.workers.shape:
            raise ValueError(
                f"a layout needs intervals along each axis of its partition, one for each place; it has "
                f"{list(places)} intervals for {self.partition}"
            )

    @classmethod
    @checks_arguments
    def of(cls, partition: Partition, intervals: Sequence[Intervals]) -> Layout:
        """The layout with these intervals along each dim, one interval for each place of the partition's axis."""
        return cls(partition, tuple(Ruler(tuple(along)) for along in intervals))

    @classmethod
    def along(cls, partition: Partition, intervals: Iterable[Iterable[Interval]]) -> Layout:
        """The same, of intervals that are known to be right: the library makes thousands."""
        return known(cls, partition, tuple(Ruler(tuple(along)) for along in intervals))

    @classmethod
    @checks_arguments
    def balanced(cls, partition: Partition, extents: Sequence[Count]) -> Layout:
        """The layout that splits a tensor of the given global shape as evenly as possible, longer blocks first.

        Raises: ValueError unless the tensor has one dim for each axis.
        """
        if len(extents) != partition.workers.ndim:
            raise ValueError(
                f"Layout.balanced needs a tensor with one dim for each axis of the partition; the tensor is "
                f"{dims(extents) or '0-d'} and the partition {partition}"
            )
        return cls.along(partition, [balanced(n, p) for n, p in zip(extents, partition.workers.shape, strict=True)])

    @classmethod
    @checks_arguments
    def tiled(cls, partition: Partition, shapes: IntArray, what: str = "x") -> Layout:
        """The layout whose blocks have the shapes that the workers report, laid side by side.

        Args:
            shapes: local shapes, an array of shape ``partition.workers.shape + (dim,)``, in elements.
        Raises: ValueError if the blocks form no grid: two workers at one place of an axis differ along its dim.
        """
        if shapes.shape != (*partition.workers.shape, partition.workers.ndim):
            raise ValueError(
                f"Layout.tiled needs an extent along each axis for each worker of {partition}, an array of "
                f"{dims((*partition.workers.shape, partition.workers.ndim))}; got one of {dims(shapes.shape) or '0-d'}"
            )
        intervals = []
        for dim, places in enumerate(partition.workers.shape):
            extents = np.moveaxis(shapes[..., dim], dim, 0).reshape(places, -1)
            uneven = np.argwhere(extents != extents[:, :1])
            if len(uneven):
                place, other = uneven[0]
                workers = np.moveaxis(partition.workers, dim, 0).reshape(places, -1)
                raise ValueError(
                    f"the blocks of {what} must form a grid over {partition}; in dim {dim}, at place {place} of the "
                    f"axis, worker {workers[place, 0]} has {extents[place, 0]} and worker {workers[place, other]} has "
                    f"{extents[place, other]} elements"
                )
            intervals.append(runs(extents[:, 0].tolist()))
        return cls.along(partition, intervals)

    @classmethod
    @checks_arguments
    def everywhere(cls, P: Partition, extents: Sequence[Count]) -> Layout:
        """The layout in which every worker of P has the whole tensor, of at least one dim: as many copies of it."""
        workers = P.workers.size
        whole = [[(0, extent)] * (workers if dim == 0 else 1) for dim, extent in enumerate(extents)]
        return cls.of(P.reshape(workers, *[1] * (len(extents) - 1)), whole)

    @cached_property
    def is_everywhere(self) -> bool:
        """Whether every worker of the world has the whole tensor, so that nobody needs to send any of it."""
        pairs = zip(self.rulers, self.extents, strict=True)
        return len(self) == self.partition.comm.size and all(
            interval == (0, extent) for ruler, extent in pairs for interval in ruler.intervals
        )

    def box_of(self, worker: int) -> Box:
        """The box of any worker: an empty one where it has none."""
        return self[worker] if worker in self.partition else ((0, 0),) * len(self.rulers)

    @cached_property
    def extents(self) -> Shape:
        """Global shape of a tensor tiled by this layout."""
        return tuple(ruler.intervals[-1][1] for ruler in self.rulers)

    @property
    def shapes(self) -> Mapping[int, Shape]:
        """From a worker to the shape of its box."""
        return Lookup(tuple(self), lambda worker: shape(self[worker]))

    @cached_property
    def intervals(self) -> tuple[tuple[Interval, ...], ...]:
        """The intervals along each dim."""
        return tuple(ruler.intervals for ruler in self.rulers)

    def gathered(self, axes: Sequence[int]) -> Layout:
        """The layout in which every worker has the whole extent of the given dims, and its own range of the others."""
        found = [
            [(0, extent)] * len(along) if dim in axes else along
            for dim, (along, extent) in enumerate(zip(self.intervals, self.extents, strict=True))
        ]
        return Layout.along(self.partition, found)

    def block(self, tensor: Any) -> Any:
        """This worker's block of a tensor (or array) of the global shape; an empty one where it has none. A view."""
        me = self.partition.comm.rank
        return tensor[slices(self[me])] if me in self.partition else tensor.reshape(-1)[:0]

    def at(self, index: Sequence[int]) -> Box:
        """The box at a Cartesian index of the partition."""
        return tuple(ruler.intervals[i] for ruler, i in zip(self.rulers, index, strict=True))

    def __getitem__(self, worker: int) -> Box:
        return self.at(self.partition.index_of(worker))

    def __iter__(self) -> Iterator[int]:
        return iter(self.partition.workers.ravel().tolist())

    def __len__(self) -> int:
        return self.partition.workers.size

    def meeting(self, box: Box) -> Iterator[tuple[int, Box, Box]]:
        """Workers whose box shares cells with the given one, row-major: ``(worker, its box, what is shared)``."""
        for index in product(*[ruler.meeting(interval) for ruler, interval in zip(self.rulers, box, strict=True)]):
            own = self.at(index)
            yield int(self.partition.workers[index]), own, meet(own, box)
