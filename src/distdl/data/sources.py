"""What samples are read from: arrays, and files that each process opens by itself."""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distdl.partition import dims


class Source(ABC):
    """Samples of one shape and dtype."""

    def __init__(self, length: int, shape: Sequence[int], dtype: Any) -> None:
        self.length, self.shape, self.dtype = length, tuple(shape), np.dtype(dtype).newbyteorder("=")
        try:
            torch.from_numpy(np.empty(0, self.dtype))
        except TypeError:
            raise ValueError(f"BlockDataset needs arrays of a dtype that torch has; got {self.dtype}") from None

    @abstractmethod
    def read(self, index: int, box: tuple[slice, ...]) -> Any:
        """A box of a sample."""


class Chosen(Source):
    """Some samples of another source, by their numbers there."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        super().__init__(len(indices), source.shape, source.dtype)
        self._source, self._indices = source, indices

    def read(self, index: int, box: tuple[slice, ...]) -> Any:
        return self._source.read(checked(self._indices[index], self._source.length), box)


class Joined(Source):
    """The samples of several sources, one behind the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        first = sources[0]
        for one in sources:
            if (one.shape, one.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    f"datasets that are joined need samples of one shape and dtype; the first has "
                    f"{dims(first.shape) or '0-d'} {first.dtype}, and another {dims(one.shape) or '0-d'} {one.dtype}"
                )
        self._sources = list(sources)
        self._stops = list(accumulate(one.length for one in sources))
        super().__init__(self._stops[-1], first.shape, first.dtype)

    def read(self, index: int, box: tuple[slice, ...]) -> Any:
        place = bisect_right(self._stops, index)
        source = self._sources[place]
        return source.read(index - (self._stops[place] - source.length), box)


class _Array(Source):
    """An array whose axis 0 counts the samples."""

    def __init__(self, array: Any) -> None:
        self._array = array
        opened = _opened(array)
        if not opened.shape:
            raise ValueError("BlockDataset needs arrays whose axis 0 counts the samples; got a number")
        super().__init__(opened.shape[0], opened.shape[1:], opened.dtype)

    def read(self, index: int, box: tuple[slice, ...]) -> Any:
        return _opened(self._array)[(index, *box)]


class _Files(Source):
    """A list of files, one for each sample."""

    def __init__(self, paths: Sequence[Any]) -> None:
        if not paths:
            raise ValueError("BlockDataset needs a file at least")
        other = next((one for one in paths if not isinstance(one, (str, os.PathLike))), None)
        if other is not None:
            raise ValueError(f"BlockDataset needs a list to have paths; got a {type(other).__name__} in one")
        self._files = [_File.of(path) for path in paths]
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
        # a file that was opened before a fork belongs to the parent
        if self._held is None or self._held[0] != os.getpid():
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
    """The array of a file.

    Raises: ValueError that names the file, if it is damaged, or has no array of that name.
    """
    try:
        return _array_of(path, name)
    except FileNotFoundError:
        raise
    except (ValueError, OSError, KeyError, EOFError) as error:
        if path in str(error):
            raise
        raise ValueError(f"{path}{f':{name}' if name else ''} cannot be read: {error}") from error


def _array_of(path: str, name: str) -> Any:
    kind = Path(path).suffix
    if kind == ".npy":
        if name:
            raise ValueError("it has one array, without a name")
        return np.load(path, mmap_mode="r", allow_pickle=False)
    if kind in (".h5", ".hdf5"):
        file = _library("h5py", "HDF5").File(path, "r")
        if not name and len(file) != 1:
            raise ValueError(f"BlockDataset needs {path}:NAME, where NAME is one of {', '.join(file)}")
        name = name or next(iter(file))
        if not hasattr(file[name], "shape"):  # a group of arrays
            inside = ", ".join(f"{name}/{one}" for one in file[name])
            raise ValueError(f"BlockDataset needs {path}:NAME, where NAME is one of {inside}")
        return file[name]
    if kind == ".zarr":
        found = _library("zarr", "Zarr").open(path, mode="r")
        found = found[name] if name else found
        if not hasattr(found, "shape"):  # a group of arrays
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


def checked(index: Any, length: int) -> int:
    """The number of a sample, counted from the first.

    Raises: TypeError if it is no whole number; IndexError if there is none.
    """
    if not hasattr(index, "__index__"):
        raise TypeError(f"a sample's number is a whole one; got {index!r}")
    number = operator.index(index)
    if not -length <= number < length:
        raise IndexError(f"sample {number} of {length}")
    return number % length


def source_of(given: Any) -> Source:
    """What samples are read from: an array, a path, or paths. A source is one itself."""
    if isinstance(given, Source):
        return given
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
        try:
            given = given.detach().cpu().numpy()
        except TypeError:
            raise ValueError(f"BlockDataset needs tensors of a dtype that NumPy has; got {given.dtype}") from None
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
        if self._held is None:  # a map that was made before a fork serves the child as well
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
