"""Batches of samples as global tensors, of which each worker reads only its own block from files.

>>> dataset = distdl.data.BlockDataset(("images.npy", "masks.h5:masks"), P)
>>> for image, mask in distdl.data.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2):
...     loss = F.cross_entropy(model(image), mask)
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import data

from distdl.environment.arguments import check_fields
from distdl.geometry.boxes import Shape, balanced
from distdl.globals.context import Context
from distdl.globals.tensor import GlobalTensor
from distdl.partition import Partition, dims
from distdl.partition.arguments import checks_arguments
from distdl.partition.sharing import gather_values

__all__ = ["BlockDataset", "Blocks", "DataLoader", "collate"]


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
        P: how batches are split: its axes are the dims of a batch (batch, channel, space...). Of an array whose batches
            have fewer dims than P axes, the batch dim is split over the first axis, the other dims over the last ones,
            and the workers at place 0 of the axes between hold it.
    Raises: ValueError if sources differ in their number of samples; ImportError, saying what to install. Reading raises
        ValueError if files differ in shape.
    """

    @checks_arguments
    def __init__(self, source: Any, P: Partition) -> None:
        self.P: Partition | None = P  # (not in worker processes, where there are no other workers)
        self.me, self.workers = P.comm.rank, P.workers
        self._sources = _each(source, _source)
        lengths = [one.length for one in _leaves(self._sources)]
        if len(set(lengths)) > 1:
            raise ValueError(f"BlockDataset needs sources of one number of samples; got {', '.join(map(str, lengths))}")
        self._length: int = lengths[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """This worker's block of one sample: of each array a plain tensor, without a batch dim."""
        return _each(self._sources, lambda source: self._sample(source, index))

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """This worker's blocks of a batch: only of the samples that are its own, where the batch is split."""
        return _each(self._sources, lambda source: self._batch(source, indices))

    def _batch(self, source: _Source, indices: Sequence[int]) -> Blocks:
        shape = (len(indices), *source.shape)
        box = _box(_workers_of(self.workers, len(shape)), self.me, shape)
        if box is None:
            return Blocks(torch.from_numpy(np.empty((0,) * len(shape), source.dtype)), shape)
        (first, last), *within = box
        return Blocks(self._cells(source, indices[first:last], within), shape)

    def _sample(self, source: _Source, index: int) -> torch.Tensor:
        # (a batch of one sample for each place of the first axis, so that each worker has one)
        workers = _workers_of(self.workers, 1 + len(source.shape))
        box = _box(workers, self.me, (workers.shape[0], *source.shape))
        within = [(0, 0)] * len(source.shape) if box is None else box[1:]
        return self._cells(source, [index], within)[0]

    def _cells(self, source: _Source, indices: Sequence[int], within: Sequence[tuple[int, int]]) -> torch.Tensor:
        cells = np.empty((len(indices), *(stop - start for start, stop in within)), source.dtype)
        if cells.size:
            for place, index in enumerate(indices):
                cells[place] = source.read(_checked(index, self._length), tuple(slice(*one) for one in within))
        return torch.from_numpy(cells)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "P": None}  # a communicator belongs to its process


@dataclass(frozen=True)
class Blocks:
    """This worker's block of a batch of one array, on its way from a loader's worker process.

    Attributes:
        block: plain.
        shape: of the whole batch.
    """

    block: torch.Tensor
    shape: Shape

    def __post_init__(self) -> None:
        check_fields(self)
        if self.block.dim() != len(self.shape):
            raise ValueError(
                f"Blocks needs a block with a dim for each of the batch; the batch is {dims(self.shape) or '0-d'} and "
                f"the block {dims(self.block.shape) or '0-d'}"
            )

    def as_global(self, P: Partition) -> GlobalTensor:
        """The global tensor of the batch. No message is sent: every worker knows the shape."""
        context = Context.of(P.comm)
        layout = context.balanced(_workers_of(P.workers, len(self.shape)), self.shape)
        return GlobalTensor._of(self.block, layout)

    def pin_memory(self) -> Blocks:
        """The same in page-locked memory, as loaders ask for."""
        return Blocks(self.block.pin_memory(), self.shape)


class collate:
    """What makes global tensors of the batches of a :class:`BlockDataset`, for torch's own ``DataLoader``.

    ``torch.utils.data.DataLoader(dataset, batch_size=4, collate_fn=distdl.data.collate(P))`` gives global tensors where
    it has no worker processes. From those come :class:`Blocks`, for a global tensor cannot be sent between processes;
    call their ``as_global(P)``, or use :class:`DataLoader`, which does.
    """

    @checks_arguments
    def __init__(self, P: Partition) -> None:
        self.P: Partition | None = P

    def __call__(self, batch: Any) -> Any:
        if self.P is None or data.get_worker_info() is not None:
            return batch
        return as_global(batch, self.P)

    def __getstate__(self) -> dict[str, Any]:
        return {"P": None}


class DataLoader(data.DataLoader[Any]):
    """torch's loader, of batches that are global tensors.

    Every worker makes one with the same arguments and goes through it. Samples come in the same order on every worker;
    at the begin of each epoch the workers compare, by two small messages, what it follows from.

    Args:
        dataset: a :class:`BlockDataset`, or a ``torch.utils.data.Subset`` of one, as ``random_split`` gives it.
        seed: of the order, if it is shuffled. Each epoch has another one.
        options: those of ``torch.utils.data.DataLoader``, but for ``collate_fn`` and ``generator``.
    Raises: TypeError for another dataset. At the begin of an epoch ValueError, the same on every worker, if samples,
        batches, the seed, or what is known of a sampler (its generator, its indices, options of torch's) differ.
    """

    @checks_arguments
    def __init__(self, dataset: Any, batch_size: int = 1, *, seed: int = 0, **options: Any) -> None:
        whole, _ = _source_of(dataset)
        if not isinstance(whole, BlockDataset):
            raise TypeError(
                "DataLoader needs dataset to be a BlockDataset, or a torch.utils.data.Subset of one; got a "
                f"{type(whole).__name__}. (What changes samples is done to batches: each worker has a block of each)"
            )
        if whole.P is None:
            raise ValueError("a DataLoader needs a BlockDataset of a worker; this one has come to a process that loads")
        self._P = whole.P
        generator = torch.Generator().manual_seed(seed)
        super().__init__(dataset, batch_size, collate_fn=collate(whole.P), generator=generator, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # (torch gives a class of its own)
        self._compare()  # (now, not with the first batch, which a thread may ask for that loads ahead)
        return (as_global(batch, self._P) for batch in super().__iter__())

    def _compare(self) -> None:
        """Compare what the order of samples follows from. Collective."""
        context = Context.of(self._P.comm)
        context.comm.where = "an epoch of a DataLoader"
        told = gather_values(context.comm, context.everyone, context.comm.where, self._described())
        for worker, theirs in enumerate(told):
            if theirs != told[0]:
                raise ValueError(
                    "a DataLoader needs the same samples in the same order on every worker; worker 0 goes through "
                    f"{told[0]}, and worker {worker} through {theirs}. Give all of them one seed=, and what draws a "
                    "sampler or a part of a dataset (random_split) a generator of one seed"
                )

    def _described(self) -> str:
        whole, indices = _source_of(self.dataset)
        found = [torch.as_tensor(one) for one in indices]
        samplers = (self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        for sampler in {id(one): one for one in samplers}.values():
            found += _order_of(sampler)
        order = 0
        for one in found:
            order = crc32(one.cpu().numpy().tobytes(), order)
        size = "batches of their sampler" if self.batch_size is None else f"batches of {self.batch_size}"
        return f"{len(self.dataset)} of {len(whole)} samples in {size} in the order {order:08x}"  # type: ignore[arg-type]


_DRAWING = (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)


def _order_of(sampler: Any) -> list[torch.Tensor]:
    """What is known of what the order follows from that a sampler gives."""
    found = []
    generator = getattr(sampler, "generator", None)
    if generator is None and isinstance(sampler, _DRAWING):
        generator = torch.default_generator
    if isinstance(generator, torch.Generator):
        found.append(generator.get_state())
    for name in ("indices", "weights"):
        chosen = getattr(sampler, name, None)
        if isinstance(chosen, (Sequence, torch.Tensor, np.ndarray)):
            found.append(torch.as_tensor(chosen))
    if type(sampler).__module__.startswith("torch."):  # (an option of others, as their rank, may mean anything)
        options = [one for one in vars(sampler).values() if isinstance(one, (int, float))]
        found.append(torch.tensor(options, dtype=torch.float64))
    return found


def _source_of(dataset: Any) -> tuple[Any, list[Any]]:
    """The dataset of which one is a part, and the indices of the parts between."""
    indices = []
    while isinstance(dataset, data.Subset):
        indices.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, indices


def as_global(batch: Any, P: Partition) -> Any:
    """A batch with a global tensor in the place of each of its blocks."""
    return _each(batch, lambda one: one.as_global(P) if isinstance(one, Blocks) else one)


# -- which block


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


def _checked(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"sample {index} of {length}")
    return int(index) % length


# -- what is read


class _Source(ABC):
    """Samples of one shape and dtype."""

    def __init__(self, length: int, shape: Sequence[int], dtype: Any) -> None:
        self.length, self.shape, self.dtype = length, tuple(shape), np.dtype(dtype).newbyteorder("=")

    @abstractmethod
    def read(self, index: int, box: tuple[slice, ...]) -> Any:
        """A box of a sample."""


class _Array(_Source):
    """An array whose axis 0 counts the samples."""

    def __init__(self, array: Any) -> None:
        self._array = array
        opened = _opened(array)
        if not opened.shape:
            raise ValueError("BlockDataset needs arrays whose axis 0 counts the samples; got a number")
        super().__init__(opened.shape[0], opened.shape[1:], opened.dtype)

    def read(self, index: int, box: tuple[slice, ...]) -> Any:
        return _opened(self._array)[(index, *box)]


class _Files(_Source):
    """A list of files, one for each sample."""

    def __init__(self, paths: Sequence[Any]) -> None:
        self._files = [_File.of(path) for path in paths]
        if not self._files:
            raise ValueError("BlockDataset needs a file at least")
        first = self._files[0].open()
        super().__init__(len(paths), first.shape, first.dtype)
        self._files[0].close()

    def read(self, index: int, box: tuple[slice, ...]) -> Any:
        array = self._files[index].open()
        if tuple(array.shape) != self.shape or np.dtype(array.dtype).newbyteorder("=") != self.dtype:
            raise ValueError(
                f"BlockDataset needs files of one shape and dtype; {self._files[0]} has {dims(self.shape)} "
                f"{self.dtype} and {self._files[index]} {dims(array.shape)} {array.dtype}"
            )
        found = array[box]
        self._files[index].close()
        return found


class _File:
    """An array in a file, which each process opens when it first reads it."""

    def __init__(self, path: str, name: str = "") -> None:
        self.path, self.name = path, name
        self._held: tuple[int, Any] | None = None

    @classmethod
    def of(cls, path: Any) -> _File:
        whole = os.fspath(path)
        if not Path(whole).exists() and ":" in whole:
            file, _, name = whole.rpartition(":")
            return cls(file, name)
        return cls(whole)

    def open(self) -> Any:
        """The array."""
        if self._held is None or self._held[0] != os.getpid():  # (a file that was opened before a fork is not ours)
            self._held = os.getpid(), _open(self.path, self.name)
        return self._held[1]

    def close(self) -> None:
        """Let the file go; it is opened again when it is needed."""
        self._held = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    def __str__(self) -> str:
        return f"{self.path}:{self.name}" if self.name else self.path


def _open(path: str, name: str) -> Any:
    kind = Path(path).suffix
    if kind == ".npy":
        return np.load(path, mmap_mode="r", allow_pickle=False)
    if kind in (".h5", ".hdf5"):
        file = _library("h5py", "HDF5").File(path, "r")
        if not name and len(file) != 1:
            raise ValueError(f"BlockDataset needs {path}:NAME, where NAME is one of {', '.join(file)}")
        return file[name or next(iter(file))]
    if kind == ".zarr":
        found = _library("zarr", "Zarr").open(path, mode="r")
        found = found[name] if name else found
        if not hasattr(found, "shape"):  # (a group)
            raise ValueError(f"BlockDataset needs {path}:NAME, where NAME is one of {', '.join(sorted(found))}")
        return found
    raise ValueError(f"BlockDataset reads .npy, .h5, .hdf5 and .zarr; got {path}")


def _library(name: str, what: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise ImportError(f"reading {what} needs {name}: pip install 'distdl[data]'") from error


def _opened(array: Any) -> Any:
    return array.open() if isinstance(array, _File) else array


def _source(given: Any) -> _Source:
    if isinstance(given, list):
        return _Files(given)
    if isinstance(given, (str, os.PathLike)):
        return _Array(_File.of(given))
    if isinstance(given, np.memmap) and _is_whole(given):
        return _Array(_Mapped(given))
    module = type(given).__module__.partition(".")[0]
    if module == "h5py":  # which cannot be pickled, nor read after a fork
        return _Array(_File(given.file.filename, given.name))
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().numpy()
    if not all(hasattr(given, name) for name in ("shape", "dtype", "__getitem__")):
        raise ValueError(f"BlockDataset needs a path, a list of paths, or an array; got {type(given).__name__}")
    return _Array(given)


class _Mapped(_File):
    """A memory map, which would be pickled with all that it maps."""

    def __init__(self, array: np.memmap[Any, Any]) -> None:
        super().__init__(str(array.filename))
        self._options = {"dtype": array.dtype, "offset": array.offset, "shape": array.shape, "mode": "r"}
        self._held = os.getpid(), array

    def open(self) -> Any:
        if self._held is None:  # (a map that was made before a fork is as good)
            self._held = os.getpid(), np.memmap(self.path, **self._options)
        return self._held[1]


def _is_whole(array: np.memmap[Any, Any]) -> bool:
    """Whether a memory map has the whole array of its file, in order, from its offset on: no view of another map."""
    return (
        array.filename is not None
        and not isinstance(array.base, np.memmap)
        and array.flags.c_contiguous
        and prod(array.shape) > 0
    )


def _each(structure: Any, change: Any) -> Any:
    """The same tuple or dict with each of its members changed; or what is none, changed."""
    if isinstance(structure, tuple):
        return tuple(change(one) for one in structure)
    if isinstance(structure, Mapping):
        return {name: change(one) for name, one in structure.items()}
    return change(structure)


def _leaves(structure: Any) -> list[Any]:
    found: list[Any] = []
    _each(structure, found.append)
    return found
