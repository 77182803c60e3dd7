"""The folders of checkpoints, and how a new checkpoint takes the place of an old one.

A checkpoint is a folder with ``index.json`` and a folder of data. A save writes a new folder of data, and then replaces
the index, in one step. So at every moment there is the old checkpoint or the new one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from distdl.checkpoint.files import name_of, sync
from distdl.checkpoint.index import Index, from_text, to_text

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]  # it is a module elsewhere

INDEX = "index.json"
_STEP = re.compile(r"step-(\d{9,})")
_DATA = re.compile(r"data-[0-9a-f]{16}")


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
            with contextlib.suppress(OSError):  # the folder is not empty where there is an older checkpoint
                self.folder.rmdir()

    def release(self) -> None:
        """Let others save here."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
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
