"""Directories of torch.distributed.checkpoint, read and written as nested dicts. For one process.

Their ``.metadata`` is a pickle, and their values are written by ``torch.save``. Both are read by unpicklers that build
tensors, numbers, strings, containers and the classes of the metadata, and nothing else: reading executes no code.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import warnings
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

METADATA = ".metadata"


def _module(name: str) -> str:
    """The name of a module in any Python: to 3.13, that of paths is pathlib._local."""
    return name.replace("pathlib._local", "pathlib")


_CLASSES = {
    (_module(one.__module__), one.__name__): one
    for one in (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        _StorageInfo,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        OrderedDict,
    )
} | {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # looks a name up in a table
}


def read(folder: Path) -> dict[str, Any]:
    """All that was saved, as it was nested; tensors whole, on the CPU.

    Raises: FileNotFoundError if it is no such directory; ValueError if it is damaged, or has something in it that is
        neither a tensor nor a number, a string or a container of these.
    """
    found = _metadata(folder)
    try:
        state = {
            key: torch.empty(one.size, dtype=one.properties.dtype, device="cpu")
            if isinstance(one, metadata.TensorStorageMetadata)
            else None
            for key, one in found.state_dict_metadata.items()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(state, storage_reader=_Reader(folder, found), planner=_Planner(), no_dist=True)
    except (Exception, CheckpointException) as error:  # whatever is in the files
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise ValueError(f"{folder} is damaged: {_text(first)}") from error
    return _nested({found.planner_data.get(key, (key,)): value for key, value in state.items()})


def write(folder: Path, state: dict[str, Any]) -> None:
    """Save a nested dict; the directory is complete when its ``.metadata`` is there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get((_module(module), name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of such metadata")
        return found


class _Reader(FileSystemReader):
    """One that has the metadata already."""

    def __init__(self, folder: Path, found: metadata.Metadata) -> None:
        super().__init__(folder)
        self._found = found

    def read_metadata(self, *args: Any, **options: Any) -> metadata.Metadata:
        return self._found


class _Planner(DefaultLoadPlanner):
    """One that takes the keys as they are, and unpickles weights only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{key} is none of the numbers, strings, tensors and containers that are read ({_text(error)})"
            ) from error


def _metadata(folder: Path) -> metadata.Metadata:
    """The metadata of a directory, checked.

    Raises: as :func:`read`.
    """
    path = folder / METADATA
    content = path.read_bytes()
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        _check(found)
    except Exception as error:  # a forged pickle can raise anything
        raise ValueError(f"{path} is damaged, or forged: {_text(error)}") from error
    assert isinstance(found, metadata.Metadata)
    found.planner_data = found.planner_data or {}
    return found


def _check(found: Any) -> None:
    """Check what torch takes for granted: that blocks tile their tensors, and that files lie in the directory."""
    if not isinstance(found, metadata.Metadata):
        raise ValueError(f"it is a {type(found).__name__}")
    for key, one in found.state_dict_metadata.items():
        if not isinstance(key, str):
            raise ValueError(f"{key!r} is no name")
        if isinstance(one, metadata.TensorStorageMetadata):
            whole = tuple(one.size)
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in one.chunks]
            inside = all(
                len(begins) == len(sizes) == len(whole)
                and all(b >= 0 and n >= 0 and b + n <= m for b, n, m in zip(begins, sizes, whole, strict=True))
                for begins, sizes in boxes
            )
            if not inside or len(set(boxes)) < len(boxes) or sum(prod(sizes) for _, sizes in boxes) != prod(whole):
                raise ValueError(f"the blocks of {key} do not tile its {list(whole)}: {boxes}")
        elif not isinstance(one, metadata.BytesStorageMetadata):
            raise ValueError(f"{key} is a {type(one).__name__}")
    for place in found.storage_data.values():
        name = place.relative_path
        if not isinstance(name, str) or name in (".", "..") or pathlib.PurePath(name).name != name:
            raise ValueError(f"{name!r} is no file of the directory")
    for key, path in (found.planner_data or {}).items():
        if not (isinstance(path, tuple) and path and all(isinstance(part, (str, int)) for part in path)):
            raise ValueError(f"{path!r} is no place for {key}")


def _nested(values: dict[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """The dicts and lists in which values lay. (A dict whose keys are 0, 1, ... looks like a list.)"""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        inside = root
        for part in path[:-1]:
            inside = inside.setdefault(part, _Inner())
            if type(inside) is not _Inner:
                raise ValueError(f"{path} lies in a value")
        if path[-1] in inside:
            raise ValueError(f"{path} is there twice")
        inside[path[-1]] = value
    return {key: _listed(value) for key, value in root.items()}


class _Inner(dict[Any, Any]):
    """A dict or a list that is being put together."""


def _listed(value: Any) -> Any:
    if type(value) is not _Inner:
        return value
    inner = {key: _listed(one) for key, one in value.items()}
    in_order = all(isinstance(key, int) for key in inner) and sorted(inner) == list(range(len(inner)))
    return [inner[place] for place in range(len(inner))] if in_order else inner


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
