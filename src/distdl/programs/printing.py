"""A recorded step as text that a person can read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from distdl.programs.calls import Call, Step, Value
from distdl.programs.counts import Counts


def shown(step: Step, title: str) -> str:
    """A step as Python: modules as comments, and behind each line the shapes of its results, and messages."""
    return "\n".join([f"# {title}: {Counts.of(step)}", *_lines(step)])


def _lines(step: Step) -> Iterator[str]:
    names = _Names(step)
    path = None
    for call in step.calls:
        if call.path != path and call.kind != "gradient":
            path = call.path
            yield f"# {path or 'outside of all modules'}"
        text = _statement(call, names)
        told = _told(call)
        yield f"{text}  # {told}" if told else text
    yield f"return {_text(step.result, names)}"


class _Names(dict[Value, str]):
    """The names of values: where those from outside come from, and ``v0``, ``v1``, ... in the order of the text."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._count, constants = 0, 0
        for value, source in step.sources.items():
            self[value] = source.name.replace(" ", "_")
            if source.kind == "constant":
                self[value] = f"constant_{constants}"
                constants += 1

    def __missing__(self, value: Value) -> str:
        name = self[value] = f"v{self._count}"
        self._count += 1
        return name


def _statement(call: Call, names: _Names) -> str:
    if call.kind == "wait":
        return f"{_text(call.args[0], names)}.wait()"
    if call.kind == "gradient":
        return f"{call.path}.grad = {_text(call.args[0], names)}"
    given = [_text(one, names) for one in call.args] + [f"{k}={_text(v, names)}" for k, v in call.kwargs.items()]
    stem = call.name.removesuffix(".default") if call.kind == "operator" else call.name.rpartition(".")[2]
    text = f"{stem}({', '.join(given)})"
    if call.kind == "begin":
        text = f"begin({call.label!r}, {', '.join(given)})"
        return f"{_text(call.results[0], names)}, {_text(call.results[1], names)} = {text}"
    return f"{_text(call.results, names)} = {text}" if list(call.given()) else text


def _told(call: Call) -> str:
    if call.kind == "begin":
        sends, receives = by_worker(call.sends), by_worker(call.receives)
        told = [f"{n} bytes to worker {worker}" for worker, n in sends.items()]
        told += [f"{n} bytes from worker {worker}" for worker, n in receives.items()]
        return ", ".join(told) or "no message"
    shapes = [f"{'x'.join(map(str, shape)) or 'a number'}" for shape, _ in call.shapes.values()]
    return ", ".join(shapes)


def by_worker(messages: list[tuple[int, int]]) -> Counter[int]:
    """The bytes of messages, by the worker at the other end."""
    found: Counter[int] = Counter()
    for worker, nbytes in messages:
        found[worker] += nbytes
    return found


def _text(one: Any, names: _Names) -> str:
    kind = type(one)
    if kind is Value:
        return names[one]
    if kind in (tuple, list):
        inside = ", ".join(_text(item, names) for item in one)
        return f"[{inside}]" if kind is list else f"({inside}{',' if len(one) == 1 else ''})"
    if one is None or kind in (bool, int, float, str):
        return repr(one)
    if kind in (torch.dtype, torch.device):
        return str(one)
    return f"<{kind.__name__}>" if not hasattr(one, "__name__") else str(one.__name__)
