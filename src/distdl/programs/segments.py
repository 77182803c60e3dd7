"""Segments of a step: operators between messages that a compiler takes as one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from distdl.programs.calls import Call, Lies, Step, Value, values_in

_LEAST = 4  # operators that compute: a segment of fewer costs more to call than it saves
_PLAIN = (Value, bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# of these, the other name of the operator gives a view and leaves its argument as it is
VIEWS_IN_PLACE = {
    torch.ops.aten.squeeze_.default: torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze_.dim: torch.ops.aten.squeeze.dim,
    torch.ops.aten.unsqueeze_.default: torch.ops.aten.unsqueeze.default,
    torch.ops.aten.transpose_.default: torch.ops.aten.transpose.int,
    torch.ops.aten.t_.default: torch.ops.aten.t.default,
}


class Segment(NamedTuple):
    """Operators that follow each other.

    Attributes:
        takes: the values that they read and do not give.
        gives: those that they give and that others read: none of them is a view of another value.
        behind: calls that make the views which others read, out of what it takes and gives.
    """

    calls: list[Call]
    takes: list[Value]
    gives: list[Value]
    behind: list[Call]


def segmented(step: Step, compiled: Callable[[Segment], Callable[..., Any] | None]) -> Step:
    """The same step, in which each segment is one call.

    Args:
        compiled: makes a function of a segment, which takes and gives what the segment does; None leaves it as it is.
    """
    calls: list[Call] = []
    for run, after in _runs(step):
        found = _segment(run, after, step) if isinstance(run, list) else None
        function = None if found is None else compiled(found)
        if found is None or function is None:
            calls += run if isinstance(run, list) else [run]
            continue
        first = found.calls[0]
        calls.append(
            Call("function", function, tuple(found.takes), {}, tuple(found.gives), path=first.path, line=first.line)
        )
        calls += found.behind
    return replace(step, calls=calls)


def _runs(step: Step) -> Iterator[tuple[list[Call] | Call, set[Value]]]:
    """Runs of operators that fit into a segment, and all other calls; each with the values that are read behind it."""
    grouped: list[list[Call] | Call] = []
    run: _Run | None = None
    for call in map(_without_views_in_place, step.calls):
        if _fits(call, step.lies):
            if run is None or not run.takes(call):
                run = _Run(step.lies)
                grouped.append(run.calls)
                if not run.takes(call):
                    grouped[-1], run = call, None
            continue
        grouped.append(call)
        run = None
    read = set(values_in(step.result))
    behind: list[set[Value]] = []
    for one in reversed(grouped):
        behind.append(set(read))
        for call in one if isinstance(one, list) else [one]:
            read.update(call.read())
    yield from zip(grouped, reversed(behind), strict=True)


def _without_views_in_place(call: Call) -> Call:
    view = VIEWS_IN_PLACE.get(call.function) if call.kind == "operator" else None
    return call if view is None else replace(call, function=view, writes=False)


def _fits(call: Call, lies: dict[Value, Lies]) -> bool:
    """Whether a compiler can take a call: an operator on tensors and numbers that draws nothing."""
    if call.kind != "operator" or torch.Tag.nondeterministic_seeded in call.function.tags:
        return False
    if torch.Tag.inplace_view in call.function.tags or not _is_plain((call.args, list(call.kwargs.values()))):
        return False
    known = all(value in lies for value in (*call.read(), *call.given()))
    if not known or any(lies[value].dtype.is_complex for value in (*call.read(), *call.given())):
        return False
    if is_view(call):
        return True
    given = [lies[value] for value in call.given()]
    memories = {one.memory for one in given} | {lies[value].memory for value in call.read()}
    return not any(one.offset for one in given) and len(memories) >= len(given) + len(
        {lies[value].memory for value in call.read()}
    )


def _is_plain(structure: Any) -> bool:
    if type(structure) in (tuple, list):
        return all(map(_is_plain, structure))
    return type(structure) in _PLAIN


def is_view(call: Call) -> bool:
    """Whether what an operator gives lies in the memory of what it takes."""
    schema = call.function._schema
    return not schema.is_mutable and any(one.alias_info is not None for one in schema.returns)


def written(call: Call) -> Iterator[Value]:
    """The values into which an operator writes."""
    for place, argument in enumerate(call.function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = call.args[place] if place < len(call.args) else call.kwargs.get(argument.name)
            yield from values_in(given)


class _Run:
    """Operators of which none writes into memory that comes in as two values: a compiler would not know it."""

    def __init__(self, lies: dict[Value, Lies]) -> None:
        self.calls: list[Call] = []
        self._lies = lies
        self._made: set[Value] = set()
        self._from_outside: dict[int, set[Value]] = {}
        self._written: set[int] = set()

    def takes(self, call: Call) -> bool:
        """Take one more call, if it may."""
        memories = self._written | {self._lies[value].memory for value in written(call)}
        outside = {memory: set(ones) for memory, ones in self._from_outside.items()}
        for value in call.read():
            if value not in self._made:
                outside.setdefault(self._lies[value].memory, set()).add(value)
        if any(len(outside.get(memory, ())) > 1 for memory in memories):
            return False
        self._written, self._from_outside = memories, outside
        self._made.update(call.given())
        self.calls.append(call)
        return True


def _segment(calls: list[Call], after: set[Value], step: Step) -> Segment | None:
    """The segment that a run of operators is; None if it is too short."""
    if sum(not is_view(call) for call in calls) < _LEAST:
        return None
    giver = {value: call for call in calls for value in call.given()}
    takes = list(dict.fromkeys(value for call in calls for value in call.read() if value not in giver))
    gives: dict[Value, None] = {}
    views: list[Call] = []
    asked = [value for value in giver if value in after]
    while asked:
        value = asked.pop()
        call = giver.get(value)
        if call is None:  # it comes from outside
            continue
        if not is_view(call):
            gives[value] = None
        elif not any(call is one for one in views):
            views.append(call)
            asked += call.read()
    behind = [call for call in calls if any(call is one for one in views)]
    return Segment(calls, takes, list(gives), behind)
