"""What a report tells, in plain values: rehearsals of all workers, and a trace beside them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from distdl.environment.progress import progress
from distdl.globals.summary import suggest
from distdl.globals.summary.rehearsal import Imagined, rehearse
from distdl.globals.summary.results import GRADIENTS, Row, Suggestions, Totals
from distdl.globals.summary.summary import check_model, inputs_of, workers_of
from distdl.partition import CartesianPartition, Layout
from distdl.tracing.log import MESSAGES, MODULES, WAIT, Log
from distdl.tracing.table import Times, times


@dataclass
class Module:
    """A module of the model.

    Attributes:
        path, kind: where it is, and its class.
        rows: what each worker needs and sends for it.
        children: the modules in it.
        computed, moved: seconds that the slowest worker of a trace computed in it, and spent on its messages.
        sent: bytes that all workers of the trace sent for it.
    """

    path: str
    kind: str
    rows: dict[int, Row] = field(default_factory=dict)
    children: list[Module] = field(default_factory=list)
    computed: float = 0.0
    moved: float = 0.0
    sent: int = 0

    @property
    def row(self) -> Row:
        """That of the first worker that has one."""
        return next(iter(self.rows.values()), Row(self.path, self.kind))


@dataclass(frozen=True)
class Contents:
    """All that a report tells.

    Attributes:
        title: the class of the model.
        grid: over how many workers each dim of the input is split.
        inputs: shapes and dtypes of the inputs, and their layouts; None for one that is whole on each worker.
        root: the model; its first child may be the all-reduce of gradients.
        totals: of each worker.
        sequential: of the model on one worker.
        sends: predicted bytes from one worker to another, in a forward and backward.
        suggestions: ways to split the input, the best first; None if they were not asked for.
        measured: where the time of each worker of a trace went; None without one.
        carried: bytes from one worker to another in the trace.
    """

    title: str
    grid: tuple[int, ...]
    inputs: tuple[tuple[tuple[int, ...], torch.dtype, Layout | None], ...]
    root: Module
    totals: dict[int, Totals]
    sequential: Totals
    sends: Counter[tuple[int, int]]
    suggestions: Suggestions | None
    measured: tuple[Times, ...] | None
    carried: Counter[tuple[int, int]]

    def modules(self) -> list[Module]:
        """The model and all modules in it, in their order."""
        found, waiting = [], [self.root]
        while waiting:
            found.append(waiting.pop(0))
            waiting[:0] = found[-1].children
        return found


def gathered(
    model: torch.nn.Module,
    P: Any,
    input_shape: Any,
    dtype: torch.dtype | None,
    backward: bool,
    splits: bool,
    logs: Sequence[Log] | None,
    options: dict[str, Any],
) -> Contents:
    """Rehearse every worker of P, without memory or messages, and read a trace beside it.

    Raises: ValueError as :func:`distdl.summary` does, and for a trace of another model or other workers.
    """
    check_model(model, "report")
    workers, size, here = workers_of(P)
    inputs = inputs_of(model, input_shape, dtype)
    listed = workers.ravel().tolist()
    if logs is not None:
        _check(logs, model, listed)
    shown = progress(listed, "distdl.report: workers", here == 0)
    found = {one: rehearse(model, workers, size, one, inputs, backward, **options) for one in shown}
    alone = Totals.of(rehearse(model, np.zeros((1,), dtype=int), 1, 0, inputs, backward))
    by_path = {path: Module(path, type(one).__name__) for path, one in model.named_modules()}
    sends: Counter[tuple[int, int]] = Counter()
    for path, module in by_path.items():
        if path:
            by_path[path.rpartition(".")[0]].children.append(module)
    for worker, rehearsal in found.items():
        for row in rehearsal.rows:
            if row.path == GRADIENTS and GRADIENTS not in by_path:
                by_path[GRADIENTS] = Module(GRADIENTS, "")
                by_path[""].children.append(by_path[GRADIENTS])
            by_path[row.path].rows[worker] = row
            sends.update({(worker, other): nbytes for other, nbytes in row.sends.items()})
    if logs is not None:
        _measure(by_path, logs)
    world = CartesianPartition(Imagined(0, size), workers)
    split = tuple(
        (tuple(x.shape), x.dtype, None if x.dim() < workers.ndim else Layout.balanced(world, x.shape)) for x in inputs
    )
    return Contents(
        type(model).__name__,
        tuple(workers.shape),
        split,
        by_path[""],
        {worker: Totals.of(one) for worker, one in found.items()},
        alone,
        sends,
        suggest(model, workers.size, list(inputs), backward=backward, **options) if splits else None,
        None if logs is None else tuple(times(log) for log in logs),
        Counter() if logs is None else _carried(logs),
    )


def _check(logs: Sequence[Log], model: torch.nn.Module, workers: Sequence[int]) -> None:
    """Raises: ValueError for a trace without some of the workers, or of a model with other modules."""
    traced = {log.worker for log in logs}
    absent = sorted(set(workers) - traced)
    if absent:
        raise ValueError(
            f"report needs a trace of all workers of the partition; this one is of {len(traced)}, without worker "
            + ", ".join(map(str, absent[:16]))
        )
    known = {path for path, _ in model.named_modules()} | {type(model).__name__}
    others = [one.name for log in logs for one in log.slices if one.row == MODULES and one.name not in known]
    if others:
        raise ValueError(
            f"report needs a trace of this model; this one has a module {others[0]!r}, and this "
            f"{type(model).__name__} has none of that path: pass the same model to distdl.trace"
        )


def _measure(by_path: dict[str, Module], logs: Sequence[Log]) -> None:
    """Note in each module what the slowest worker took for it, and what was sent for it."""
    for log in logs:
        whole: defaultdict[str, float] = defaultdict(float)
        moved: defaultdict[str, float] = defaultdict(float)
        for one in log.slices:
            path = one.where.partition(": ")[0] if one.row == MESSAGES else one.name
            path = path if path in by_path else ""
            if one.row == MODULES:
                whole[path] += one.end - one.begin
            elif one.row == MESSAGES:
                moved[path] += one.end - one.begin
                by_path[path].sent += one.nbytes if one.name == WAIT else 0
        for path, module in by_path.items():
            module.computed = max(module.computed, whole[path] - moved[path])
            module.moved = max(module.moved, moved[path])


def _carried(logs: Sequence[Log]) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for log in logs:
        for one in log.received:
            found[one.sender, one.receiver] += one.nbytes
    return found
