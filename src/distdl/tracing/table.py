"""The logs of workers as a table: where the time went, who waited for whom, and which exchanges cost most."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from distdl.tracing.events import pairs
from distdl.tracing.log import MESSAGES, PACK, SEND, WAIT, Log, Message

_MOST = 10


class Times(NamedTuple):
    """Seconds of one worker.

    Attributes:
        total: from the begin of the trace to its end.
        packing: before its messages are sent: copies of regions, and sums.
        sending: in calls that send.
        waiting: for messages.
    """

    worker: int
    total: float
    packing: float
    sending: float
    waiting: float

    @property
    def computing(self) -> float:
        """All the rest: torch's operators, and Python."""
        return self.total - self.packing - self.sending - self.waiting


def times(log: Log) -> Times:
    """Where the time of a worker went."""
    spent: defaultdict[str, float] = defaultdict(float)
    for one in log.slices:
        if one.row == MESSAGES:
            spent[one.name] += one.end - one.begin
    return Times(log.worker, log.end - log.begin, spent[PACK], spent[SEND], spent[WAIT])


def waits(logs: Sequence[Log]) -> dict[tuple[int, int], float]:
    """For how many seconds one worker waited for another: ``(who waited, for whom)``.

    Where a call receives from several workers, the one whose message was sent last is the one that was waited for.
    """
    calls: dict[tuple[int, float], list[tuple[Message, Message]]] = defaultdict(list)
    for sent, received in pairs(logs):
        calls[received.receiver, received.moment].append((sent, received))
    found: dict[tuple[int, int], float] = defaultdict(float)
    for ends in calls.values():
        sent, received = max(ends, key=lambda pair: pair[0].moment)
        found[received.receiver, sent.sender] += received.waited
    return dict(found)


def exchanges(logs: Iterable[Log]) -> list[tuple[str, int, int, float]]:
    """Each layer or function that exchanged: its name, calls, bytes sent and seconds of all workers; dearest first."""
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    cost: dict[str, float] = defaultdict(float)
    for log in logs:
        for one in log.slices:
            if one.row == MESSAGES:
                cost[one.where] += one.end - one.begin
                calls[one.where] += one.name == WAIT
                sent[one.where] += one.nbytes if one.name == WAIT else 0
    return sorted(((name, calls[name], sent[name], cost[name]) for name in cost), key=lambda one: -one[3])


def table(logs: Sequence[Log], accuracy: float) -> str:
    """The text of all of it.

    Args:
        accuracy: by how many seconds the clocks may be apart.
    """
    rows = [times(log) for log in logs]
    mean = sum(one.computing for one in rows) / len(rows)
    lines = ["worker     total  computing    packing    sending    waiting  load"]
    for one in rows:
        shown = "  ".join(map(_ms, (one.computing, one.packing, one.sending, one.waiting)))
        lines.append(f"{one.worker:6} {_ms(one.total)} {shown} {one.computing / mean if mean else 1:5.2f}")
    lines.append("load: computing, as a part of the mean of all workers")
    waited = sorted(waits(logs).items(), key=lambda item: -item[1])[:_MOST]
    if waited:
        lines += ["", "who waited for whom"]
        lines += [f"  worker {who} for worker {whom}: {_ms(seconds).strip()}" for (who, whom), seconds in waited]
    dearest = exchanges(logs)[:_MOST]
    if dearest:
        lines += ["", f"{'time of all':>12} {'calls':>6} {'bytes sent':>14}  exchange"]
        lines += [f"{_ms(seconds):>12} {calls:6} {sent:14,}  {name}" for name, calls, sent, seconds in dearest]
    lines += ["", f"clocks are aligned to {accuracy * 1e6:.0f} us"]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:6.2f} ms"
