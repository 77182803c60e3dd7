"""A worker's blocks of samples, and of batches of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import data

from distdl.data.sources import Source, checked, source_of
from distdl.environment.arguments import brief, check_fields
from distdl.geometry.boxes import Shape, balanced
from distdl.globals.layouts.context import Context
from distdl.globals.moving.idle import warn_of_idle
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.partition import Partition, dims
from distdl.partition.arguments import Split, checks_arguments
from distdl.workers.worlds import split_of


class BlockDataset(data.Dataset[Any]):
    """Samples of which this worker reads its own block.

    A sample's number is an index into axis 0 of an array, or into a list of files. Nothing but shapes is read before a
    sample is asked for. Files are opened in each process by itself, so that loaders may have worker processes, forked
    or spawned.

    Args:
        source: one of

            - a path: ``.npy``; ``.h5`` or ``.hdf5`` (needs h5py) and ``.zarr`` (needs zarr), with the name of an array
              in it behind a colon: ``"scans.h5:train/images"``. Or such an array itself: what has ``shape``, ``dtype``
              and is read by slices. Its axis 0 counts the samples;
            - a list of paths, one for each sample, which have one shape and dtype;
            - a tuple or dict of these, for samples of several arrays. They may differ in rank.

            Of a class of its own that changes samples, a loader asks for ``__getitems__`` alone.
        P: how batches are split: its axes are the dims of a batch (batch, channel, space...). Of an array whose batches
            have fewer dims than P axes, the batch dim is split over the first axis, the other dims over the last ones,
            and the workers at place 0 of the axes between hold it. A shape, as ``(1, 1, 2, 2)``, means
            ``distdl.world().reshape(1, 1, 2, 2)``.
    Raises: ValueError if sources differ in their number of samples; ImportError, saying what to install. Reading raises
        ValueError if files differ in shape.
    """

    @checks_arguments
    def __init__(self, source: Any, P: Split) -> None:
        P = split_of(P, "BlockDataset")
        self.P: Partition | None = P  # None in worker processes, which reach no other workers
        self.me, self.workers = P.comm.rank, P.workers
        self.sources = each(source, source_of)
        lengths = [one.length for one in leaves(self.sources)]
        if not lengths:
            raise ValueError("BlockDataset needs an array at least; got an empty tuple or dict")
        if len(set(lengths)) > 1:
            raise ValueError(f"BlockDataset needs sources of one number of samples; got {', '.join(map(str, lengths))}")
        self._length: int = lengths[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """This worker's block of one sample: of each array a plain tensor, without a batch dim."""
        return each(self.sources, lambda source: self._sample(source, index))

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """This worker's blocks of a batch: only of the samples that are its own, where the batch is split."""
        return each(self.sources, lambda source: self._batch(source, indices))

    def _batch(self, source: Source, indices: Sequence[int]) -> Blocks:
        # all indices, also of other workers' samples, so that all workers raise an error
        indices = [checked(index, self._length) for index in indices]
        shape = (len(indices), *source.shape)
        workers = _workers_of(self.workers, len(shape))
        box = _box(workers, self.me, shape)
        if box is None:
            return Blocks(torch.from_numpy(np.empty((0,) * len(shape), source.dtype)), shape, workers)
        (first, last), *within = box
        return Blocks(self._cells(source, indices[first:last], within), shape, workers)

    def _sample(self, source: Source, index: int) -> torch.Tensor:
        # as a batch with one sample for each place of the first axis, so that each worker has one
        workers = _workers_of(self.workers, 1 + len(source.shape))
        box = _box(workers, self.me, (workers.shape[0], *source.shape))
        within = [(0, 0)] * len(source.shape) if box is None else box[1:]
        return self._cells(source, [checked(index, self._length)], within)[0]

    def _cells(self, source: Source, indices: Sequence[int], within: Sequence[tuple[int, int]]) -> torch.Tensor:
        cells = np.empty((len(indices), *(stop - start for start, stop in within)), source.dtype)
        if cells.size:
            for place, index in enumerate(indices):
                cells[place] = source.read(index, tuple(slice(*one) for one in within))
        return torch.from_numpy(cells)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "P": None}  # a communicator belongs to its process


@dataclass(frozen=True)
class Blocks:
    """This worker's block of a batch of one array, on its way from a loader's worker process.

    Attributes:
        block: plain.
        shape: of the whole batch.
        workers: over which it was read, with an axis for each dim; None where nobody has said so.
    """

    block: torch.Tensor
    shape: Shape
    workers: Any = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.block.dim() != len(self.shape):
            raise ValueError(
                f"Blocks needs a block with a dim for each of the batch; the batch is {dims(self.shape) or '0-d'} and "
                f"the block {dims(self.block.shape) or '0-d'}"
            )
        if self.workers is not None and not (
            isinstance(self.workers, np.ndarray)
            and np.issubdtype(self.workers.dtype, np.integer)
            and self.workers.ndim == len(self.shape)
        ):
            raise TypeError(
                f"Blocks needs workers to be an array of whole numbers with an axis for each dim of the batch; got "
                f"{brief(self.workers)}"
            )

    def as_global(self, P: Split) -> GlobalTensor:
        """The global tensor of the batch. No message is sent: every worker knows the shape.

        Raises: ValueError if it was read over another partition, or if the block is not this worker's part of it.
        """
        P = split_of(P, "Blocks.as_global")
        context = Context.of(P.comm)
        workers = _workers_of(P.workers, len(self.shape))
        if self.workers is not None and not np.array_equal(self.workers, workers):
            read = f"{dims(self.workers.shape)} on workers {np.array2string(self.workers.ravel(), threshold=16)}"
            raise ValueError(
                f"Blocks of a batch of {dims(self.shape)} that was read over {read} cannot be made global over {P}"
            )
        layout = context.balanced(workers, self.shape)
        warn_of_idle("a batch", layout, also="; if only the last batch is small, so does drop_last=True")
        if tuple(self.block.shape) != tuple(layout.local):
            needed, found = dims(layout.local), dims(self.block.shape)
            raise ValueError(
                f"Blocks of a batch of {dims(self.shape)} over {P} needs a block of {needed} on worker {context.me}; "
                f"got {found}"
            )
        return GlobalTensor._of(self.block, layout)

    def pin_memory(self) -> Blocks:
        """The same in page-locked memory, as loaders ask for."""
        return Blocks(self.block.pin_memory(), self.shape, self.workers)


def _workers_of(workers: NDArray[Any], rank: int) -> NDArray[Any]:
    """Which workers hold an array whose batches have so many dims."""
    missing = workers.ndim - rank
    if missing <= 0:
        return workers.reshape(*workers.shape, *[1] * -missing)
    first: tuple[Any, ...] = (slice(None), *[0] * missing)
    found: NDArray[Any] = workers[first]
    return found


def _box(workers: NDArray[Any], me: int, shape: Sequence[int]) -> list[tuple[int, int]] | None:
    """A worker's box of a batch; None where it holds none."""
    places = np.argwhere(workers == me)
    if not len(places):
        return None
    return [
        balanced(extent, count)[int(place)]
        for extent, count, place in zip(shape, workers.shape, places[0], strict=True)
    ]


def each(structure: Any, change: Any) -> Any:
    """The same structure of tuples and dicts with each of its members changed; or what is none, changed."""
    if isinstance(structure, tuple):
        return tuple(each(one, change) for one in structure)
    if isinstance(structure, Mapping):
        return {name: each(one, change) for name, one in structure.items()}
    return change(structure)


def leaves(structure: Any) -> list[Any]:
    found: list[Any] = []
    each(structure, found.append)
    return found
