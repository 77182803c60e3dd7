"""The logs of workers from a file that ``distdl.trace`` has written."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

from distdl.tracing.log import MESSAGES, Log, Message, Slice


def read(path: str | os.PathLike[str]) -> list[Log]:
    """The logs of all workers. Each begins with its first event and ends with its last one.

    Raises: OSError if the file cannot be read; ValueError if ``distdl.trace`` has not written it.
    """
    content = Path(path).read_bytes()
    try:
        events = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)["traceEvents"]
        return _logs(events)
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise ValueError(f"{os.fspath(path)!r} is no trace that distdl.trace has written: {error!r}") from error


def _logs(events: list[dict[str, Any]]) -> list[Log]:
    logs = {one["pid"]: Log(one["pid"]) for one in events}
    ends: dict[int, dict[str, Any]] = {}
    for one in events:
        log, nbytes = logs[one["pid"]], one.get("args", {}).get("bytes", 0)
        if one["ph"] == "X":
            begin, is_message = one["ts"] / 1e6, one["cat"] == MESSAGES
            name, _, where = one["name"].partition(": ") if is_message else (one["name"], "", "")
            log.slices.append(Slice(one["cat"], name, begin, begin + one["dur"] / 1e6, where, nbytes))
        elif one["ph"] == "s":
            ends[one["id"]] = one
        elif one["ph"] == "f":
            sent = ends[one["id"]]
            both = sent["pid"], one["pid"], one["id"], nbytes
            logs[sent["pid"]].sent.append(Message(*both, sent["ts"] / 1e6, 0.0, ""))
            log.received.append(Message(*both, one["ts"] / 1e6, 0.0, ""))
    for log in logs.values():
        log.begin = min((one.begin for one in log.slices), default=0.0)
        log.end = max((one.end for one in log.slices), default=0.0)
    return [logs[worker] for worker in sorted(logs)]
