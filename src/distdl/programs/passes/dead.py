"""Drop operators whose results nobody reads. Messages stay, and so does what writes or draws."""

from __future__ import annotations

from dataclasses import replace

from distdl.programs.calls import Call, Step, Value, values_in


def without_dead(step: Step) -> Step:
    """The same step without operators that only give what nobody reads."""
    read: set[Value] = set(values_in(step.result))
    kept: list[Call] = []
    for call in reversed(step.calls):
        if call.writes or not read.isdisjoint(call.given()):
            kept.append(call)
            read.update(call.read())
    return replace(step, calls=kept[::-1])
