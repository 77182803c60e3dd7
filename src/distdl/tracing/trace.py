"""``distdl.trace``: a context that logs what every worker does, and writes it to one file."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from distdl.partition.arguments import checks_arguments
from distdl.tracing.clocks import align
from distdl.tracing.events import events
from distdl.tracing.log import Log, Messages, Modules, Operators
from distdl.tracing.table import table
from distdl.transport.communicator import Communicator
from distdl.workers.ledger import name_layers
from distdl.workers.worlds import world


class Trace:
    """What a trace has found; complete when its context has ended. Its text is a table.

    Attributes:
        logs: of all workers, on worker 0's clock.
        accuracy: by how many seconds the clocks of two workers may still be apart.
    """

    def __init__(self) -> None:
        self.logs: list[Log] = []
        self.accuracy = 0.0

    def __str__(self) -> str:
        return table(self.logs, self.accuracy) if self.logs else "a trace that has not ended"


@checks_arguments
@contextmanager
def trace(
    path: str | os.PathLike[str], model: torch.nn.Module | None = None, operators: bool = True
) -> Iterator[Trace]:
    """Log what every worker of :func:`distdl.world` does and waits for inside the block, and write one file.

    Perfetto (ui.perfetto.dev) and chrome://tracing open the file. Each worker is a process in it, with a row for
    modules, one for torch's operators and one for messages; arrows lead from each message's send to its receive. When
    the context has ended, ``print`` what it gave for a table: how long each worker computed, packed, sent and waited,
    who waited for whom, and which exchanges cost most. While no trace is open, it costs nothing.

    Every worker opens and closes it; both are collective. Clocks of processes are aligned by messages between each
    worker and worker 0, at the beginning and at the end. Operators are logged when they are called: on a GPU, which
    computes on while Python goes ahead, that is when they are launched.

    Args:
        path: of the file, which worker 0 writes; compressed if it ends with ``.gz``.
        model: gives modules, operators and messages their paths.
        operators: whether each operator of torch is logged, which costs some microseconds each.
    Raises: OSError, on every worker, if worker 0 cannot write the file, mostly before anything runs. An error inside of
        the block goes on, and nothing is written.
    """
    P, found = world(), Trace()
    comm = P.comm
    log = Log(comm.rank)
    try:  # from here on, as another worker may fail as soon as worker 0 has opened the file
        _check(P.broadcast_data(_problem(Path(path)) if comm.rank == 0 else None), path)
        first = align(comm)
        with _logged(comm, log, model, operators):
            log.begin = time.perf_counter()
            yield found
            log.end = time.perf_counter()
        encoded = P.allgather_data(log.encoded())
    except BaseException:
        if comm.rank == 0 and _is_empty(Path(path)):
            Path(path).unlink()
        raise
    alignments = P.allgather_data((log.begin, *first, time.perf_counter(), *align(comm)))
    found.logs = [_shifted(Log.decoded(text), alignment) for text, alignment in zip(encoded, alignments, strict=True)]
    found.accuracy = max(max(one[2], one[5]) for one in alignments)
    _check(P.broadcast_data(_write(Path(path), events(found.logs)) if comm.rank == 0 else None), path)


@contextmanager
def _logged(comm: Communicator, log: Log, model: torch.nn.Module | None, operators: bool) -> Iterator[None]:
    with ExitStack() as stack:
        attribution = None
        if model is not None:
            name_layers(model)
            attribution = stack.enter_context(Modules(model, log).attribution)
        messages, recorder, watch = Messages(comm.through, log, attribution), comm.recorder, comm.watch
        comm.recorder, comm.watch = messages, _both(watch, messages)
        stack.callback(setattr, comm, "recorder", recorder)
        stack.callback(setattr, comm, "watch", watch)
        if operators:
            stack.enter_context(Operators(log))
        yield


def _both(watch: Callable[..., None] | None, messages: Messages) -> Callable[..., None]:
    def begins(*what: Any) -> None:
        if watch is not None:
            watch(*what)
        messages.operator_begins()

    return begins


def _shifted(log: Log, alignment: tuple[float, float, float, float, float, float]) -> Log:
    """The log on worker 0's clock.

    Args:
        alignment: a moment of the worker's clock, what was to be added to it then, and how far off that may be; and the
            same later. Between them, clocks are taken to run evenly.
    """
    before, offset, _, after, later, _ = alignment
    drift = (later - offset) / (after - before) if after > before else 0.0

    def moved(moment: float) -> float:
        return moment + offset + drift * (moment - before)

    return Log(
        log.worker,
        moved(log.begin),
        moved(log.end),
        [one._replace(begin=moved(one.begin), end=moved(one.end)) for one in log.slices],
        [one._replace(moment=moved(one.moment)) for one in log.sent],
        [one._replace(moment=moved(one.moment)) for one in log.received],
    )


def _check(problem: str | None, path: str | os.PathLike[str]) -> None:
    if problem is not None:
        raise OSError(f"worker 0 cannot write the trace {os.fspath(path)!r}: {problem}")


def _problem(path: Path) -> str | None:
    try:
        with path.open("ab"):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _write(path: Path, found: list[dict[str, Any]]) -> str | None:
    """Write the file, or tell why not."""
    content = json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}).encode()
    try:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _is_empty(path: Path) -> bool:
    return path.exists() and not path.stat().st_size
