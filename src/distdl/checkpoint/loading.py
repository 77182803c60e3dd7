"""Loading: every worker reads the cells that it has, whoever has written them. Nothing is set before all is checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch

from distdl.checkpoint import optimisers, randomness
from distdl.checkpoint.checking import is_kind
from distdl.checkpoint.contents import check_alike, having_extra_state, of_model, state_of
from distdl.checkpoint.files import Reader, safetensors
from distdl.checkpoint.folders import INDEX, find
from distdl.checkpoint.index import MODEL, Index, from_text
from distdl.checkpoint.records import Record, Records, communicator_of, local
from distdl.checkpoint.saving import finish_saving
from distdl.checkpoint.together import together
from distdl.checkpoint.values import decode
from distdl.environment.progress import progress
from distdl.geometry.boxes import Box, whole
from distdl.partition import dims


class Source(Protocol):
    """Where tensors come from.

    Attributes:
        index: what there is.
    """

    index: Index

    def read(self, key: str, box: Box) -> torch.Tensor:
        """The cells of a box."""


def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimiser: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    random: bool = True,
) -> int | None:
    """Load what :func:`save` has saved: on any number of workers, any back-end, any partition. Collective.

    Each worker reads the cells that it has. Everything is checked before anything is set, so a model is never loaded in
    part; the checksums of all blocks are compared once, each by one worker.

    Args:
        path: a checkpoint, or a folder of steps, of which the one saved last is loaded.
        model: one with the names and shapes of the one that was saved, distributed in any way.
        optimiser: of the same parameters, in the same groups; its options become those that were saved.
        scheduler: of the same class, or of one that derives from it.
        random: whether the counters of random layers and torch's generators go on from where they were. With another
            number of workers, all generators go on from that of worker 0.
    Returns: the ``step`` with which it was saved.
    Raises: the same error on every worker, and then nothing was set. FileNotFoundError if there is no complete
        checkpoint; ValueError for names that are missing or too many, for other shapes or dtypes, for files that are
        truncated, altered or missing, and if there is no optimiser or scheduler in it but one is asked for.
    """
    comm = communicator_of(model)
    finish_saving(comm)
    what = "distdl.load"
    told = together(comm, what, lambda: _found(path, comm.rank == 0))
    check_alike(what, [{"path": given} for given, _, _ in told])
    _, text, name = told[0]
    folder = Path(name)
    staged: list[Staged] = []

    def stage() -> list[str]:
        safetensors()
        index = from_text(text, folder / INDEX)
        with Reader(folder, index) as reader:
            reader.check_sizes()
            staged.append(Staged(reader, model, optimiser, scheduler))
            mine = list(index.written)[comm.rank :: comm.size]
            for key, block in progress(mine, "distdl.load: blocks", comm.rank == 0):
                reader.check(key, block)
            if random and index.facts["random"] is not None:
                staged[0].read_random(comm.rank, comm.size)
        return list(staged[0].names)

    install_together(comm, what, stage, staged)
    return staged[0].index.step


def _found(path: str | os.PathLike[str], reads: bool) -> tuple[str, str, str]:
    """The path as the user says it; if this worker reads it, the text of its index, and where the checkpoint lies."""
    if not reads:
        return str(Path(path)), "", ""
    text, folder = find(Path(path).absolute())
    return str(Path(path)), text, str(folder)


def install_together(comm: Any, what: str, stage: Any, staged: list[Staged]) -> None:
    """Stage on every worker, check that together they have all names, and then install. Collective.

    Raises: the same error on every worker, and then what was set is as it was before.
    """
    names = together(comm, what, stage)
    missing = sorted(staged[0].wanted.difference(*names))
    if missing:
        raise ValueError(f"the model has no {_listed(missing)}, and the checkpoint has it")
    try:
        together(comm, what, staged[0].install)
    except Exception:
        with suppress(Exception):  # a load_state_dict of the user's may fail again
            staged[0].undo()
        raise
    staged[0].restore_random()


class Staged:
    """What is to be set on this worker, read and checked.

    Attributes:
        names: the keys that this worker's model and optimiser have.
        wanted: the keys that the models and optimisers of all workers have to have.

    Raises: ValueError if the model or the optimiser is not what was saved.
    """

    def __init__(
        self, source: Source, model: torch.nn.Module, optimiser: torch.optim.Optimizer | None, scheduler: Any
    ) -> None:
        self.source, self.index = source, source.index
        self.model, self.optimiser, self.scheduler = model, optimiser, scheduler
        index, facts = self.index, self.index.facts
        for name, one in (("optimiser", optimiser), ("scheduler", scheduler)):
            if one is not None and facts[name] is None:
                raise ValueError(f"the checkpoint has no {name}")
        records = of_model(model)
        self._check(records)
        self.names = {*records.found, *records.aliases}
        self.wanted = {key for key in index.tensors if key.startswith(MODEL)} | set(index.aliases)
        self._tensors = [
            (one, source.read(index.aliases.get(one.key, one.key), one.box))
            for one in records.found.values()
            if one.box is not None and one.tensor is not None
        ]
        self._state: dict[str, Any] | None = None
        if optimiser is not None:
            if not isinstance(optimiser, torch.optim.Optimizer):
                raise TypeError(f"a checkpoint needs an optimiser of torch's; got a {type(optimiser).__name__}")
            self._state = optimisers.restored(optimiser, records, facts["optimiser"], self._read)
            self.names |= _in_groups(optimisers.names_of(optimiser, records))
            self.wanted |= _in_groups([group["params"] for group in facts["optimiser"]["groups"]])
        self._schedule = None if scheduler is None else decode(facts["scheduler"], self._whole)
        if scheduler is not None:
            _check_kind(scheduler, facts["scheduler_kind"], self._schedule)
        having = having_extra_state(model)
        _check_extra(having, facts["extra_state"])
        self._extra = [
            (module, decode(facts["extra_state"][path], self._whole))
            for path, module in having
            if path in facts["extra_state"]
        ]
        self._generators: dict[str, torch.Tensor] | None = None
        self._undoing = ExitStack()

    def read_random(self, worker: int, size: int) -> None:
        """Read the states of the generators with which this worker goes on.

        Raises: ValueError for what is no state of a generator.
        """
        keys = randomness.keys_for(worker, size, self.index.workers, self.index.tensors)
        self._generators = {kind: self._whole(key) for kind, key in keys.items()}
        randomness.check(self._generators)

    def install(self) -> None:
        """Set everything but the states of generators, so that it can be undone."""
        for record, cells in self._tensors:
            _swap(record, cells)
            self._undoing.callback(_swap, record, cells)
        if self.optimiser is not None and self._state is not None:
            self._undoing.callback(self.optimiser.load_state_dict, self.optimiser.state_dict())
            self.optimiser.load_state_dict(self._state)
        if self.scheduler is not None:
            self._keep_for_undo(self.scheduler.load_state_dict, self.scheduler.state_dict)
            self.scheduler.load_state_dict(self._schedule)
        for module, state in self._extra:
            self._keep_for_undo(module.set_extra_state, module.get_extra_state)
            module.set_extra_state(state)

    def undo(self) -> None:
        """Set everything to what it was before :meth:`install`, as far as that came."""
        self._undoing.close()

    def _keep_for_undo(self, sets: Callable[[Any], Any], gets: Callable[[], Any]) -> None:
        """Undo what is set next by setting what there is now; nothing where a user's code cannot tell it (yet)."""
        with suppress(Exception):
            self._undoing.callback(sets, deepcopy(gets()))

    def restore_random(self) -> None:
        """Go on with the random numbers that were read: the last thing to set. They were checked, so it cannot fail."""
        if self._generators is not None:
            comm = communicator_of(self.model)
            randomness.restore(self.model, comm, self.index.facts["random"], self._generators)

    def _check(self, records: Records) -> None:
        """Check names, shapes and dtypes of this worker's tensors.

        Raises: ValueError.
        """
        tensors, aliases = self.index.tensors, self.index.aliases
        names = (*records.found, *records.aliases)
        unknown = sorted(name for name in names if name not in tensors and name not in aliases)
        if unknown:
            raise ValueError(f"the checkpoint has no {_listed(unknown)}, and the model has it")
        for name in names:
            record = records.found[records.aliases.get(name, name)]
            saved = tensors[aliases.get(name, name)]
            dtype = saved.dtype if record.tensor is None else record.tensor.dtype
            if (record.extents, dtype) != (saved.extents, saved.dtype):
                raise ValueError(
                    f"{_listed([name])} is {dims(saved.extents)} {saved.dtype} in the checkpoint and "
                    f"{dims(record.extents)} {dtype} in the model"
                )

    def _read(self, key: str, record: Record | None) -> torch.Tensor:
        if record is None:
            return self._whole(key)
        saved = self._saved(key)
        if saved.extents != record.extents:
            raise ValueError(f"{key} is {dims(saved.extents)} in the checkpoint; its parameter {dims(record.extents)}")
        if record.box is None:
            return torch.empty(0, dtype=saved.dtype, device="cpu")
        return self.source.read(key, record.box)

    def _whole(self, key: str) -> torch.Tensor:
        return self.source.read(key, whole(self._saved(key).extents))

    def _saved(self, key: str) -> Any:
        if key not in self.index.tensors:
            raise ValueError(f"the checkpoint is damaged: it has no {key}")
        return self.index.tensors[key]


def _swap(record: Record, cells: torch.Tensor) -> None:
    """Exchange this worker's cells of a tensor of the model for others: twice, and it is as before."""
    assert record.tensor is not None
    target = local(record.tensor)
    before = target.to(cells.device, copy=True)
    with torch.no_grad():
        target.copy_(cells.reshape(target.shape))
        cells.copy_(before.reshape(cells.shape))


def _check_extra(having: list[tuple[str, torch.nn.Module]], saved: Mapping[str, Any]) -> None:
    """Check that the modules that keep an extra state are those of which one was saved.

    (Of one with two names, distdl saved it under the first at first.)

    Raises: ValueError.
    """
    found = {id(module) for path, module in having if path in saved}
    unknown = sorted(path or "the model" for path, module in having if id(module) not in found)
    if unknown:
        raise ValueError(f"the checkpoint has no extra state of {_listed(unknown)}, which the model keeps")
    missing = sorted(path or "the model" for path in saved.keys() - {path for path, _ in having})
    if missing:
        raise ValueError(f"the model keeps no extra state of {_listed(missing)}, of which the checkpoint has one")


def _check_kind(scheduler: Any, kind: str | None, saved: Any) -> None:
    """Check that a scheduler is of the class that was saved, or derives from it, or keeps no more than was saved.

    (Names that begin with _ come and go with torch.)

    Raises: ValueError.
    """
    if is_kind(scheduler, kind) and isinstance(saved, Mapping):
        return
    own, found = (one if isinstance(one, Mapping) else {} for one in (state_of(scheduler), saved))
    missing = sorted(str(name) for name in own if str(name)[:1] != "_" and name not in found)
    if missing:
        raise ValueError(
            f"a checkpoint needs a scheduler of the class that was saved, {kind}; a {type(scheduler).__name__} "
            f"has {', '.join(missing)}; saved were {', '.join(sorted(map(str, found))) or 'none of them'}"
        )


def _in_groups(groups: list[list[str]]) -> set[str]:
    return {f"{key.removeprefix(MODEL)} in group {n} of its optimiser" for n, own in enumerate(groups) for key in own}


def _listed(keys: list[str]) -> str:
    named = [key.removeprefix(MODEL) for key in keys]
    return ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
