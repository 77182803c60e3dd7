"""Header: how a worker describes its tensors to the other members of a primitive or a layer, before they plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from distdl.agreement.rows import Rows
from distdl.environment.arguments import check_fields
from distdl.environment.types import Count
from distdl.geometry.boxes import MOST, Shape, shape
from distdl.partition import Partition
from distdl.partition.groups import IntArray
from distdl.partition.layout import Layout, Lookup
from distdl.tensors.derivatives import Derivatives
from distdl.tensors.dtypes import DTYPES
from distdl.transport.communicator import Group, check_group


@dataclass(frozen=True, eq=False)
class Headers:
    """What each member reported, one row of integers each: dtype, rank and extents of each tensor, then the extras.

    Attributes:
        members: those that reported.
        rows: what they reported.
        tensors, dims: how many tensors each has, and the largest rank of one.
        derivatives: of each tensor, what it carries on any member.
        own: shapes of this worker's tensors.
    """

    members: Group
    rows: Rows
    tensors: Count
    dims: Count
    derivatives: tuple[Derivatives, ...] = ()
    own: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        check_group(self.members, MOST + 1, "Headers")

    def _columns(self, tensor: int) -> int:
        return tensor * (2 + self.dims)

    def shape(self, worker: int, tensor: int = 0) -> Shape:
        """Local shape of a worker's tensor, in elements."""
        row = self.rows.of(np.array([worker]))[0, self._columns(tensor) :].tolist()
        return tuple(row[2 : 2 + row[1]])

    @property
    def local_shapes(self) -> Mapping[int, Shape]:
        """From a member to the local shape of its first tensor; looked up when asked for."""
        return Lookup(self.members, self.shape)

    def check_equal(self, workers: IntArray, others: IntArray, what: str) -> None:
        """Check that each of the workers has a tensor of the same shape as the worker at its place among the others.

        Raises: ValueError that names the first two that differ.
        """
        others = np.broadcast_to(others, workers.shape)
        columns = slice(1, self._columns(1))
        differ = np.argwhere((self.rows.of(workers)[..., columns] != self.rows.of(others)[..., columns]).any(axis=-1))
        if len(differ):
            one, other = int(others[tuple(differ[0])]), int(workers[tuple(differ[0])])
            raise ValueError(
                f"{what} needs tensors of one shape on workers whose tensors are added; "
                f"worker {one} has {list(self.shape(one))} and worker {other} has {list(self.shape(other))}"
            )

    def shapes(self, P: Partition, what: str, dim: int | None = None, tensor: int = 0) -> IntArray:
        """Local shapes on the workers of P: an array of shape ``P.workers.shape + (rank of the tensor,)``.

        Raises: ValueError if the tensors differ in rank, or if their rank is not ``dim``.
        """
        rows = self.rows.of(P.workers)[..., self._columns(tensor) :]
        ranks = rows[..., 1]
        expected = int(ranks.flat[0]) if dim is None else dim
        wrong = np.argwhere(ranks != expected)
        if len(wrong):
            at = tuple(wrong[0])
            raise ValueError(
                f"{what} needs tensors with {expected} dims on all workers of {P}; "
                f"worker {P.workers[at]} has one with {ranks[at]} dims"
            )
        return rows[..., 2 : 2 + expected]

    def have_shape(self, P: Partition, shape: Shape, tensor: int = 0) -> NDArray[np.bool_]:
        """Which of the workers of P have a tensor of this shape, in the order of their ranks."""
        row = (len(shape), *shape)
        columns = self.rows.of(P.workers.ravel())[:, self._columns(tensor) + 1 : self._columns(tensor + 1)]
        if columns.shape[1] < len(row):
            return np.zeros(P.workers.size, dtype=bool)
        found: NDArray[np.bool_] = (columns[:, : len(row)] == row).all(axis=1)
        return found

    def check_blocks(self, layout: Layout, what: str, tensor: int) -> None:
        """Check that each worker of a layout has its block, by the shape of one of its tensors.

        Raises: ValueError that names the first worker that has another.
        """
        for worker, box in layout.items():
            if self.shape(worker, tensor) != shape(box):
                raise ValueError(
                    f"{what} of worker {worker} has to be of the shape {list(shape(box))}; it is "
                    f"{list(self.shape(worker, tensor))}"
                )

    def check_alike(self, P: Partition, what: str, *names: str) -> None:
        """Check that the first two tensors of each worker of P have one shape.

        Raises: ValueError that names the first worker where they differ.
        """
        rows = self.rows.of(P.workers.ravel())
        first, second = (rows[:, self._columns(tensor) + 1 : self._columns(tensor + 1)] for tensor in (0, 1))
        differ = np.flatnonzero((first != second).any(axis=1))
        if len(differ):
            worker = int(P.workers.flat[differ[0]])
            raise ValueError(
                f"{what} needs {names[0]} and {names[1]} of one shape on each worker; on worker {worker} they have "
                f"{list(self.shape(worker, 0))} and {list(self.shape(worker, 1))}"
            )

    def dtype(self, P: Partition, what: str, tensor: int = 0) -> torch.dtype:
        """The dtype of the tensors on the workers of P. Empty ones do not count unless all are empty.

        Raises: ValueError if two workers differ.
        """
        rows = self.rows.of(P.workers.ravel())[:, self._columns(tensor) : self._columns(tensor + 1)]
        full = np.flatnonzero((rows[:, 2:] != 0).all(axis=1))
        counted = rows[full, 0] if len(full) else rows[:1, 0]
        other = np.flatnonzero(counted != counted[0])
        if len(other):
            workers = P.workers.ravel()[full]
            raise ValueError(
                f"{what} needs tensors of one dtype on all workers of {P}; worker {workers[0]} has "
                f"{DTYPES[counted[0]]} and worker {workers[other[0]]} has {DTYPES[counted[other[0]]]}"
            )
        return DTYPES[counted[0]]

    def extras(self, P: Partition) -> IntArray:
        """The extra integers that the workers of P added to their headers."""
        return self.rows.of(P.workers)[..., self._columns(self.tensors) :]
