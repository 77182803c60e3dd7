"""CartesianPartition: a team of workers on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from distdl.comm import Communicator
from distdl.groups import IntArray, line_of
from distdl.partition import Partition


class CartesianPartition(Partition):
    """A team with a Cartesian topology: ``workers[i, j, ..]`` is the worker at index ``(i, j, ..)``.

    Attributes that differ from :class:`Partition`:
        shape, dim: number of workers along each axis (kept where inactive), and how many axes there are.
        index: this worker's place along each axis; None where inactive.
    """

    cartesian: ClassVar[bool] = True

    def __init__(self, comm: Communicator, workers: ArrayLike) -> None:
        self._settle(comm, np.asarray(workers, dtype=np.int64))

    @property
    def shape(self) -> IntArray:
        return np.array(self.workers.shape)

    @property
    def dim(self) -> int:
        return self.workers.ndim

    @property
    def index(self) -> int | IntArray | None:
        return np.array(self.index_of(self.comm.rank)) if self.active else None

    def cartesian_index(self, rank: int) -> IntArray:
        """The index of the member with this rank.

        Raises: ValueError where this worker is inactive, or for a rank that does not exist.
        """
        self._begin("cartesian_index")
        if not 0 <= rank < self.workers.size:
            raise ValueError(f"cartesian_index needs a rank from 0 to {self.workers.size - 1} in {self}; got {rank}")
        return np.array(np.unravel_index(rank, self.workers.shape))

    def neighbor_ranks(self, rank: int) -> list[tuple[int, int]]:
        """For each axis, the ranks of the members before and after the given one; ``comm.absent`` beyond the ends.

        Raises: ValueError where this worker is inactive, or for a rank that does not exist.
        """
        index, shape = self.cartesian_index(rank), self.workers.shape
        ranks = np.arange(self.workers.size).reshape(shape)
        neighbours = []
        for axis, place in enumerate(index.tolist()):
            line = line_of(ranks, [axis], index.tolist()).ravel().tolist()
            ends = [self.comm.absent, *line, self.comm.absent]
            neighbours.append((ends[place], ends[place + 2]))
        return neighbours

    def create_cartesian_subtopology_partition(self, remain: Sequence[bool]) -> Any:
        """The sub-grid through this worker that keeps the axes marked True. (Where inactive: the one through index 0.)

        Raises: ValueError unless there is one mark for each axis.
        """
        keep = [bool(mark) for mark in remain]
        if len(keep) != self.workers.ndim:
            raise ValueError(f"a sub-topology needs one mark for each axis of {self}; got {list(remain)}")
        here = self.index_of(self.comm.rank) if self._place is not None else (0,) * len(keep)
        grid = self.workers[tuple(slice(None) if mark else i for mark, i in zip(keep, here, strict=True))]
        return self._like(np.asarray(grid), cartesian=True)


Partition._cartesian = CartesianPartition
