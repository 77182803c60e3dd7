"""What any line has to be, whatever passes have made of it. Tests check it after each pass."""

from __future__ import annotations

from distdl.programs.calls import Step, Value, values_in
from distdl.programs.segments import VIEWS_IN_PLACE, is_view, written


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


def assert_same_accesses(before: Step, after: Step) -> None:
    """Check that a pass has not moved a call that reads memory past one that writes there, nor two that write.

    Memory is known by how values lie in it. A pass may join reads, and drop views.

    Raises: AssertionError that names the memory by a value in it.
    """
    mine, theirs = _accesses(after), _accesses(before)
    for value, lies in before.lies.items():
        one, other = mine.get(lies.memory, ""), theirs.get(lies.memory, "")
        _claim(one == other, f"the memory of {value!r} is read and written as {one}, not as {other}")


def _accesses(step: Step) -> dict[int, str]:
    """Of each memory, in the order of the calls: w for what writes there, r for what reads, x for what may do both."""
    found: dict[int, str] = {}
    for call in step.calls:
        is_operator = call.kind == "operator"
        if is_operator and (is_view(call) or call.function in VIEWS_IN_PLACE):
            continue
        writes = set(written(call) if is_operator else values_in([one for one in call.args if type(one) is not Value]))
        for value in dict.fromkeys(call.read()):
            if value in step.lies:
                memory, how = step.lies[value].memory, "r" if value not in writes else "w" if is_operator else "x"
                before = found.get(memory, "")
                found[memory] = before if before.endswith("r") and how == "r" else before + how
    return found


def _claim(holds: bool, text: str) -> None:
    if not holds:  # no assert, which ``python -O`` leaves out
        raise AssertionError(text)
