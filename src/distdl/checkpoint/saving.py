"""Saving: every worker writes its own blocks, and then the new checkpoint takes the place of the old in one step."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distdl.checkpoint.contents import Contents, agree, collect
from distdl.checkpoint.files import name_of, on_disk, safetensors, write_blocks
from distdl.checkpoint.folders import Place
from distdl.checkpoint.index import Index
from distdl.checkpoint.records import communicator_of
from distdl.checkpoint.together import together
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.transport.communicator import Communicator
from distdl.workers.worlds import world

_POLL = 0.02  # seconds between two looks at what others have written


def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    step: int | None = None,
    *,
    keep: int | None = None,
    wait: bool = True,
) -> None:
    """Save a model, and what belongs to its training, to a folder that all workers share. Collective.

    Each worker writes its own blocks. Of tensors that several workers have, one of them writes each. Also saved are the
    counters of random layers and the states of torch's generators. A save that is interrupted, in whatever way, leaves
    what was there before.

    Args:
        path: a folder; it is made if it is not there. A checkpoint that lies there is replaced.
        model: any module: of ``distdl.nn``, distributed by :func:`distdl.distribute`, plain, or of such modules.
        optimiser: one of torch's, of parameters of the model.
        scheduler: one with a ``state_dict`` of numbers, strings, tensors, and tuples, lists and dicts of these.
        step: a number of yours, which :func:`load` returns.
        keep: if given, ``path`` is a folder of steps: each save makes a folder ``step-...`` in it, and then only the
            ``keep`` that were saved last are kept. ``load(path)`` reads the one saved last.
        wait: if False, the blocks are copied, and the rest is done by a thread while training goes on. If that fails,
            the next ``save``, ``load`` or ``finish_saving`` raises its error, on every worker.
    Raises: the same error on every worker. ValueError or TypeError for arguments that do not fit or that differ between
        workers, for copies of a parameter that differ, and if another save into this path goes on; OSError if writing
        fails; ImportError without the package safetensors.
    """
    comm = communicator_of(model)
    finish_saving(comm)

    def collected() -> Contents:
        safetensors()
        _check_numbers(step, keep)
        return collect(comm, model, optimiser, scheduler)

    def call() -> dict[str, Any]:
        return {"path": str(Path(path)), "step": step, "keep": keep, "wait": bool(wait)}

    own, index = agree(comm, "distdl.save", collected, call)
    place, index, data = _open_place(comm, index, path, step, keep)
    mine = {key: block.box for key, block in index.written if block.worker == comm.rank}
    blocks: dict[str, torch.Tensor] = {}

    def copy() -> None:
        blocks.update({key: on_disk(own.records.found[key].block, copy=not wait) for key in mine})

    Saving(comm, index, data, blocks, place).run(copy, wait)


def _check_numbers(step: int | None, keep: int | None) -> None:
    """Raises: ValueError for a step or a number of checkpoints that save does not take."""
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(f"distdl.save needs keep= to be a number from 1; got {keep!r}")
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"distdl.save needs step= to be a number from 0; got {step!r}")
    if keep is not None and step is None:
        raise ValueError("distdl.save needs step= beside keep=")


def _open_place(
    comm: Communicator, index: Index, path: str | os.PathLike[str], step: int | None, keep: int | None
) -> tuple[Place | None, Index, Path]:
    """Make the folder of the files, on worker 0. Collective.

    Returns: the place of the checkpoint, on worker 0 alone; the index with the folder's name and number; the folder.
    Raises: the same error on every worker, if another save into the path goes on or the folder cannot be made.
    """
    places: list[Place] = []

    def opened() -> tuple[str, int] | None:
        if comm.rank:
            return None
        places.append(Place(Path(path).absolute(), step, keep, secrets.token_hex(8)))
        return str(places[0].data), places[0].serial

    data, serial = together(comm, "distdl.save", opened)[0]
    return places[0] if places else None, replace(index, folder=Path(data).name, serial=serial), Path(data)


@checks_arguments
def finish_saving(comm: Communicator | Partition | None = None) -> None:
    """Wait until a checkpoint that was saved with ``wait=False`` is complete. Collective.

    Args:
        comm: a partition of the world in question; by default the world in which the caller was launched.
    Raises: the same error on every worker, if it has failed.
    """
    comm = comm.comm if isinstance(comm, Partition) else comm or world().comm
    pending: Saving | None = comm.kept.pop(Saving, None)
    if pending is not None:
        pending.finish()


class Saving:
    """A checkpoint that is being written.

    Attributes:
        data: the folder of the files.
        blocks: what this worker writes.
        place: on worker 0, where it will be.
    """

    def __init__(
        self, comm: Communicator, index: Index, data: Path, blocks: dict[str, torch.Tensor], place: Place | None
    ) -> None:
        self.comm, self.index, self.data, self.blocks, self.place = comm, index, data, blocks, place
        self._thread: threading.Thread | None = None
        self._failed_elsewhere = threading.Event()
        self._error: Exception | None = None

    def run(self, copy: Callable[[], None], wait: bool) -> None:
        """Copy what is to be written, and write it: now, or in a thread."""
        if not wait:
            try:
                together(self.comm, "distdl.save", copy)
            except Exception:
                self._abandon()
                raise
            self._thread = threading.Thread(target=self._write_behind, name="distdl-save")
            self._thread.start()
            self.comm.kept[Saving] = self
            return

        def write() -> Any:
            copy()
            return self._write(self.comm.rank == 0)

        try:
            reports = together(self.comm, "distdl.save", write)
            together(self.comm, "distdl.save", lambda: self._commit(reports))
        except Exception:
            self._abandon()
            raise
        finally:
            self._release()

    def finish(self) -> None:
        """Wait for the thread. Collective.

        Raises: its error, or that of another worker's thread.
        """
        thread, what = self._thread, "an earlier distdl.save"
        assert thread is not None
        # the thread of worker 0 waits for files of the others. On a full disk they cannot write these, so they say here
        # that they have failed, before worker 0 waits for its thread
        if self.place is None:
            thread.join()
        try:
            try:
                together(self.comm, what, lambda: None if self.place is not None else self._outcome())
            except Exception:
                self._failed_elsewhere.set()
                raise
            finally:
                thread.join()
            together(self.comm, what, self._outcome)
        except Exception as error:
            raise type(error)(f"an earlier distdl.save with wait=False failed: {error}") from error

    def _outcome(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self, shows: bool = False) -> list[Any]:
        """Write this worker's file; returns its bytes (None if there is none), and the checksums of the blocks."""
        if not self.blocks:
            return [None, {}]
        return [*write_blocks(self.data / name_of(self.comm.rank), self.blocks, shows)]

    def _commit(self, reports: list[Any]) -> None:
        if self.place is None:
            return
        sizes = {worker: size for worker, (size, _) in enumerate(reports) if size is not None}
        tensors = {
            key: replace(saved, blocks=tuple(b._replace(checksum=reports[b.worker][1][key]) for b in saved.blocks))
            for key, saved in self.index.tensors.items()
        }
        self.place.commit(replace(self.index, tensors=tensors, sizes=sizes))

    def _write_behind(self) -> None:
        """What the thread does: the workers agree by files, as their messages belong to the training."""
        report: Any = {}
        try:
            report = {"done": self._write()}
        except Exception as error:
            self._error = error
        try:
            self.blocks.clear()
            if self.place is None:
                _write_text(self.data / f"{self.comm.rank}.json", json.dumps(report))
                return
            reports = [report, *(self._report_of(worker) for worker in range(1, self.comm.size))]
            if all("done" in one for one in reports):
                self._commit([one["done"] for one in reports])
            else:
                self._abandon()
        except Exception as error:
            self._error = self._error or error
            self._abandon()
        finally:
            self._release()

    def _report_of(self, worker: int) -> Any:
        path, deadline = self.data / f"{worker}.json", self.comm.deadline()
        while not path.exists():
            if time.monotonic() > deadline:
                raise OSError(
                    f"worker {worker} has not written its blocks after {self.comm.timeout:g} s, or {path} is "
                    "not on a file system that all workers share"
                )
            if self._failed_elsewhere.wait(_POLL):
                raise OSError("another worker could not write its blocks")
        report = json.loads(path.read_text())
        path.unlink()
        return report

    def _abandon(self) -> None:
        if self.place is not None:
            self.place.abandon()

    def _release(self) -> None:
        if self.place is not None:
            self.place.release()


def _write_text(path: Path, text: str) -> None:
    """Write a file that others wait for: it is there as a whole, or not."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)
