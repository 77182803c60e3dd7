"""Partition: some workers of a world, as a value. It is an array of worker numbers and a link to their world.

Partitions are equal when they have the same world, the same workers in the same order, and the same shape. Making one
from another is arithmetic on the array and sends no message, so every worker that knows the parent may do it, member or
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from distdl.environment.arguments import checks_arguments
from distdl.partition.groups import (
    IntArray,
    check_axes,
    check_spread,
    describe,
    keep_axes,
    line_of,
    root_first,
    teams_of,
    topology,
    whole_numbers,
)
from distdl.partition.sharing import broadcast_value, gather_values, reduce_values
from distdl.transport.communicator import Communicator, Group


class Partition:
    """An unstructured partition: a list of workers. Worker numbers are those of the world.

    Attributes:
        comm: the link to the world; all partitions of a world share it.
        workers: worker numbers, shape ``(size,)`` (Cartesian: the shape of the topology). The same on every worker.
        active: whether this worker is a member.
        rank: this worker's place in the list, from 0; ``comm.absent`` where it is inactive.
        size: number of members; -1 where inactive.
        shape, dim: ``[size]`` and 1.
        index: the rank; None where inactive.
    """

    cartesian: ClassVar[bool] = False
    comm: Communicator
    workers: IntArray

    def __init__(self, comm: Communicator, workers: ArrayLike | None = None) -> None:
        _check_communicator(comm)
        self._settle(
            comm, np.arange(comm.size) if workers is None else whole_numbers(workers, "a partition").reshape(-1)
        )
        self._is_root = workers is None

    def _settle(self, comm: Communicator, workers: IntArray) -> None:
        workers = workers.astype(np.int64)
        if workers.size and not 0 <= workers.min() <= workers.max() < comm.size:
            raise ValueError(f"a partition needs workers from 0 to {comm.size - 1}; got {workers.tolist()}")
        if workers.size and (np.diff(np.sort(workers, axis=None)) == 0).any():
            raise ValueError(f"a partition needs different workers; got {workers.tolist()}")
        workers.setflags(write=False)
        self.comm = comm
        self.workers = workers
        self._deactivated = False
        self._is_root = False

    def _like(self, workers: IntArray, cartesian: bool = False) -> Any:
        unstructured, with_topology = self._kinds()
        kind = with_topology if cartesian else unstructured
        other = kind.__new__(kind)
        other._settle(self.comm, workers if cartesian else workers.reshape(-1))
        return other

    @staticmethod
    def _kinds() -> tuple[type[Partition], type[Partition]]:
        """What slices and unions of this kind of partition are, and its topologies."""
        return Partition, CartesianPartition

    # -- where this worker stands

    @cached_property
    def _place(self) -> int | None:
        places = np.flatnonzero(self.workers.ravel() == self.comm.rank)
        return int(places[0]) if places.size else None

    @property
    def active(self) -> bool:
        return self._place is not None and not self._deactivated

    @property
    def rank(self) -> int:
        return self._place if self.active and self._place is not None else self.comm.absent

    @property
    def size(self) -> int:
        return self.workers.size if self.active else -1

    @property
    def shape(self) -> IntArray:
        return np.array([self.size])

    @property
    def dim(self) -> int:
        return 1

    @property
    def index(self) -> int | IntArray | None:
        return self.rank if self.active else None

    def index_of(self, worker: int) -> tuple[int, ...]:
        """The Cartesian index of a worker of the world in this partition, known on every worker.

        Raises: KeyError if it is not a member.
        """
        place = self._place if worker == self.comm.rank else None
        if place is None:
            places = np.flatnonzero(self.workers.ravel() == worker)
            if not places.size:
                raise KeyError(f"worker {worker} is not in {self}")
            place = int(places[0])
        return tuple(int(i) for i in np.unravel_index(place, self.workers.shape))

    def __contains__(self, worker: int) -> bool:
        return self._place is not None if worker == self.comm.rank else bool((self.workers == worker).any())

    # -- as a value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partition) and self._value == other._value

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _value(self) -> tuple[int, bool, tuple[int, ...], bytes]:
        return (id(self.comm), self.cartesian, self.workers.shape, self.workers.tobytes())

    @cached_property
    def _hash(self) -> int:
        return hash(self._value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        return self

    def __repr__(self) -> str:
        return describe(self.workers)

    def __getitem__(self, key: Any) -> Any:
        """The partition of a slice of the workers. Axes are kept: an integer cuts as the slice of length one does."""
        return self._like(keep_axes(key, self.workers), self.cartesian)

    @property
    def T(self) -> Any:
        """The partition with its axes reversed: worker at index (i, j, k) stands at (k, j, i)."""
        return self._like(self.workers.T, self.cartesian)

    def reshape(self, *shape: Any) -> Any:
        """The same workers, in the same row-major order, with a Cartesian topology of another shape."""
        extents = shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)) else shape
        return self.create_cartesian_topology_partition(extents)

    @checks_arguments
    def __or__(self, other: Partition) -> Any:
        """The union: this partition's workers first, then those of the other that are not among them; unstructured."""
        self._check_world(other)
        own, theirs = self.workers.ravel(), other.workers.ravel()
        return self._like(np.concatenate([own, theirs[~np.isin(theirs, own)]]))

    def _check_world(self, other: Partition) -> None:
        if other.comm is not self.comm:
            raise ValueError(f"two partitions of one world are needed; {self} and {other} belong to different worlds")

    # -- making other partitions

    def create_partition_inclusive(self, ranks: ArrayLike) -> Any:
        """The unstructured partition of these members, given by their ranks in this partition, in the order given."""
        places = whole_numbers(ranks, "create_partition_inclusive").reshape(-1)
        if places.size and not 0 <= places.min() <= places.max() < self.workers.size:
            how = self.comm.how_to_start(int(places.max()) + 1) if places.max() >= self.comm.size else ""
            raise ValueError(f"ranks must be from 0 to {self.workers.size - 1} in {self}; got {places.tolist()}{how}")
        return self._like(self.workers.ravel()[places])

    @checks_arguments
    def create_partition_union(self, other: Partition) -> Any:
        """``self | other``: the workers of this partition first, none repeated."""
        return self | other

    def create_cartesian_topology_partition(self, shape: ArrayLike) -> Any:
        """The workers of this partition, row-major, over a Cartesian topology of this shape (one entry may be -1)."""
        return self._like(topology(self.workers, shape, self.comm.how_to_start), cartesian=True)

    def create_allreduction_partition(self, axes: int | Sequence[int]) -> Any:
        """The workers with which this one's tensor is all-sum-reduced along the given partition axes, root first."""
        reduced = check_axes(axes, self.workers.ndim, "an all-reduction")
        if self._place is None:
            return self._like(np.empty(0, dtype=np.int64))
        return self._like(line_of(self.workers, reduced, self.index_of(self.comm.rank)))

    @checks_arguments
    def create_broadcast_partition_to(
        self, P: Partition, transpose_src: bool = False, transpose_dest: bool = False
    ) -> tuple[Any, Any]:
        """The two groups in which this worker takes part when this partition's tensors are broadcast to ``P``.

        Returns:
            P_send: the group to which this worker copies its tensor; inactive where it is not in this partition.
            P_recv: the group from whose root it gets its copy; inactive where it is not in ``P``.
            Both are unstructured, root first. The root receives a copy only if its P_recv is its P_send.
        Raises: ValueError if the shapes do not fit.
        """
        return self._teams(self, P, transpose_src, transpose_dest, "Broadcast", ("P_x", "P_y"))

    @checks_arguments
    def create_reduction_partition_to(
        self, P: Partition, transpose_src: bool = False, transpose_dest: bool = False
    ) -> tuple[Any, Any]:
        """The mirror image: the groups with which this partition's tensors are sum-reduced to ``P``.

        Returns: P_send, to whose root this worker contributes, and P_recv, whose sum it receives, as above.
        Raises: ValueError if the shapes do not fit.
        """
        P_recv, P_send = self._teams(P, self, transpose_dest, transpose_src, "SumReduce", ("P_y", "P_x"))
        return P_send, P_recv

    def _teams(
        self, few: Partition, many: Partition, turn_few: bool, turn_many: bool, rule: str, names: tuple[str, str]
    ) -> tuple[Any, Any]:
        few._check_world(many)
        roots = few.workers.T if turn_few else few.workers
        fed = many.workers.T if turn_many else many.workers
        check_spread(roots.shape, fed.shape, rule, names)
        led, joined = teams_of(roots, fed, self.comm.rank)
        teams = [root_first(*pairs[0]) if pairs else () for pairs in (led, joined)]
        return self._like(np.array(teams[0])), self._like(np.array(teams[1]))

    # -- messages between its members

    @checks_arguments
    def broadcast_data(self, data: Any = None, root: int = 0, P_data: Partition | None = None) -> Any:
        """Copy a value from one member to all members. The receivers need not know its type, dtype or shape.

        Args:
            data: on the root, the value (see :func:`distdl.partition.encoding.encode`); ignored elsewhere.
            root: rank of the worker that has it, in this partition, or in ``P_data`` if that is given.
            P_data: a sub-partition of this one; workers outside it may pass it too, and must if they are to receive.
        Returns: the value on every member; None on workers outside this partition when ``P_data`` is given.
        Raises: ValueError, the same on every member, for a root that does not exist, a ``P_data`` that is no
            sub-partition, or a value that cannot be sent; and on a worker outside this partition without ``P_data``.
        """
        if not self.active and P_data is not None:
            return None
        receivers = self if P_data is None else P_data
        members, call = self._begin("broadcast_data")
        self._check_world(receivers)
        if not np.isin(receivers.workers, self.workers).all():
            raise ValueError(f"broadcast_data needs P_data to be a sub-partition of {self}; got {receivers}")
        if isinstance(root, bool) or not 0 <= root < receivers.workers.size:
            last = receivers.workers.size - 1
            raise ValueError(f"broadcast_data needs a root from 0 to {last} in {receivers}; got {root}")
        return broadcast_value(self.comm, members, call, int(receivers.workers.flat[root]), data)

    def allgather_data(self, data: Any) -> list[Any]:
        """The values of all members, in the order of their ranks, on every member.

        Raises: ValueError on workers outside this partition; and, on every member, for a value that cannot be sent.
        """
        return gather_values(self.comm, *self._begin("allgather_data"), data)

    def allreduce_data(self, data: Any, op: str = "sum") -> Any:
        """Combine the numbers, arrays or tensors of all members: ``op`` is ``sum``, ``prod``, ``max`` or ``min``.

        Python's integers are combined exactly, whatever their size; NumPy's values and tensors in their own dtype. A
        sum of bools, of whichever kind, counts those that are True.

        Raises: ValueError for another ``op``, outside this partition, or, on every member, if the shapes differ.
        """
        return reduce_values(self.comm, *self._begin("allreduce_data"), data, op)

    def print_sequential(self, value: Any) -> None:
        """Print the values of all members, in the order of their ranks, on the member of rank 0. Collective."""
        texts = gather_values(self.comm, *self._begin("print_sequential"), str(value))
        if self.rank == 0:
            print("\n".join(texts), flush=True)

    def _begin(self, method: str) -> tuple[Group, str]:
        """Check that this worker is a member, for a method that only members may call.

        Returns: all members, and what they do.
        """
        if not self.active:
            raise ValueError(
                f"{method} is for the members of a partition; worker {self.comm.rank} is not active in {self}"
            )
        self.comm.where = call = f"{method} in {self}"
        return tuple(self.workers.ravel().tolist()), call

    def deactivate(self) -> None:
        """Mark this partition as inactive on this worker. Idempotent.

        Of the root partition, the world, it also frees what the back-end has made (collective over all workers);
        partitions made from it own nothing, so there is nothing to free.
        """
        if self._is_root and not self._deactivated:
            self.comm.release()
        self._deactivated = True


class CartesianPartition(Partition):
    """A partition with a Cartesian topology: ``workers[i, j, ..]`` is the worker at index ``(i, j, ..)``.

    Attributes that differ from :class:`Partition`:
        shape, dim: number of workers along each axis (kept where inactive), and how many axes there are.
        index: this worker's place along each axis; None where inactive.
    """

    cartesian: ClassVar[bool] = True

    def __init__(self, comm: Communicator, workers: ArrayLike) -> None:
        _check_communicator(comm)
        self._settle(comm, whole_numbers(workers, "a partition"))

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


def _check_communicator(comm: Any) -> None:
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"a partition needs the communicator of a world, such as distdl.world().comm; got a {type(comm).__name__}"
        )
