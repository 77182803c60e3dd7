"""The files of a checkpoint: blocks in the format of safetensors, and how a new one takes the place of an old one.

A checkpoint is a folder with ``index.json`` and a folder of data. A save writes a new folder of data, and then replaces
the index, in one step. So at every moment there is the old checkpoint or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from distdl.checkpoint.index import Block, Index, Saved, from_text, to_text
from distdl.geometry.boxes import Box, meet, shape, slices, volume, within
from distdl.tensors.memory import readable
from distdl.transport.communicator import as_bytes

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]  # (it is a module elsewhere)

INDEX = "index.json"
_STEP = re.compile(r"step-(\d{9,})")
_DATA = re.compile(r"data-[0-9a-f]{16}")


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


# -- blocks


def on_disk(block: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """A block as it is written: on the CPU, contiguous, and real; a copy, if asked for one."""
    block = readable(block.detach())
    if block.dtype.is_complex:
        block = torch.view_as_real(block)
    moved = block.cpu().contiguous()
    own = moved.untyped_storage().nbytes() == moved.nbytes  # (safetensors wants no views of something larger)
    return moved.clone() if not own or (copy and moved.data_ptr() == block.data_ptr()) else moved


def checksum(block: torch.Tensor) -> int:
    """CRC-32 of the bytes of a block as it is written."""
    return zlib.crc32(as_bytes(block).numpy().data) if block.numel() else 0


def write_blocks(path: Path, blocks: Mapping[str, torch.Tensor]) -> tuple[int, dict[str, int]]:
    """Write a file of blocks, down to the disk.

    Returns: its bytes, and the checksum of each block.
    Raises: OSError if the disk is full, or if it fails in another way.
    """
    library = safetensors()
    try:
        library.torch.save_file(_apart(blocks), path)
    except library.SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    sync(path)
    return path.stat().st_size, {key: checksum(block) for key, block in blocks.items()}


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
        self._open.clear()  # (which unmaps them)

    def read(self, key: str, box: Box) -> torch.Tensor:
        """The cells of a box."""
        saved = self.index.tensors[key]
        y = torch.empty(shape(box), dtype=saved.dtype)
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
                whole = torch.view_as_complex(whole.contiguous())
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


# -- folders


def step_folder(path: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in a folder of steps."""
    return path / f"step-{step:09d}"


def steps_in(path: Path, damaged: bool = False) -> list[tuple[int, Path]]:
    """The complete checkpoints in a folder of steps, in the order in which they were saved, with their serials.

    Args:
        damaged: whether one whose index cannot be read is passed over (it counts as older than all others).
    Raises: ValueError if there is such an index.
    """
    found = []
    for one in path.iterdir():
        if _STEP.fullmatch(one.name) and (one / INDEX).is_file():
            try:
                found.append((from_text(text_of(one / INDEX), one / INDEX).serial, one))
            except ValueError:
                if not damaged:
                    raise
                found.append((-1, one))
    return sorted(found)


def text_of(index: Path) -> str:
    """The text of an index.

    Raises: ValueError if it is none.
    """
    try:
        return index.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{index} is damaged: {error}") from error


def find(path: Path) -> tuple[str, Path]:
    """The text of the index of a checkpoint, and its folder; of a folder of steps, of the one saved last.

    Raises: FileNotFoundError if there is no complete checkpoint; ValueError if its index is no text.
    """
    if (path / INDEX).is_file():
        return text_of(path / INDEX), path
    steps = steps_in(path) if path.is_dir() else []
    if not steps:
        raise FileNotFoundError(f"there is no complete checkpoint in {path}")
    return text_of(steps[-1][1] / INDEX), steps[-1][1]


class Place:
    """Where a checkpoint is being saved: who has one is the only one to save there.

    Args:
        path: the user's.
        step, keep: as of :func:`distdl.save`.
    Raises: ValueError if another save goes on there, or if it is the wrong kind of folder.
    """

    def __init__(self, path: Path, step: int | None, keep: int | None, token: str) -> None:
        self.path, self.keep, self.serial = path, keep, 0
        self._committed = False
        path.mkdir(parents=True, exist_ok=True)
        if keep is not None and (path / INDEX).exists():
            raise ValueError(f"keep= needs a folder of steps; {path} is a checkpoint itself")
        self._lock = _lock(path)
        try:
            if keep is None and any(_STEP.fullmatch(one.name) for one in path.iterdir()):
                raise ValueError(f"{path} is a folder of steps; save there with keep=, or elsewhere")
            self.folder = path
            if keep is not None:
                assert step is not None
                self.folder = step_folder(path, step)
                self.folder.mkdir(exist_ok=True)
                self.serial = max((serial for serial, _ in steps_in(path, damaged=True)), default=-1) + 1
            self._sweep()
            self.data = self.folder / f"data-{token}"
            self.data.mkdir()
        except BaseException:
            self.release()
            raise

    def commit(self, index: Index) -> None:
        """Make the files that lie in the folder of data the checkpoint. What was there before is removed."""
        for worker, size in index.sizes.items():
            file = self.data / name_of(worker)
            if not file.exists() or file.stat().st_size != size:
                raise OSError(
                    f"{file}, which worker {worker} has written, is not there; a checkpoint needs a folder that all "
                    "workers share"
                )
        new = self.folder / f"{INDEX}.new"
        new.write_text(to_text(index), "utf-8")
        for one in (new, self.data, self.folder):
            sync(one)
        os.replace(new, self.folder / INDEX)
        self._committed = True
        for one in (self.folder, self.path, self.path.parent):
            sync(one)
        self._sweep(self.data)
        if self.keep is not None:
            for _, folder in steps_in(self.path, damaged=True)[: -self.keep]:
                (folder / INDEX).unlink()  # so that what is half removed is no checkpoint
                _remove(folder)

    def abandon(self) -> None:
        """Remove what was written, unless it is the checkpoint by now."""
        if self._committed:
            return
        shutil.rmtree(self.data, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.folder / f"{INDEX}.new").unlink(missing_ok=True)
        if self.folder != self.path:
            with contextlib.suppress(OSError):  # (it is not empty: there is an older checkpoint)
                self.folder.rmdir()

    def release(self) -> None:
        """Let others save here."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # (also for processes that were forked meanwhile)
            os.close(self._lock)
            self._lock = None

    def _sweep(self, *kept: Path) -> None:
        """Remove what interrupted saves have left."""
        index = self.folder / INDEX
        try:
            kept = (*kept, self.folder / from_text(text_of(index), index).folder)
        except FileNotFoundError:
            pass
        except ValueError:  # of what is damaged, nothing is removed before there is something new
            return
        for one in self.folder.iterdir():
            if _DATA.fullmatch(one.name) and one not in kept:
                _remove(one)
        (self.folder / f"{INDEX}.new").unlink(missing_ok=True)
        if self.folder != self.path:  # other steps that were never finished
            for one in self.path.iterdir():
                if _STEP.fullmatch(one.name) and one != self.folder and one.is_dir() and not (one / INDEX).exists():
                    _remove(one)


def _remove(folder: Path) -> None:
    """Remove a folder, or a link to one (what it leads to stays)."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _lock(path: Path) -> int | None:
    """A lock that ends with its process, whatever ends it; None where file systems have none."""
    if fcntl is None:
        return None
    opened = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise ValueError(f"another save into {path} goes on") from None
    except OSError:
        os.close(opened)
        return None
    return opened


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
