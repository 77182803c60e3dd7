"""Who sends what to whom: the workers of x in one column, those of y in another, and an arrow for each pair.

A block of a tensor that is split is drawn where it lies in the tensor. What arrives has the colour of its sender; where
several are added, there is a stripe of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distdl.drawing.moves import Flow, amount, flows, held, words
from distdl.drawing.scene import LINE, Arrow, Panel, Point, Rect, with_amounts
from distdl.geometry.boxes import Box, hull, whole
from distdl.partition import Layout
from distdl.plan import Plan

_NAME, _SPAN, _WIDE, _HIGH, _CELL = 34.0, 130.0, 68.0, 50.0, 18.0
_LANE, _BETWEEN = 34.0, 10.0  # least height for a worker; gap between groups of workers that exchange nothing
_MOST = 72  # arrows; of more, only those of one worker are drawn


@dataclass(frozen=True)
class Movement:
    """A plan, and how x and y are split where they are parts of one tensor.

    Attributes:
        known: whether the shapes of the tensors are known.
        names: of x and y.
    """

    plan: Plan
    source: Layout | None = None
    target: Layout | None = None
    known: bool = True
    names: tuple[str, str] = ("x", "y")

    @property
    def T(self) -> Movement:
        """The adjoint: both ends swapped."""
        return Movement(self.plan.T, self.target, self.source, self.known, (f"∂{self.names[1]}", f"∂{self.names[0]}"))


def lanes(movement: Movement, caption: str, itemsize: int | None) -> tuple[Panel, list[str]]:
    """The picture of a movement.

    Args:
        itemsize: bytes of an element; None if that is not known.
    Returns: the panel, and what has to be said beside it.
    """
    return _Lanes(movement, itemsize).panel(caption)


class _Lanes:
    def __init__(self, movement: Movement, itemsize: int | None) -> None:
        plan, self.movement, self.itemsize = movement.plan, movement, itemsize
        self.flows, self.layouts = flows(plan.all_moves()), (movement.source, movement.target)
        self.boxes: tuple[dict[int, Box], dict[int, Box]] = ({}, {})
        for flow in self.flows:  # a plan for one worker has no shapes of the others
            for side, worker in enumerate((flow.source, flow.target)):
                pieces = [piece[side] for piece in flow.pieces]
                self.boxes[side][worker] = hull([self.boxes[side].get(worker, pieces[0]), *pieces])
        for side, (layout, shapes) in enumerate(zip(self.layouts, (plan.inputs, plan.outputs), strict=True)):
            self.boxes[side].update({w: whole(s) if layout is None else layout[w] for w, s in shapes.items()})
        split = {d for one in self.layouts if one for d, n in enumerate(one.partition.workers.shape) if n > 1}
        rank = max((len(box) for side in self.boxes for box in side.values()), default=0)
        self.face = sorted(sorted(range(rank), key=lambda dim: (dim in split, dim))[-2:])
        self.hidden = sorted(split - set(self.face))
        ends = [self._frame(side, worker) for side in (0, 1) for worker in self.boxes[side]]
        down, across = (max((box[dim][1] for box in ends), default=1) or 1 for dim in (0, 1))
        scale = min(_HIGH / down, _WIDE / across, _CELL)
        self.scales = max(scale, min(_CELL, 24 / down)), max(scale, min(_CELL, 24 / across))
        self.height = down * self.scales[0]

    def panel(self, caption: str) -> tuple[Panel, list[str]]:
        middles, bottom = self._middles()
        rects: list[Rect] = []
        ends: tuple[dict[int, Point], dict[int, Point]] = ({}, {})
        for side, name in enumerate(self.movement.names):
            left = _NAME + side * (_WIDE + _SPAN)
            rects.append(Rect(left + (_WIDE - 8) * (1 - side), LINE + 14, 0, 0, "words", label=name))
            for worker, middle in middles[side].items():
                width = self._frame(side, worker)[1][1] * self.scales[1]
                x = left + (_WIDE - width) * (1 - side)
                drawn = list(self._thumb(side, worker, x, middle))
                beside = x + width + 8 if side else x - 33
                rects += [*drawn, Rect(beside, middle - 4.5, 9, 9, "piece", worker)]
                rects.append(Rect(beside + 13, middle + 4, 0, 0, "words", label=str(worker)))
                block = drawn[-1]
                ends[side][worker] = block.x + (-4 if side else block.width + 3), block.middle[1]
        arrows = [self._arrow(flow, ends[0][flow.source], ends[1][flow.target]) for flow in self.flows]
        rows, first = [arrow.title for arrow in arrows], self.flows[0].source if self.flows else 0
        notes = ["numbers are workers; colours tell whose cells they are; +: what is added up"]
        own = [arrow for arrow in arrows if first in (arrow.source, arrow.target)]
        if len(arrows) > _MOST and len(own) < len(arrows):
            arrows = own
            notes.append(f"of {len(rows)} arrows, those of worker {first} are drawn; the text lists them")
        if any(arrow.stays for arrow in arrows):
            notes.append("dashed: what a worker has already")
        if self.hidden:
            notes.append(f"split, and not drawn: dim {', '.join(map(str, self.hidden))}")
        width = 2 * (_NAME + _WIDE) + _SPAN
        arrows, said = with_amounts(arrows, [rect for rect in rects if rect.kind != "words"], width)
        return Panel(caption, width, bottom, rects, arrows, rows), [*said, *notes]

    def _middles(self) -> tuple[tuple[dict[int, float], dict[int, float]], float]:
        """Where the middle of each lane is, and where the last one ends: workers that meet stand together."""
        party = {(side, worker): worker for side in (0, 1) for worker in self.boxes[side]}
        before: object = None
        while before != party:
            before = dict(party)
            for flow in self.flows:
                ends = (0, flow.source), (1, flow.target)
                party.update(dict.fromkeys(ends, min(party[end] for end in ends)))
        top, lane = LINE + 22, max(self.height + 10, _LANE)
        found: tuple[dict[int, float], dict[int, float]] = ({}, {})
        for one in sorted(set(party.values())):
            sides = [sorted(w for (side, w), other in party.items() if (side, other) == (now, one)) for now in (0, 1)]
            longest = max(map(len, sides)) * lane
            for side, workers in enumerate(sides):
                first = top + (longest - len(workers) * lane) / 2
                found[side].update({worker: first + (place + 0.5) * lane for place, worker in enumerate(workers)})
            top += longest + _BETWEEN
        return found, top - _BETWEEN

    # -- one worker's tensor

    def _flat(self, box: Box) -> Box:
        dims = [dim for dim in self.face if dim < len(box)]
        return (*[(0, 1)] * (2 - len(dims)), *(box[dim] for dim in dims))

    def _frame(self, side: int, worker: int) -> Box:
        """The tensor of which the worker has a part; or its own, if it is part of none."""
        layout = self.layouts[side]
        return self._flat(self.boxes[side][worker] if layout is None else whole(layout.extents))

    def _place(self, box: Box, x: float, y: float) -> tuple[float, float, float, float]:
        ((top, bottom), (left, right)), (down, across) = self._flat(box), self.scales
        return x + left * across, y + top * down, (right - left) * across, (bottom - top) * down

    def _thumb(self, side: int, worker: int, x: float, middle: float) -> Iterator[Rect]:
        """The tensor of which the worker has a part, what lies in that part, and last the part itself."""
        box, layout = self.boxes[side][worker], self.layouts[side]
        y = middle - self._frame(side, worker)[0][1] * self.scales[0] / 2
        title = held(worker, box, self.itemsize) if self.movement.known else f"worker {worker}"
        if layout is not None:
            yield Rect(*self._place(whole(layout.extents), x, y), "tensor", title="the whole tensor")
        if side == 0:
            place = self._place(box, x, y)
            yield Rect(*place, "block", worker, str(worker) if min(place[2:]) >= 12 else "", title)
            return
        landings: dict[Box, list[int]] = {}
        for flow in self.flows:
            for _, dst in flow.pieces if flow.target == worker else ():
                landings.setdefault(dst, []).append(flow.source)
        for landing, sources in landings.items():
            there = tuple((i + start, j + start) for (i, j), (start, _) in zip(landing, box, strict=True))
            left, top, width, height = self._place(there, x, y)
            for number, source in enumerate(sources):
                fits = len(sources) == 1 and height >= 12 and width >= 8 * len(str(source))
                place = left, top + number * height / len(sources), width, height / len(sources)
                yield Rect(*place, "piece", source, str(source) if fits else "", f"from worker {source}")
        added = any(len(sources) > 1 for sources in landings.values())
        yield Rect(*self._place(box, x, y), "outline", worker, "+" if added else "", title)

    def _arrow(self, flow: Flow, start: Point, end: Point) -> Arrow:
        title = f"{flow.source} keeps" if flow.source == flow.target else f"{flow.source} -> {flow.target}"
        if not self.movement.known:
            return Arrow(flow.source, flow.target, start, end, "", title)
        pieces = ", ".join(f"{words(src)} to {words(dst)}" for src, dst in flow.pieces)
        much = amount(flow.cells, self.itemsize)
        return Arrow(flow.source, flow.target, start, end, much, f"{title}: {pieces}, {much}")
