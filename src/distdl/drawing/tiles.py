"""The blocks of a tensor where they lie in it, to scale; apart from each other where windows reach over their borders.

A face shows two dims: those that are split, the last two of them if there are more. For each place along the other
split dims, there is one such face, called a slice. Dims that are not split are named below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import hypot

import numpy as np

from distdl.drawing.moves import Flow, amount, flows, held, words
from distdl.drawing.scene import LETTER, LINE, Arrow, Panel, Point, Rect, with_amounts
from distdl.geometry.borders import Border
from distdl.geometry.boxes import Box, Interval, around, hull, meet, shift, volume, whole
from distdl.partition import Layout
from distdl.plan.planning import copy

_ROOM, _CELL, _LEAST = 330.0, 26.0, 62.0  # pixels: of a face; of a cell at most; of a face at least
_MORE = 110.0  # for each further block that stands apart
_GAP, _ASIDE = 62.0, 9.0  # between blocks if windows overlap; from an arrow to the line between the two middles
_FEW = 24  # places along a dim up to which each has room for a number

Index = tuple[int, ...]
Station = tuple[list[int], list[float]]  # one block along a dim: cells where something begins or ends, and their pixels


def tiles(
    owned: Layout,
    caption: str,
    itemsize: int | None = None,
    needed: Layout | None = None,
    border: Border | None = None,
    adjoint: bool = False,
) -> tuple[Panel, list[str]]:
    """The picture of a layout, of what workers need beside their blocks, and of what moves for that.

    Args:
        itemsize: bytes of an element; None if that is not known.
        needed: the boxes that workers need, which may reach beyond the tensor.
        border: what stands there, if that is not padding.
        adjoint: whether all moves are drawn with both ends swapped.
    Returns: the panel, and what has to be said beside it.
    """
    return _Tiles(owned, itemsize, needed, border, adjoint).panel(caption)


class _Tiles:
    def __init__(
        self, owned: Layout, itemsize: int | None, needed: Layout | None, border: Border | None, adjoint: bool
    ) -> None:
        self.more = max(2 - len(owned.rulers), 0)  # dims of extent 1 in front, so that there are two
        self.owned, self.itemsize, self.adjoint = _lifted(owned, self.more), itemsize, adjoint
        self.needed = self.owned if needed is None else _lifted(needed, self.more)
        self.workers = self.owned.partition.workers
        self.extents = tuple(max(stop for _, stop in along) for along in self.owned.intervals)
        self.flows: list[Flow] = []
        if needed is not None:
            repeats = {} if border is None else border.repeats(owned.extents)
            turned = {dim + self.more: cells for dim, cells in repeats.items()}
            self.flows = flows(copy(self.owned, self.needed, None, turned).moves)
        pairs = list(zip(self.owned.intervals, self.needed.intervals, strict=True))
        rank = len(pairs)
        split = [dim for dim in range(rank) if self.workers.shape[dim] > 1 or pairs[dim][0] != pairs[dim][1]]
        drawn = sorted([*split, *[dim for dim in reversed(range(rank)) if dim not in split][: max(2 - len(split), 0)]])
        self.face, self.slices = drawn[-2:], drawn[:-2]
        self.frames = [[_frame(*ends) for ends in zip(*pair, strict=True)] for pair in pairs]
        overlaps = (b[0] < a[1] for along in self.frames for a, b in pairwise(i for i in along if i[0] < i[1]))
        self.apart = _GAP if any(overlaps) else 0.0
        self.notes = list(self._said(set(range(self.more, rank)) - set(drawn)))
        self.columns = self.workers.shape[self.slices[-1]] if self.slices else 1
        most = max((self.workers.shape[dim] for dim in self.face), default=1) if self.apart else 0
        room = min(_ROOM + _MORE * max(most - 2, 0), 1200.0)
        self.stations = self._stations(room if not self.slices else max(100.0, min(room, 680 / self.columns - 24)))

    def _said(self, others: set[int]) -> Iterator[str]:
        if others:
            yield f"not split, and not drawn: {', '.join(f'dim {dim} ({self.extents[dim]})' for dim in sorted(others))}"
        listed = self.workers.ravel().tolist()
        empty = [worker for worker in listed if not volume(self.owned[worker])]
        idle = sorted(set(range(self.owned.partition.comm.size)) - set(listed))
        for what, some in (("without a cell", empty), ("outside the partition", idle)):
            if some:
                yield f"{what}: worker {', '.join(map(str, some[:16]))}{' and others' if len(some) > 16 else ''}"

    def _stations(self, room: float) -> dict[int, list[Station]]:
        """For each dim of a face, its places."""
        totals = {dim: max(sum(stop - start for start, stop in self.frames[dim]), 1) for dim in self.face}
        gaps = {dim: min(self.apart * (len(self.frames[dim]) - 1), 0.6 * room) for dim in self.face}
        common = min([_CELL, *((room - gaps[dim]) / totals[dim] for dim in self.face)])
        least = {dim: min(_LEAST / totals[dim], 44.0 if totals[dim] == 1 else _CELL) for dim in self.face}
        self.scales = {dim: max(common, least[dim]) for dim in self.face}
        if len({self.scales[dim] for dim in self.face if dim >= self.more}) > 1:
            self.notes.append("rows and columns have different scales")
        return {dim: list(self._along(dim, self.scales[dim])) for dim in self.face}

    def _along(self, dim: int, scale: float) -> Iterator[Station]:
        offset = 0.0
        triples = zip(self.owned.intervals[dim], self.needed.intervals[dim], self.frames[dim], strict=True)
        for own, window, frame in triples:
            within = (cell for cell in (*own, *window, 0, self.extents[dim]) if frame[0] <= cell <= frame[1])
            cells, pixels = sorted({*frame, *within}), [offset]
            for start, stop in pairwise(cells):
                least = 15.0 if own[0] <= start and stop <= own[1] else 6.0
                least = least if len(self.frames[dim]) <= _FEW else 2.0
                pixels.append(pixels[-1] + max((stop - start) * scale, least))
            yield cells, pixels
            offset = pixels[-1] + self.apart

    def panel(self, caption: str) -> tuple[Panel, list[str]]:
        width, height = (self.stations[dim][-1][1][-1] for dim in reversed(self.face))
        header = 22.0 if self.slices else 4.0
        rects: list[Rect] = []
        arrows: list[Arrow] = []
        places = list(product(*(range(self.workers.shape[dim]) for dim in self.slices)))
        for number, at in enumerate(places):
            down, across = divmod(number, self.columns)
            corner = across * (width + 24), LINE + down * (height + header + 8) + header
            runs = [(dim, *self.owned.intervals[dim][place]) for dim, place in zip(self.slices, at, strict=True)]
            label = ", ".join(f"dim {dim}: {start}:{stop}" for dim, start, stop in runs)
            rects.append(Rect(corner[0], corner[1] - 14, 0, 0, "words", label=label))
            rects += self._slice(at, corner)
            arrows += self._arrows(at, corner)
        bottom = LINE + -(-len(places) // self.columns) * (height + header + 8)
        ways = zip(self.face, ("down", "across"), strict=True)
        size = ", ".join(f"dim {dim - self.more}: {self.extents[dim]} {way}" for dim, way in ways if dim >= self.more)
        rects.append(Rect(0, bottom + 8, 0, 0, "words", label=size))
        wide = max(self.columns * (width + 24) - 24, len(caption) * 8.4, len(size) * LETTER)
        arrows, notes = with_amounts(arrows, [rect for rect in rects if rect.kind == "block"], wide)
        rows = [self._title(flow) for flow in self.flows if flow.source != flow.target]
        if len(arrows) < len(rows):
            notes.append(f"{len(rows) - len(arrows)} moves between slices are not drawn; the text lists them")
        return Panel(caption, wide, bottom + 14, rects, arrows, rows), [*self.notes, *notes]

    # -- one slice

    def _members(self, at: Index) -> dict[int, Index]:
        chosen = dict(zip(self.slices, at, strict=True))
        indices = [i for i in np.ndindex(*self.workers.shape) if all(i[dim] == n for dim, n in chosen.items())]
        return {int(self.workers[index]): index for index in indices}

    def _place(self, box: Box, index: Index, corner: Point) -> tuple[float, float, float, float]:
        """Where a box is drawn by the worker at this index: x, y, width, height."""
        (y, bottom), (x, right) = (
            np.interp([box[dim][0], max(box[dim])], *self.stations[dim][index[dim]]).tolist() for dim in self.face
        )
        return corner[0] + x, corner[1] + y, right - x, bottom - y

    def _slice(self, at: Index, corner: Point) -> list[Rect]:
        found: list[Rect] = []
        empty: list[Rect] = []
        for worker, index in self._members(at).items():
            box, window = self.owned[worker], self.needed[worker]
            reads = f"worker {worker} reads {words(window[self.more :])}"
            if volume(window) and window != box:
                flat = tuple(window[dim] if dim in self.face else own for dim, own in enumerate(box))
                inside = meet(flat, whole(self.extents))
                padding = around(inside, flat) if volume(inside) else [flat]
                title = f"padding of worker {worker}"
                found += [Rect(*self._place(part, index, corner), "padding", title=title) for part in padding]
            for flow in self.flows:
                for own, there in self._pieces(flow) if flow.target == worker else ():
                    if own != there or flow.source != worker:
                        title = f"worker {worker} reads {words(there[self.more :])} of worker {flow.source}"
                        if self._is_in_slice(worker, there):
                            found.append(Rect(*self._place(there, index, corner), "halo", flow.source, "", title))
            place = self._place(box, index, corner)
            label = str(worker) if place[2] >= 8 * len(str(worker)) and place[3] >= 12 else ""
            title = held(worker, box[self.more :], self.itemsize)
            block = Rect(*place, "block", worker, label, title, self._cells(box, index, corner))
            (found if volume(box) else empty).append(block)
            if volume(window) and window != box:
                found.append(Rect(*self._place(window, index, corner), "window", title=reads))
        return [*found, *empty]

    def _cells(self, box: Box, index: Index, corner: Point) -> tuple[Sequence[float], Sequence[float]]:
        """The borders of its cells, where these are not too small to be seen."""
        if not volume(box) or any(self.scales[dim] < 7 for dim in self.face):
            return (), ()
        rows, columns = (
            (origin + np.interp(range(box[dim][0] + 1, box[dim][1]), *self.stations[dim][index[dim]])).tolist()
            for dim, origin in zip(self.face, reversed(corner), strict=True)
        )
        return columns, rows

    def _pieces(self, flow: Flow) -> Iterator[tuple[Box, Box]]:
        """Each piece in cells of the tensor: where the source has it, and where the target does."""
        own, window = self.owned[flow.source], self.needed[flow.target]
        for src, dst in flow.pieces:
            yield shift(src, [start for start, _ in own]), shift(dst, [start for start, _ in window])

    def _is_in_slice(self, worker: int, box: Box) -> bool:
        own = self.owned[worker]
        return all(own[dim][0] <= box[dim][0] and box[dim][1] <= own[dim][1] for dim in self.slices)

    def _arrows(self, at: Index, corner: Point) -> Iterator[Arrow]:
        members = self._members(at)
        for flow in self.flows:
            own, there = next(self._pieces(flow))
            if flow.source != flow.target and flow.target in members and self._is_in_slice(flow.target, there):
                source = _middle(self._place(own, members[flow.source], corner))
                target = _middle(self._place(there, members[flow.target], corner))
                ends = (flow.target, flow.source) if self.adjoint else (flow.source, flow.target)
                points = _aside(target, source) if self.adjoint else _aside(source, target)
                yield Arrow(*ends, *points, amount(flow.cells, self.itemsize), self._title(flow))

    def _title(self, flow: Flow) -> str:
        """A movement, in words; boxes are those of the whole tensor."""
        boxes = ", ".join(words(own[self.more :]) for own, _ in self._pieces(flow))
        ends = (flow.target, flow.source) if self.adjoint else (flow.source, flow.target)
        return f"{ends[0]} -> {ends[1]}: {boxes}, {amount(flow.cells, self.itemsize)}"


def _lifted(layout: Layout, more: int) -> Layout:
    """The layout with dims of extent 1 in front."""
    shape = (1,) * more + layout.partition.workers.shape
    return Layout.along(layout.partition.reshape(shape), [*[[(0, 1)]] * more, *layout.intervals])


def _frame(own: Interval, window: Interval) -> Interval:
    return hull([(own,), (window,)])[0] if window[0] < window[1] else own


def _middle(place: Sequence[float]) -> Point:
    return place[0] + place[2] / 2, place[1] + place[3] / 2


def _aside(start: Point, end: Point) -> tuple[Point, Point]:
    """An arrow a little to its right, so that it does not lie on the one that goes the other way."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    by_x, by_y = (_ASIDE * n / (hypot(dx, dy) or 1.0) for n in (-dy, dx))
    return (start[0] + by_x, start[1] + by_y), (end[0] + by_x, end[1] + by_y)
