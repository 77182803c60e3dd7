"""A compiled step's messages: time goes down, and each worker has a lane. An arrow is a message with its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distdl.drawing.moves import amount
from distdl.drawing.scene import LETTER, LINE, Arrow, Panel, Rect, Scene, composed
from distdl.programs import CompiledStep
from distdl.programs.calls import Call, Value
from distdl.programs.printing import by_worker
from distdl.programs.program import Program

_MESSAGE, _WORK, _BETWEEN = 15.0, 13.0, 118.0  # pixels: down for a message, down for operators, between two lanes
_LONGEST = 44  # letters of a name in the picture
_MOST = 240  # messages that are drawn; the text lists all


@dataclass
class _Exchange:
    """An exchange that begins, that is waited for, or both where nothing is computed between them.

    Attributes:
        before: how many operators and functions the worker calls since the exchange before.
    """

    call: Call
    begins: bool
    ends: bool
    before: int

    def messages(self, me: int) -> Iterator[tuple[int, int, int]]:
        """Sender, receiver and bytes of each message: those sent where it begins, those received where it ends."""
        if self.begins:
            yield from ((me, worker, nbytes) for worker, nbytes in by_worker(self.call.sends).items())
        if self.ends:
            yield from ((worker, me, nbytes) for worker, nbytes in by_worker(self.call.receives).items())

    @property
    def name(self) -> str:
        """Which layer it is for."""
        name = f"{self.call.path}: {self.call.label}" if self.call.path else self.call.label
        return name if self.begins else f"wait for {name}"


def of_step(step: CompiledStep) -> Scene:
    """The picture of all lines of a compiled step, one for each signature.

    Raises: ValueError if this worker has none yet, or if its calls stay as they are.
    """
    ready = [one for one in step.programs if one.line is not None]
    name = getattr(step, "__name__", "a step")
    if not ready:
        told = step.explain() if any(one.reasons for one in step.programs) else "call it three times first"
        raise ValueError(f"distdl.draw shows a compiled step once it is recorded, and {name} is not: {told}")
    return _scene(f"{name}: its messages", ready)


def of_program(program: Program) -> Scene:
    """The picture of the line of one signature.

    Raises: ValueError if there is none.
    """
    if program.line is None:
        told = "; ".join(text for text, _ in program.reasons) or "call the step three times first"
        raise ValueError(f"distdl.draw shows a program once it is a line, and this one is not: {told}")
    return _scene(f"Signature {program.number}: its messages", [program])


def _scene(title: str, programs: Sequence[Program]) -> Scene:
    panels, notes = [], ["time goes down; these are the messages of this worker, and others may send more"]
    for program in programs:
        panel, said = _panel(program)
        panels.append(panel)
        notes += said
    return composed(title, panels, notes)


def _panel(program: Program) -> tuple[Panel, list[str]]:
    """The messages of one line, and what has to be said beside them."""
    assert program.step is not None
    me = 0 if program.comm is None else program.comm.rank
    found, tail = _exchanges(program.step.calls)
    workers = sorted({me, *(worker for one in found for ends in one.messages(me) for worker in ends[:2])})
    left = max((len(_short(one.name)) for one in found), default=0) * LETTER + 34
    lanes = {worker: left + _BETWEEN * place for place, worker in enumerate(workers)}
    rects: list[Rect] = []
    arrows: list[Arrow] = []
    rows: list[str] = []
    y, most = LINE + 32, 0
    for one in found:
        messages = list(one.messages(me))
        most += len(messages)
        told = ", ".join(f"{sender} -> {receiver} {amount(nbytes, 1)}" for sender, receiver, nbytes in messages)
        rows += [_work(one.before)] if one.before else []
        rows.append(f"{one.name}: {told or 'no message'}")
        if len(arrows) + len(messages) > _MOST:
            continue
        if one.before:
            rects.append(Rect(10, y + 9, 0, 0, "words", label=_work(one.before)))
            y += _WORK
        high = _MESSAGE * max(len(messages), 1)
        rects.append(Rect(0, y + high / 2 + 4, 0, 0, "words", label=_short(one.name)))
        for place, message in enumerate(messages):
            arrows.append(_arrow(one.name, message, lanes, y + (place + 0.5) * _MESSAGE))
        y += high + 4
    if tail:
        rows.append(_work(tail))
        rects.append(Rect(10, y + 9, 0, 0, "words", label=_work(tail)))
        y += _WORK
    for worker, x in lanes.items():
        title = f"worker {worker}, whose line this is" if worker == me else f"worker {worker}"
        half = 4.5 if worker == me else 2.0
        rects.append(Rect(x - half, LINE + 26, 2 * half, y - LINE - 22, "lane", worker, "", title))
        rects.append(Rect(x - 13, LINE + 6, 26, 20, "block", worker, str(worker), title))
    caption = f"signature {program.number} on worker {me}: {program.counts}"
    said = [f"the first {len(arrows)} of {most} messages are drawn; the text lists all"] * (len(arrows) < most)
    return Panel(caption, max(lanes[workers[-1]] + 16, len(caption) * 7.6), y + 6, rects, arrows, rows), said


def _arrow(name: str, message: tuple[int, int, int], lanes: dict[int, float], y: float) -> Arrow:
    """A message as a level arrow, with its bytes beside the lane of the other worker that is not crossed."""
    sender, receiver, nbytes = message
    way = 1.0 if lanes[sender] < lanes[receiver] else -1.0
    much = amount(nbytes, 1)
    start, end = (lanes[sender] + 5 * way, y), (lanes[receiver] - 5 * way, y)
    at = lanes[receiver] - way * _BETWEEN / 2, y
    return Arrow(sender, receiver, start, end, much, f"{name}: {sender} -> {receiver}, {much}", at)


def _exchanges(calls: Sequence[Call]) -> tuple[list[_Exchange], int]:
    """The exchanges in their order, and how many operators and functions come behind the last one."""
    found: list[_Exchange] = []
    begun: dict[Value, Call] = {}
    before = 0
    for call in calls:
        if call.kind == "begin":
            begun[call.results[1]] = call
            found.append(_Exchange(call, True, False, before))
        elif call.kind == "wait":
            start = begun[call.args[0]]
            if found[-1].call is start and not before:
                found[-1].ends = True
                continue
            found.append(_Exchange(start, False, True, before))
        else:
            before += call.kind != "gradient"
            continue
        before = 0
    return [one for one in found if one.call.sends or one.call.receives], before


def _short(name: str) -> str:
    """The name as it is written beside an exchange; its tool tip and the text have the whole one."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}\u2026"


def _work(count: int) -> str:
    return "1 operator" if count == 1 else f"{count} operators"
