"""The ledger: what this worker's layers say to other workers, in messages, bytes and time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from distdl.comm import Communicator, Group, IntArray, Message, Pending, Traffic
from distdl.worlds import world


@dataclass
class Entry:
    """One kind of call of one layer, as this worker saw it.

    Attributes:
        layer: path of the layer in the model, if it was given, and its name and partitions.
        operation: ``agreement`` (also values that a partition gathers), ``exchange`` (point-to-point, and what moves
            whole between two workers), ``broadcast``, ``sum`` or ``all_sum`` (in larger teams); backward counts under
            what it does (the backward of a broadcast is a sum).
        calls: how often.
        messages: point-to-point messages that this worker has sent.
        sent: bytes in them.
        collective: bytes of tensors that this worker gave to, or took from, the transport's own collectives.
        waited: seconds spent in waits.
    """

    layer: str
    operation: str
    calls: int = 0
    messages: int = 0
    sent: int = 0
    collective: int = 0
    waited: float = 0.0


class Ledger:
    """What has been recorded, in the order of first calls. Its text is a table.

    Layers outside the model count together if their names and partitions are the same.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        named = model.named_modules() if model is not None else ()
        # a layer's name is an object of its own, also if another layer's reads the same; kept, so that its id stays its
        self._paths = {id(module._name): (path, module._name) for path, module in named if hasattr(module, "_name")}
        self._entries: dict[tuple[str, str], Entry] = {}

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def entry(self, where: object, operation: str) -> Entry:
        """The entry of an operation of the layer with this name."""
        path, _ = self._paths.get(id(where), ("", None))
        layer = f"{path}: {where}" if path else str(where)
        return self._entries.setdefault((layer, operation), Entry(layer, operation))

    def json(self) -> str:
        """All entries, as a JSON list of objects."""
        return json.dumps([asdict(entry) for entry in self.entries], indent=1)

    def __str__(self) -> str:
        rows = [
            f"{'operation':10} {'calls':>7} {'messages':>9} {'bytes sent':>14} {'collective':>14} {'waited':>10}  layer"
        ]
        for one in self.entries:
            rows.append(
                f"{one.operation:10} {one.calls:7} {one.messages:9} {one.sent:14,} {one.collective:14,} "
                f"{one.waited:8.4f} s  {one.layer}"
            )
        return "\n".join(rows)


@contextmanager
def ledger(model: torch.nn.Module | None = None, comm: Communicator | None = None) -> Iterator[Ledger]:
    """Record what this worker exchanges with others inside the block; when it is not used it costs nothing.

    Args:
        model: gives the layers their paths.
        comm: what to record; by default the communicator of :func:`distdl.world`.
    """
    comm = comm or world().comm
    book = Ledger(model)
    recorder, outer = _Recorder(comm, book), dict(comm.__dict__)
    for name in recorder.methods:
        setattr(comm, name, getattr(recorder, name))
    try:
        yield book
    finally:
        for name in recorder.methods:
            if name in outer:  # of a ledger around this one
                setattr(comm, name, outer[name])
            else:
                delattr(comm, name)


class _Recorder:
    """Methods that stand in for those of a communicator, and note before they pass on."""

    methods = ("exchange", "exchange_parts", "broadcast", "sum", "all_sum", "all_gather", "all_max")

    def __init__(self, comm: Communicator, book: Ledger) -> None:
        self._comm = comm
        self._book = book
        self._current: Entry | None = None  # the collective that is being made of messages
        self._passed = {name: getattr(comm, name) for name in self.methods}

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        inside = self._current is not None
        entry = self._current or self._book.entry(self._comm.where, "exchange")
        entry.calls += not inside
        entry.messages += len(sends)
        entry.sent += sum(tensor.nbytes for _, tensor in sends)
        pending: Pending = self._passed["exchange"](sends, receives, tag)
        return pending if inside else self._timed(entry, pending)

    # (views of the parts, so that the exchange can be counted; what a wait takes is the same)
    def exchange_parts(self, traffic: Traffic, tensors: Sequence[torch.Tensor], tag: int = 0) -> Pending:
        sends, receives = traffic.messages(tensors)
        return self.exchange(sends, receives, tag)

    def broadcast(self, group: Group, tensor: torch.Tensor) -> Pending:
        return self._collective("broadcast", tensor.nbytes, lambda: self._passed["broadcast"](group, tensor))

    def sum(self, group: Group, x: torch.Tensor | None, y: torch.Tensor | None) -> Pending:
        nbytes = x.nbytes if x is not None else y.nbytes if y is not None else 0
        return self._collective("sum", nbytes, lambda: self._passed["sum"](group, x, y))

    def all_sum(self, group: Group, x: torch.Tensor, y: torch.Tensor) -> Pending:
        return self._collective("all_sum", x.nbytes, lambda: self._passed["all_sum"](group, x, y))

    def all_gather(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = self._agreement(tensor.nbytes, lambda: self._passed["all_gather"](group, tensor))
        return gathered

    def all_max(self, group: Group, words: IntArray) -> IntArray:
        highest: IntArray = self._agreement(words.nbytes, lambda: self._passed["all_max"](group, words))
        return highest

    def _agreement(self, nbytes: int, call: Callable[[], Any]) -> Any:
        if self._current is not None:
            return call()
        entry = self._book.entry(self._comm.where, "agreement")
        begun = time.perf_counter()
        result = self._inside(entry, nbytes, call)
        entry.waited += time.perf_counter() - begun
        return result

    def _collective(self, operation: str, nbytes: int, call: Callable[[], Pending]) -> Pending:
        if self._current is not None:
            return call()
        entry = self._book.entry(self._comm.where, operation)
        return self._timed(entry, self._inside(entry, nbytes, call))

    def _inside(self, entry: Entry, nbytes: int, call: Callable[[], Any]) -> Any:
        entry.calls += 1
        before, self._current = entry.messages, entry
        try:
            result = call()
        finally:
            self._current = None
        entry.collective += nbytes if entry.messages == before else 0
        return result

    def _timed(self, entry: Entry, pending: Pending) -> Pending:
        def finish() -> None:
            begun = time.perf_counter()
            self._current = entry  # an all-sum in parts sends its second round here
            try:
                pending.wait()
            finally:
                self._current = None
            entry.waited += time.perf_counter() - begun

        return Pending(finish)
