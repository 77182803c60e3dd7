"""The results of ``summary`` and ``suggest``: values that print as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from distdl.partition import Layout

GRADIENTS = "(gradients of weights)"


@dataclass
class Row:
    """What one module needs and sends on one worker; the modules in it have rows of their own.

    Attributes:
        path, kind: where in the model it is, and its class.
        shape: the global shape of its first result in its last call; None if that is no global tensor.
        layout, split, block: of that result: its layout, how many workers split each dim, this worker's block's shape.
        activations: bytes that it saves for backward, without those that another module saved before.
        weights: bytes of its parameters and buffers.
        forward, backward, sends: how many messages this worker sends, and their bytes; and the bytes by receiver.
        moves: bytes sent in forward, by torch function.
        redistributes: torch functions whose result is split otherwise than their first argument, with both grids.
        falls_back: torch functions that run on one worker, with the bytes of the tensors that are gathered there.
    """

    path: str
    kind: str
    layout: Layout | None = field(default=None, compare=False)
    shape: tuple[int, ...] | None = None
    split: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    activations: int = 0
    weights: int = 0
    forward: tuple[int, int] = (0, 0)
    backward: tuple[int, int] = (0, 0)
    sends: Counter[int] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    redistributes: dict[str, str] = field(default_factory=dict)
    falls_back: Counter[str] = field(default_factory=Counter)

    @property
    def works(self) -> bool:
        """Whether the module needs or sends anything by itself."""
        return bool(self.weights or self.activations or self.moves or self.backward[0] or self.falls_back)

    @property
    def notes(self) -> tuple[str, ...]:
        """The last column of the table: functions that fall back, redistribute or send."""
        notes = [f"{name} runs on one worker ({in_bytes(n)}): no op" for name, n in self.falls_back.items()]
        notes += [f"{name} redistributes {grids}" for name, grids in self.redistributes.items()]
        known = {*self.falls_back, *self.redistributes}
        return (*notes, *(f"{name} sends {in_bytes(n)}" for name, n in self.moves.items() if name not in known))


@dataclass
class Rehearsal:
    """What a model needs and sends on one worker.

    Attributes:
        rows: the modules, and behind them the all-reduce of gradients of replicated weights.
        peak: the most bytes of tensors that the worker holds at once: weights, activations, gradients and messages.
    """

    rows: list[Row]
    peak: int


_COUNTED = (
    "peak counts the tensors of one forward and backward: inputs, weights, their gradients, activations and messages; "
    "it does not count the loss, the optimiser's state, what torch's operators use inside, and freed memory that the "
    "process keeps"
)


@dataclass(frozen=True)
class Totals:
    """What a whole forward and backward needs and sends on one worker.

    Attributes:
        peak: the most bytes of tensors that it holds at once: weights and their gradients, activations, messages.
        weights: bytes of parameters and buffers.
        activations: bytes that are saved for backward.
        forward, backward: how many messages it sends, and their bytes.
    """

    peak: int
    weights: int
    activations: int
    forward: tuple[int, int]
    backward: tuple[int, int]

    @classmethod
    def of(cls, rehearsal: Rehearsal) -> Totals:
        rows = rehearsal.rows

        def added(name: str) -> tuple[int, int]:
            return sum(getattr(row, name)[0] for row in rows), sum(getattr(row, name)[1] for row in rows)

        return cls(
            rehearsal.peak,
            sum(row.weights for row in rows),
            sum(row.activations for row in rows),
            added("forward"),
            added("backward"),
        )


@dataclass(frozen=True)
class Summary:
    """What each module of a model needs and sends on one worker. Its text is a table.

    Attributes:
        worker: the number of the worker.
        grid: over how many workers each dim of the input is split.
        rows: the modules that need or send anything by themselves, and the all-reduce of gradients.
        totals: the sums over this worker's modules.
        sequential: the same for the model on one worker.
    """

    worker: int
    grid: tuple[int, ...]
    rows: tuple[Row, ...]
    totals: Totals
    sequential: Totals

    @property
    def falls_back(self) -> tuple[Row, ...]:
        """The modules with functions that run on one worker."""
        return tuple(row for row in self.rows if row.falls_back)

    def __str__(self) -> str:
        head = ["module", "output", "split", "block", "activations", "weights", "forward", "backward", ""]
        cells = [
            [
                f"{row.path or '(model)'} {'' if row.path == GRADIENTS else row.kind}".rstrip(),
                shown(row.shape),
                shown(row.split),
                shown(row.block),
                in_bytes(row.activations),
                in_bytes(row.weights),
                _sent(row.forward),
                _sent(row.backward),
                "; ".join(row.notes),
            ]
            for row in self.rows
        ]
        for name, one in ((f"worker {self.worker}", self.totals), ("sequential", self.sequential)):
            own = [f"{name}, peak {in_bytes(one.peak)}", "", "", "", in_bytes(one.activations), in_bytes(one.weights)]
            cells.append([*own, _sent(one.forward), _sent(one.backward), ""])
        widths = [max(len(line[place]) for line in (head, *cells)) for place in range(len(head))]
        left = {0, len(head) - 1}

        def line(values: Sequence[str]) -> str:
            return "  ".join(
                value.ljust(width) if place in left else value.rjust(width)
                for place, (value, width) in enumerate(zip(values, widths, strict=True))
            ).rstrip()

        ruler = "-" * min(sum(widths) + 2 * len(widths), 120)
        return "\n".join([line(head), ruler, *map(line, cells[:-2]), ruler, *map(line, cells[-2:]), _COUNTED])


@dataclass(frozen=True)
class Suggestion:
    """A way to split a model's input.

    Attributes:
        grid: over how many workers each dim of the input is split.
        peak: the most bytes of tensors that a worker holds at once.
        sent: the most bytes that a worker sends in a forward and backward.
        falls_back: functions that run on one worker.
        error: why the model cannot be split so; empty if it can.
    """

    grid: tuple[int, ...]
    peak: int
    sent: int
    falls_back: tuple[str, ...] = ()
    error: str = ""


class Suggestions(tuple[Suggestion, ...]):
    """Ways to split a model's input, the best first. Its text is a table."""

    def __str__(self) -> str:
        rows = [f"{'split':>14} {'peak':>10} {'sent':>10}"]
        for one in self:
            if one.error:
                rows.append(f"{shown(one.grid):>14} {'-':>10} {'-':>10}  {one.error}")
                continue
            told = f"  on one worker: {', '.join(one.falls_back)}" if one.falls_back else ""
            rows.append(f"{shown(one.grid):>14} {in_bytes(one.peak):>10} {in_bytes(one.sent):>10}{told}")
        return "\n".join(rows)


def shown(shape: Sequence[int] | None) -> str:
    return "-" if shape is None else "x".join(map(str, shape)) or "()"


def _sent(counted: tuple[int, int]) -> str:
    messages, nbytes = counted
    return f"{messages} of {in_bytes(nbytes)}" if messages else "-"


def in_bytes(n: int) -> str:
    """A number of bytes with three digits and a unit; ``-`` for none."""
    if not n:
        return "-"
    if n < 10000:
        return f"{n} B"
    size, unit = next(((n / k, unit) for k, unit in ((2**30, "GiB"), (2**20, "MiB")) if n >= k), (n / 2**10, "KiB"))
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
