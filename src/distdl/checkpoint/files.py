"""The files of a checkpoint: blocks in the format of safetensors, written down to the disk, and read in parts."""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from distdl.checkpoint.index import Block, Index, Saved
from distdl.environment.progress import progress
from distdl.geometry.boxes import Box, meet, shape, slices, volume, within
from distdl.tensors.memory import readable
from distdl.transport.communicator import as_bytes


def safetensors() -> Any:
    """The library of that name.

    Raises: ImportError that says how to install it.
    """
    try:
        import safetensors as found
        import safetensors.torch
    except ImportError as error:
        raise ImportError("checkpoints need the package safetensors: pip install 'distdl[checkpoint]'") from error
    return found


def name_of(worker: int) -> str:
    """The file that a worker writes."""
    return f"worker-{worker:05d}.safetensors"


def on_disk(block: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """A block as it is written: on the CPU, contiguous, and real; a copy, if asked for one."""
    block = readable(block.detach())
    if block.dtype.is_complex:
        block = torch.view_as_real(block)
    moved = block.cpu().contiguous()
    own = moved.untyped_storage().nbytes() == moved.nbytes  # safetensors takes no views of larger tensors
    return moved.clone() if not own or (copy and moved.data_ptr() == block.data_ptr()) else moved


def checksum(block: torch.Tensor) -> int:
    """CRC-32 of the bytes of a block as it is written."""
    return zlib.crc32(as_bytes(block).numpy().data) if block.numel() else 0


def write_blocks(path: Path, blocks: Mapping[str, torch.Tensor], shows: bool = False) -> tuple[int, dict[str, int]]:
    """Write a file of blocks, down to the disk.

    Args:
        shows: whether a bar tells of how many blocks the checksums are there.
    Returns: its bytes, and the checksum of each block.
    Raises: OSError if the disk is full, or if it fails in another way.
    """
    library = safetensors()
    try:
        library.torch.save_file(_apart(blocks), path)
    except library.SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    sync(path)
    listed = progress(blocks.items(), "distdl.save: blocks", shows)
    return path.stat().st_size, {key: checksum(block) for key, block in listed}


def _apart(blocks: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same blocks, of which none lies in the memory of another: safetensors refuses these."""
    taken: set[int] = set()
    apart = {}
    for key, block in blocks.items():
        memory = block.untyped_storage().data_ptr()
        apart[key] = block.clone() if memory in taken else block
        taken.add(memory)
    return apart


class Reader:
    """Reads blocks of a checkpoint, and of them no more than is asked for.

    Raises, in all methods: ValueError that names the file, if it is missing, damaged, or other than the index says.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder / index.folder, index
        self._open: dict[int, Any] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()  # unmaps the files

    def read(self, key: str, box: Box) -> torch.Tensor:
        """The cells of a box."""
        saved = self.index.tensors[key]
        y = torch.empty(shape(box), dtype=saved.dtype, device="cpu")
        for block in saved.blocks:
            shared = meet(block.box, box)
            if volume(shared):
                y[slices(within(shared, box))] = self._slice(key, saved, block, shared)
        return y

    def _slice(self, key: str, saved: Saved, block: Block, box: Box) -> torch.Tensor:
        path = self.folder / name_of(block.worker)
        with _naming(path):
            found = self._file(block.worker).get_slice(key)
            part = (shape(block.box), saved.dtype)
            whole: torch.Tensor = found[slices(within(box, block.box)) or ...]
            if saved.dtype.is_complex:
                # A copy, as torch's loops over complex128 need an address that is a multiple of 16, and a file has
                # multiples of 8.
                whole = torch.view_as_complex(whole.clone(memory_format=torch.contiguous_format))
            if tuple(found.get_shape())[: len(part[0])] != part[0] or whole.dtype != saved.dtype:
                raise ValueError(f"{key} has shape {found.get_shape()} and {whole.dtype}; the index says {part}")
        return whole

    def check(self, key: str, block: Block) -> None:
        """Check that the bytes of a block are those that were written."""
        path = self.folder / name_of(block.worker)
        with _naming(path):
            found = checksum(self._file(block.worker).get_tensor(key).contiguous())
            if found != block.checksum:
                raise ValueError(f"the checksum of {key} is {found}; {block.checksum} was written")

    def check_sizes(self) -> None:
        """Check that all files are there, as long as they were written."""
        for worker, size in self.index.sizes.items():
            path = self.folder / name_of(worker)
            with _naming(path):
                if path.stat().st_size != size:
                    raise ValueError(f"it has {path.stat().st_size} bytes; {size} were written")

    def _file(self, worker: int) -> Any:
        if worker not in self._open:
            self._open[worker] = safetensors().safe_open(self.folder / name_of(worker), "pt")
        return self._open[worker]


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except Exception as error:  # safetensors has errors of its own
        raise ValueError(f"{path} is damaged: {error}") from error


def sync(path: Path) -> None:
    """Bring a file to the disk; also a folder, where the file system can do that and we may read it."""
    try:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP):
            raise
