"""What any line has to be, whatever passes have made of it. Tests check it after each pass."""

from __future__ import annotations

from distdl.programs.calls import Step, Value, values_in


def assert_well_formed(step: Step) -> None:
    """Check that each value is given once and before it is read, and that each message that begins is waited for once.

    Raises: AssertionError that names the call.
    """
    known: set[Value] = set(step.sources)
    under_way: dict[Value, Value | None] = {}
    for place, call in enumerate(step.calls):
        where = f"call {place}, {call.kind} of {call.name}"
        for value in call.read():
            _claim(value in known, f"{where}: {value!r} is read before it is there")
        if call.kind == "wait":
            (waits,) = call.args
            _claim(waits in under_way, f"{where}: nothing that it waits for is under way")
            del under_way[waits]
        else:
            read = set(call.read())
            for arriving in under_way.values():
                _claim(arriving not in read, f"{where}: {arriving!r} is read while it is under way")
        for value in call.given():
            _claim(value not in known, f"{where}: {value!r} is given twice")
            known.add(value)
        if call.kind == "begin":
            y, waits = call.results
            under_way[waits] = y
    _claim(not under_way, f"nobody waits for {list(under_way)}")
    for value in values_in(step.result):
        _claim(value in known, f"the result {value!r} is not there")


def _claim(holds: bool, text: str) -> None:
    if not holds:  # no assert, which ``python -O`` leaves out
        raise AssertionError(text)
