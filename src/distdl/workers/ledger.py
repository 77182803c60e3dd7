"""The ledger: what this worker's layers exchange, in messages, bytes and time, and how long modules compute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import torch

from distdl.partition.arguments import checks_arguments
from distdl.transport.communicator import Communicator
from distdl.transport.label import Label
from distdl.transport.recording import Call, Recording
from distdl.workers.attribution import Attribution, Owner
from distdl.workers.worlds import world

_COMPUTE = "compute"


@dataclass
class Entry:
    """One kind of call of one layer, as this worker saw it.

    Attributes:
        layer: path in the model, if it was given, of the layer or of the module that has called it; and its name and
            partitions.
        operation: ``agreement`` (also values that a partition gathers), ``exchange`` (point-to-point, and what moves
            whole between two workers), ``broadcast``, ``sum`` or ``all_sum`` (in larger teams); backward counts under
            what it does (the backward of a broadcast is a sum). Or ``compute``, of a module itself.
        calls: how often.
        messages: point-to-point messages that this worker has sent.
        sent: bytes in them.
        collective: bytes of tensors that this worker gave to, or took from, the transport's own collectives.
        waited: seconds spent in waits.
        computed: seconds in forward and backward of the module that were no waits, without the modules inside it.
    """

    layer: str
    operation: str
    calls: int = 0
    messages: int = 0
    sent: int = 0
    collective: int = 0
    waited: float = 0.0
    computed: float = 0.0

    def compute(self, seconds: float) -> None:
        """Note that the module has computed."""
        self.computed += seconds


class Ledger:
    """What has been recorded, in the order of first calls. Its text is a table.

    Layers without a path count together if their names and partitions are the same.

    Args:
        model: whose modules' paths are said, and whose time is taken, while ``attribution`` is open.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}
        paths = {} if model is None else {module: path for path, module in model.named_modules()}
        self._paths = set(paths.values())
        self._outside = Entry("outside of the model", _COMPUTE)
        outside = Owner("", self._outside.compute)
        self.attribution = None if model is None else Attribution(paths, self._called, outside)

    @property
    def entries(self) -> list[Entry]:
        """What layers have exchanged."""
        return [entry for entry in self._entries.values() if entry.operation != _COMPUTE]

    @property
    def modules(self) -> list[Entry]:
        """How long each module of the model that was given has computed, and last this worker outside of them."""
        own = [entry for entry in self._entries.values() if entry.operation == _COMPUTE]
        return [] if self.attribution is None else [*own, self._outside]

    def begin(self, call: Call) -> None:
        """Note for which module a call is that begins."""
        path = "" if self.attribution is None else self.attribution.path
        text = str(call.where)
        said, colon, _ = text.partition(": ")
        call.where = text if not path or (colon and said in self._paths) else f"{path}: {text}"

    def add(self, call: Call) -> None:
        """Note a call that has ended."""
        if self.attribution is not None:
            self.attribution.waited(call.waited)
        operation = "agreement" if call.operation in ("all_gather", "all_max") else call.operation
        entry = self._entry(str(call.where), operation)
        entry.calls += 1
        entry.messages += len(call.sends)
        entry.sent += sum(nbytes for _, nbytes in call.sends)
        by_messages = call.sends or call.receives or call.operation == "exchange"
        entry.collective += 0 if by_messages else call.nbytes
        entry.waited += call.waited

    def _called(self, module: torch.nn.Module, path: str) -> Owner:
        kind = type(module).__name__
        entry = self._entry(f"{path}: {kind}" if path else kind, _COMPUTE)
        entry.calls += 1
        return Owner(path, entry.compute)

    def _entry(self, layer: str, operation: str) -> Entry:
        return self._entries.setdefault((layer, operation), Entry(layer, operation))

    def json(self) -> str:
        """All entries and modules, as a JSON list of objects."""
        return json.dumps([asdict(entry) for entry in self._all()], indent=1)

    def _all(self) -> list[Entry]:
        return list(self._entries.values()) + self.modules[-1:]

    def __str__(self) -> str:
        rows = [
            f"{'operation':10} {'calls':>7} {'messages':>9} {'bytes sent':>14} {'collective':>14} {'waited':>10} "
            f"{'computed':>10}  layer"
        ]
        for one in self._all():
            sent = f"{one.messages:9} {one.sent:14,} {one.collective:14,} {one.waited:8.4f} s {'':10}"
            if one.operation == _COMPUTE:
                sent = f"{'':50} {one.computed:8.4f} s"
            rows.append(f"{one.operation:10} {one.calls:7} {sent}  {one.layer}")
        return "\n".join(rows)


@checks_arguments
@contextmanager
def ledger(model: torch.nn.Module | None = None, comm: Communicator | None = None) -> Iterator[Ledger]:
    """Record what this worker exchanges with others inside the block; when it is not used it costs nothing.

    Times are those of the clock: on a GPU, which computes on while Python goes ahead, and of threads that share an
    interpreter they say less than on processes.

    Args:
        model: gives the layers their paths, which they keep. Of it the ledger says, too, how long each module computes,
            and which one has called what a distributed model exchanges.
        comm: what to record; by default the communicator of :func:`distdl.world`.
    """
    comm = comm or world().comm
    if model is not None:
        name_layers(model)
    book, outer = Ledger(model), comm.recorder
    with ExitStack() as stack:
        if book.attribution is not None:
            stack.enter_context(book.attribution)
        comm.recorder = Recording(outer or comm, book.add, book.begin)
        stack.callback(setattr, comm, "recorder", outer)
        yield book


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
