"""The ledger: what this worker's layers exchange with other workers, in messages, bytes and time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from distdl.partition.arguments import checks_arguments
from distdl.transport.communicator import Communicator
from distdl.transport.label import Label
from distdl.transport.recording import Call, Recording
from distdl.workers.worlds import world


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

    Layers without a path count together if their names and partitions are the same.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def add(self, call: Call) -> None:
        """Note a call that has ended."""
        operation = "agreement" if call.operation in ("all_gather", "all_max") else call.operation
        key = (str(call.where), operation)
        entry = self._entries.setdefault(key, Entry(*key))
        entry.calls += 1
        entry.messages += len(call.sends)
        entry.sent += sum(nbytes for _, nbytes in call.sends)
        by_messages = call.sends or call.receives or call.operation == "exchange"
        entry.collective += 0 if by_messages else call.nbytes
        entry.waited += call.waited

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


@checks_arguments
@contextmanager
def ledger(model: torch.nn.Module | None = None, comm: Communicator | None = None) -> Iterator[Ledger]:
    """Record what this worker exchanges with others inside the block; when it is not used it costs nothing.

    Args:
        model: gives the layers their paths, which they keep.
        comm: what to record; by default the communicator of :func:`distdl.world`.
    """
    comm = comm or world().comm
    if model is not None:
        name_layers(model)
    book, outer = Ledger(), comm.recorder
    comm.recorder = Recording(outer or comm, book.add)
    try:
        yield book
    finally:
        comm.recorder = outer


@checks_arguments
def name_layers(model: torch.nn.Module) -> None:
    """Tell every layer of a model its path in it: errors, the ledger and a profile then say ``encoder.2.conv``, too.

    It sends no message. Every worker calls it, so that errors are the same on all of them. A layer that stands in
    several places of a model has the first of its paths.
    """
    for path, module in model.named_modules():
        label = getattr(module, "label", None)
        if isinstance(label, Label):
            label.path = path
