"""What all workers know without a message: the layouts of global tensors, and what has been set up for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

import numpy as np
import torch

from distdl.environment.arguments import known
from distdl.exchange import Operator
from distdl.geometry.boxes import Box, Intervals, Shape, balanced, shape
from distdl.ops import Site
from distdl.partition import CartesianPartition, Layout, Partition
from distdl.partition.groups import IntArray
from distdl.partition.layout import Ruler
from distdl.plan.planning import copy
from distdl.tensors.derivatives import Derivatives
from distdl.tensors.modes import uncounted
from distdl.transport import Communicator, Label
from distdl.transport.communicator import Group, LongGroup

T = TypeVar("T")

_KEPT = 4096


class _Worlds(threading.local):
    """The worlds in which this worker has had global tensors, without those of rehearsals.

    Attributes:
        ever: whether this process has had any, in rehearsals, too.
        count: how many there were.
        contexts: the contexts of worlds that are still open.
    """

    ever = False

    def __init__(self) -> None:
        self.count = 0
        self.contexts: WeakSet[Context] = WeakSet()


worlds = _Worlds()

opened: list[Callable[[Communicator], None]] = []
"""Functions that are called with the communicator of each world that gets its first global tensor."""


@dataclass(frozen=True, eq=False)
class KnownLayout(Layout):
    """A layout that every worker knows without being told. Equal ones are one object (see :meth:`Context.layout`).

    Where torch asks a tensor for its ``layout``, it asks whether its memory is dense or sparse: it takes this one as
    ``torch.strided``, to which it is equal.
    """

    context: Context

    def __eq__(self, other: object) -> bool:
        return self is other or other is torch.strided

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # also where torch wants no layout at all: it then refuses torch.strided
        return func(*map(_with_strided, args), **{key: _with_strided(one) for key, one in (kwargs or {}).items()})

    @cached_property
    def size(self) -> torch.Size:
        """The shape of a whole tensor in this layout."""
        return torch.Size(self.extents)

    @cached_property
    def active(self) -> bool:
        """Whether this worker is in the partition."""
        return self.context.me in self.partition

    @cached_property
    def box(self) -> Box:
        """This worker's box, in cells of the global tensor. Outside the partition, an empty one at the origin."""
        return self[self.context.me] if self.active else ((0, 0),) * len(self.rulers)

    @cached_property
    def local(self) -> Shape:
        """The shape of this worker's block. Outside the partition it has no cell, also of a tensor without dims."""
        return shape(self.box) if self.active else (0,) * max(len(self.rulers), 1)

    @cached_property
    def empty(self) -> bool:
        """Whether this worker holds no cell."""
        return 0 in self.local

    @cached_property
    def _lifted(self) -> dict[int, KnownLayout]:
        return {len(self.rulers): self}

    def lifted(self, dims: int) -> KnownLayout:
        """The layout of the same tensor with dims of extent 1 in front, so that there are as many as given."""
        found = self._lifted.get(dims)
        if found is None:
            more = dims - len(self.rulers)
            workers = self.partition.workers.reshape((1,) * more + self.partition.workers.shape)
            found = self._lifted[dims] = self.context.layout(workers, (((0, 1),),) * more + self.intervals)
        return found

    def resized(self, extents: Sequence[int]) -> KnownLayout:
        """The layout of a tensor with other extents: a dim of the same extent is split as here, others evenly."""
        intervals = [
            along if along[-1][1] == n else balanced(n, len(along))
            for along, n in zip(self.intervals, extents, strict=True)
        ]
        return self.context.layout(self.partition.workers, intervals)

    def __repr__(self) -> str:
        return f"{'x'.join(map(str, self.extents))} over {self.partition}"


def _with_strided(value: Any) -> Any:
    """A value, or torch.strided in the place of a known layout; also in a list or a tuple."""
    if isinstance(value, (tuple, list)) and any(isinstance(one, KnownLayout) for one in value):
        return type(value)([_with_strided(one) for one in value])
    return torch.strided if isinstance(value, KnownLayout) else value


class Context:
    """What the global tensors over one communicator share: their layouts, operators and setups, each made once.

    Nothing is agreed on: what a worker makes here follows from what it has been called with, and all workers call the
    same functions on the same global tensors, in the same order.

    Attributes:
        everyone: all workers of the communicator. Each takes part in every function of a global tensor.
        me: this worker.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.me = comm.rank
        self.everyone: Group = LongGroup(range(comm.size))
        # weak, as indexing by masks makes ever new layouts
        self._layouts: WeakValueDictionary[Any, KnownLayout] = WeakValueDictionary()
        self._kept: dict[Hashable, Any] = {}
        self._told: dict[Hashable, Any] = {}
        self._own: dict[type, Any] = {}

    @classmethod
    def of(cls, comm: Communicator) -> Context:
        """The context of a communicator, made at first use."""
        found: Context | None = comm.kept.get(cls)
        if found is None:
            found = comm.kept[cls] = cls(comm)
            _Worlds.ever = True
            if not comm.imagined:
                worlds.count += 1
                worlds.contexts.add(found)
            for act in opened:
                act(comm)
        return found

    def has(self, P: Partition) -> bool:
        """Whether a partition is of this world. In a rehearsal, which stands for another world, any is."""
        return self.comm.imagined or Context.of(P.comm) is self

    def own(self, kind: type[T]) -> T:
        """The one object of a class that is kept for this world, made at first use.

        So each room keeps what it remembers of a world in a class of its own.
        """
        found: T | None = self._own.get(kind)
        if found is None:
            found = self._own[kind] = kind()
        return found

    @property
    def stands_for_torch(self) -> bool:
        """Whether this is a rehearsal of the sequential model, whose one worker has all tensors whole."""
        return self.comm.imagined and len(self.everyone) == 1

    @cached_property
    def world(self) -> CartesianPartition:
        """All workers, along one axis."""
        return CartesianPartition(self.comm, list(self.everyone))

    def layout(self, workers: IntArray, intervals: Sequence[Intervals]) -> KnownLayout:
        """The layout over an array of workers with these intervals along each dim: the same object for equal ones."""
        key = (workers.shape, workers.tobytes(), tuple(map(tuple, intervals)))
        found = self._layouts.get(key)
        if found is None:
            grid = CartesianPartition(self.comm, workers)
            found = self._layouts[key] = known(KnownLayout, grid, tuple(map(Ruler, key[2])), self)
        return found

    def known(self, layout: Layout) -> KnownLayout:
        """The known layout that is equal to a layout."""
        if isinstance(layout, KnownLayout) and layout.context is self:
            return layout
        return self.layout(layout.partition.workers, layout.intervals)

    def tiling(self, layout: Layout, name: str) -> KnownLayout:
        """The known layout that is equal to one that a user has given to a function.

        Args:
            name: of the function.
        Raises: ValueError for a layout of another world, or one whose boxes do not tile a tensor.
        """
        if not self.has(layout.partition):
            raise ValueError(f"{name} needs a layout of the tensor's world; got one over {layout.partition} of another")
        for dim, along in enumerate(layout.intervals):
            filled = [(start, stop) for start, stop in along if start != stop]
            ends = [0, *[stop for _, stop in filled]]
            if ends != [*[start for start, _ in filled], along[-1][1]] or ends != sorted(ends):
                raise ValueError(
                    f"{name} needs a layout whose boxes tile the tensor: along each dim, the first begins at 0, and "
                    f"each where the one before it ends; those of dim {dim} are {list(along)}"
                )
        return self.known(layout)

    def balanced(self, workers: IntArray, extents: Sequence[int]) -> KnownLayout:
        """The layout that splits a tensor of the given global shape as evenly as possible over an array of workers.

        Dims behind its last axis are not split.
        """
        places = workers.shape + (1,) * (len(extents) - workers.ndim)
        return self.layout(workers.reshape(places), [balanced(n, p) for n, p in zip(extents, places, strict=True)])

    def tiled(self, workers: IntArray, shapes: Sequence[Shape] | Mapping[int, Shape], what: str) -> KnownLayout:
        """The layout of a tensor of which each worker of an array has a block; dims behind its last axis are not split.

        Args:
            shapes: of the blocks, by worker.
            what: the tensor, in errors.
        Raises: ValueError if the blocks form no grid.
        """
        blocks = np.array([shapes[worker] for worker in workers.ravel().tolist()], dtype=np.int64)
        rank = blocks.shape[-1]
        grid = CartesianPartition(self.comm, workers.reshape(workers.shape + (1,) * (rank - workers.ndim)))
        return self.known(Layout.tiled(grid, blocks.reshape(*grid.workers.shape, rank), what))

    def whole(self, extents: Sequence[int], worker: int = 0) -> KnownLayout:
        """The layout of a tensor of which one worker has all."""

        def make() -> KnownLayout:
            return self.layout(np.full((1,) * len(extents), worker), [((0, n),) for n in extents])

        return self.keep(("whole", tuple(extents), worker), make)

    def everywhere(self, extents: Sequence[int]) -> KnownLayout:
        """The layout in which every worker needs all cells of a tensor of at least one dim. Its boxes overlap."""
        first, *rest = extents
        workers = self.world.workers.reshape(-1, *[1] * len(rest))
        return self.layout(workers, [((0, first),) * len(self.everyone), *[((0, n),) for n in rest]])

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """The object that is kept under a key. If there is none (any more), it is made now.

        The oldest are forgotten when there are many. Which ones a worker keeps follows from its part in a function, so
        workers may forget the same key at different calls; what is made must send no messages.
        """
        return _found(self._kept, key, make)

    def keep_told(self, key: Hashable, make: Callable[[], T]) -> T:
        """The same for an object for which the workers exchange messages: all of them forget it at the same call."""
        return _found(self._told, key, make)

    def moving(
        self, owned: KnownLayout, needed: KnownLayout, dtype: torch.dtype, derivatives: Derivatives, name: str
    ) -> Operator:
        """The operator that copies a tensor from where it is to where it is needed; both of one or more dims.

        Raises: ValueError if the two are of different worlds, as what a hook gives may be, or a gradient.
        """
        if owned.context is not needed.context:
            raise other_world(name, owned.context, needed.context)

        def make() -> Operator:
            site = Site._make((owned.partition, self.everyone, Label(name, detail=(owned, needed, dtype))))
            plan = copy(owned, needed, self.me)
            return site.operator(plan, dtype, derivatives, [owned.local], [needed.local], keeps_format=True)

        # the name is in the tags of messages, so a worker that has forgotten the operator makes it with the same name
        return self.keep((owned, needed, dtype, derivatives, name), make)


def other_world(name: str, *contexts: Context) -> ValueError:
    """The error for a function that has got tensors of several worlds."""
    listed = " and of ".join(str(one.comm.size) for one in contexts)
    return ValueError(f"{name} needs tensors of one world; got some of worlds of {listed} workers")


def _found(kept: dict[Hashable, Any], key: Hashable, make: Callable[[], T]) -> T:
    found: T | None = kept.get(key)
    if found is None:
        while len(kept) >= _KEPT:
            kept.pop(next(iter(kept)))
        with uncounted():
            found = kept[key] = make()
    return found
