"""The logs of workers as events of Chrome's trace format, which Perfetto reads, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distdl.tracing.log import MESSAGES, MODULES, OPERATORS, Log, Message

_ROWS = {MODULES: 1, OPERATORS: 2, MESSAGES: 3}


def events(logs: Sequence[Log]) -> list[dict[str, Any]]:
    """One process for each worker, a thread for each row, a slice for each thing done, an arrow for each message."""
    zero = min(log.begin for log in logs)

    def moment(seconds: float) -> float:
        return round((seconds - zero) * 1e6, 3)

    def length(begin: float, end: float) -> float:
        return max(round(moment(end) - moment(begin) - 0.001, 3), 0.0)  # viewers nest slices that touch

    found: list[dict[str, Any]] = []
    for log in logs:
        named = {"ph": "M", "pid": log.worker}
        found.append({**named, "name": "process_name", "args": {"name": f"worker {log.worker}"}})
        found.append({**named, "name": "process_sort_index", "args": {"sort_index": log.worker}})
        for row, number in _ROWS.items():
            found.append({**named, "name": "thread_name", "tid": number, "args": {"name": row}})
            found.append({**named, "name": "thread_sort_index", "tid": number, "args": {"sort_index": number}})
        for one in log.slices:
            found.append({
                "ph": "X", "pid": log.worker, "tid": _ROWS[one.row], "cat": one.row,
                "name": f"{one.name}: {one.where}" if one.where else one.name,
                "ts": moment(one.begin), "dur": length(one.begin, one.end),
                "args": {"bytes": one.nbytes} if one.nbytes else {},
            })  # fmt: skip
    for number, (sent, received) in enumerate(pairs(logs)):
        arrow = {
            "cat": "message",
            "name": "message",
            "id": number,
            "tid": _ROWS[MESSAGES],
            "args": {"bytes": sent.nbytes},
        }
        found.append({**arrow, "ph": "s", "pid": sent.sender, "ts": moment(sent.moment)})
        found.append({**arrow, "ph": "f", "bp": "e", "pid": received.receiver, "ts": moment(received.moment)})
    return found


def pairs(logs: Sequence[Log]) -> list[tuple[Message, Message]]:
    """Both ends of each message that was sent and received while the trace was open."""
    arrived = {one[:4]: one for log in logs for one in log.received}
    return [(one, arrived[one[:4]]) for log in logs for one in log.sent if one[:4] in arrived]
