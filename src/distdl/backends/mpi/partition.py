"""Partitions of the published interface: ours, plus the mpi4py objects behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from distdl.backends.mpi.communicator import MPICommunicator
from distdl.partition import CartesianPartition, Partition


class MPIPartition(Partition):
    """A partition over the workers of an MPI communicator.

    Args:
        comm: the user's communicator, which is duplicated once; collective over its workers. COMM_NULL gives an
            inactive partition without workers. ``deactivate()`` frees it, unless it is COMM_WORLD.
        group: of the members; used only with COMM_NULL.
        root: the ancestor communicator; ``comm`` if None.
    Attributes:
        _comm: an mpi4py communicator over the members, in their order; COMM_NULL where inactive. Made at first access,
            collectively over the members. Of the root partition: the communicator that was passed in.
        _group: the mpi4py group of the members.
        _root: the communicator of the world.
    """

    def __init__(self, comm: Any = MPI.COMM_NULL, group: Any = MPI.GROUP_NULL, root: Any = None) -> None:
        for name, given, kind in (("comm", comm, MPI.Comm), ("group", group, MPI.Group), ("root", root, MPI.Comm)):
            if not isinstance(given, kind) and (name, given) != ("root", None):
                raise TypeError(f"MPIPartition needs {name} to be an mpi4py {kind.__name__}; got {given!r}")
        if comm == MPI.COMM_NULL:
            super().__init__(MPICommunicator.over(MPI.COMM_SELF), np.empty(0))
        else:
            super().__init__(MPICommunicator.over(comm))

    @staticmethod
    def _kinds() -> tuple[type[Partition], type[Partition]]:
        return MPIPartition, MPICartesianPartition

    @property
    def _comm(self) -> Any:
        return _link(self).lend(tuple(self.workers.ravel().tolist())) if self.active else MPI.COMM_NULL

    @property
    def _group(self) -> MPI.Group:
        return _link(self).parent.Get_group().Incl(self.workers.ravel().tolist())

    @property
    def _root(self) -> MPI.Intracomm:
        return _link(self).parent


class MPICartesianPartition(CartesianPartition, MPIPartition):
    """An :class:`MPIPartition` with a Cartesian topology."""


def _link(partition: Partition) -> MPICommunicator:
    assert isinstance(partition.comm, MPICommunicator)
    return partition.comm
