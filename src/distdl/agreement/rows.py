"""Rows: what each member of a primitive or a layer reports before it plans, one row of integers; and how the rows of
all members come together.

Over a small group every row is gathered. Over a large one that would grow with the number of workers, and it is not
needed: where tensors are blocks of a grid, each number in a row follows from the worker's place along one axis (its
extent in dim 1 from its place along axis 1; its dtype from nothing at all). So the members take the maximum over each
place of each axis, see whether their own row follows from that, and gather all rows only if some worker's does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from distdl.partition import Partition
from distdl.partition.groups import IntArray
from distdl.transport.communicator import Communicator, Group

FEW = 64  # members whose rows are simply gathered
UNREAD = np.iinfo(np.int64).min  # stands in a row for a number that nobody reads


class Rows(Protocol):
    """The rows of all members, one way or another; equal keys mean equal rows."""

    @property
    def key(self) -> bytes: ...

    def of(self, workers: IntArray) -> IntArray:
        """The rows of these workers: an array of shape ``workers.shape + (numbers in a row,)``."""


@dataclass(frozen=True, eq=False)
class Listed:
    """Every row, in the order of the members."""

    members: Group
    rows: IntArray

    @property
    def key(self) -> bytes:
        return self.rows.tobytes()

    @cached_property
    def _sorted(self) -> tuple[IntArray, IntArray]:
        return _sorted(np.asarray(self.members))

    def of(self, workers: IntArray) -> IntArray:
        found: IntArray = self.rows[_places(workers, *self._sorted)]
        return found


@dataclass(frozen=True, eq=False)
class Marginal:
    """Rows whose numbers each follow from the place along one axis of a grid.

    Attributes:
        grid: a Cartesian partition of all members.
        lines: for each axis, the numbers at each of its places: ``(places, numbers in a row)``.
        axes: for each number in a row, the axis whose line has it.
    """

    grid: Partition
    lines: Sequence[IntArray]
    axes: IntArray

    @property
    def key(self) -> bytes:
        return b"".join([self.axes.tobytes(), *(line.tobytes() for line in self.lines)])

    @cached_property
    def _sorted(self) -> tuple[IntArray, IntArray]:
        return _sorted(self.grid.workers.ravel())

    def of(self, workers: IntArray) -> IntArray:
        index = np.unravel_index(_places(workers, *self._sorted), self.grid.workers.shape)
        found = np.empty((*workers.shape, len(self.axes)), dtype=np.int64)
        for axis, (line, places) in enumerate(zip(self.lines, index, strict=True)):
            columns = np.flatnonzero(self.axes == axis)
            found[..., columns] = line[:, columns][places]
        return found


def bring_together(
    comm: Communicator, members: Group, row: IntArray, read: NDArray[np.bool_], grid: Partition | None
) -> Rows:
    """The rows of all members. Every member calls it.

    Args:
        row: this worker's row, equally long on each member.
        read: which of its numbers anyone looks up.
        grid: a Cartesian partition of all members along whose axes rows may be summed up; None if there is none.
    """
    if grid is not None and len(members) > FEW:
        found = along_axes(comm, members, np.where(read, row, UNREAD), grid)
        if found is not None:
            return found
    return Listed(members, comm.through.all_gather(members, torch.from_numpy(row)).numpy())


def along_axes(comm: Communicator, members: Group, row: IntArray, grid: Partition) -> Marginal | None:
    """The rows of all members of a grid, if each number follows from a place along an axis; else None on all of them.

    It takes two messages of fixed length to all and from all: the extents of the grid together, and its axes.
    """
    shape = grid.workers.shape
    ends = np.cumsum(shape)
    mine = ends - shape + grid.index_of(comm.rank)
    table = np.full((int(ends[-1]), len(row)), UNREAD, dtype=np.int64)
    table[mine] = row
    table = comm.through.all_max(members, table.ravel()).reshape(table.shape)
    differs = ((table[mine] != row) & (row != UNREAD)).astype(np.int64)
    differs = comm.through.all_max(members, differs.ravel()).reshape(differs.shape)
    if differs.all(axis=0).any():
        return None
    return Marginal(grid, np.split(table, ends[:-1]), differs.argmin(axis=0))


def _sorted(workers: IntArray) -> tuple[IntArray, IntArray]:
    order = np.argsort(workers)
    return workers[order], order


def _places(workers: IntArray, ascending: IntArray, order: IntArray) -> IntArray:
    found: IntArray = order[np.searchsorted(ascending, workers)]
    return found
