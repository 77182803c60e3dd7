"""Scenes: what a picture consists of, in plain values. Lengths are in pixels; y grows downwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import hypot
from typing import Literal

LETTER, LINE, MARGIN = 6.6, 15.0, 18.0
_WIDEST = 790.0  # a row of panels, unless one alone is wider

Point = tuple[float, float]


@dataclass(frozen=True)
class Rect:
    """A rectangle, or words that begin at a place.

    Attributes:
        kind: blocks, pieces, lanes and tensors are filled, halos hatched, paddings dotted; windows and outlines are
            frames.
        worker: whose colour it has.
        label: what is written in it.
        title: what it is, in words.
        cells: borders of cells in it: places of vertical lines, and of horizontal ones.
    """

    x: float
    y: float
    width: float
    height: float
    kind: Literal["block", "piece", "halo", "padding", "tensor", "window", "outline", "lane", "words"]
    worker: int = 0
    label: str = ""
    title: str = ""
    cells: tuple[Sequence[float], Sequence[float]] = ((), ())

    @property
    def middle(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Arrow:
    """What one worker sends to another, or keeps.

    Attributes:
        amount: how much that is; empty if it is not known.
        title: what moves, in words.
        at: where the amount is written; None if it is not.
    """

    source: int
    target: int
    start: Point
    end: Point
    amount: str
    title: str
    at: Point | None = None

    @property
    def stays(self) -> bool:
        return self.source == self.target


@dataclass(frozen=True)
class Panel:
    """A part of a picture: one tensor, or one movement.

    Attributes:
        rows: what moves, in words. A terminal lists it.
    """

    caption: str
    width: float
    height: float
    rects: Sequence[Rect]
    arrows: Sequence[Arrow] = ()
    rows: Sequence[str] = ()
    x: float = 0
    y: float = 0


@dataclass(frozen=True)
class Scene:
    """A picture: its title, its panels, and what is said below them."""

    title: str
    panels: Sequence[Panel]
    notes: Sequence[str]
    width: float
    height: float


def composed(title: str, panels: Sequence[Panel], notes: Sequence[str]) -> Scene:
    """The scene of some panels, side by side as far as a page is wide."""
    x, y, row, right = MARGIN, MARGIN + 34, 0.0, 0.0
    placed, notes = [], list(dict.fromkeys(notes))
    for panel in panels:
        if x > MARGIN and x + panel.width > _WIDEST:
            x, y, row = MARGIN, y + row + 26, 0.0
        placed.append(replace(panel, x=x, y=y))
        x, row, right = x + panel.width + 36, max(row, panel.height), max(right, x + panel.width)
    right = max(right, MARGIN + len(title) * 9.4, *(MARGIN + len(note) * LETTER for note in notes))
    return Scene(title, placed, notes, right + MARGIN, y + row + 12 + LINE * len(notes) + MARGIN)


def with_amounts(arrows: Sequence[Arrow], rects: Sequence[Rect], width: float) -> tuple[list[Arrow], list[str]]:
    """Write the amounts beside the arrows of a panel, where nothing else is written.

    Returns: the arrows, and what is said once for all of them.
    """
    amounts = {arrow.amount for arrow in arrows if not arrow.stays}
    if amounts == {""} or (len(amounts) == 1 and len(arrows) > 4):
        return list(arrows), [f"each arrow moves {amount}" for amount in amounts if amount]
    taken = [_around(rect.middle, rect.label) for rect in rects if rect.label]
    written = []
    for arrow in arrows:
        for at in () if arrow.stays else _beside(arrow):
            box = _around(at, arrow.amount)
            if box[0] >= 0 and box[2] <= width and not any(_meet(box, other) for other in taken):
                taken.append(box)
                arrow = replace(arrow, at=at)
                break
        written.append(arrow)
    unwritten = any(arrow.at is None and not arrow.stays for arrow in written)
    return written, ["amounts that have no place here are in the text and the tool tips"] if unwritten else []


def _beside(arrow: Arrow) -> Iterator[Point]:
    """Places for its amount: to the right of the arrow as one goes along it, and on it."""
    (x, y), (to_x, to_y) = arrow.start, arrow.end
    length = hypot(to_x - x, to_y - y) or 1.0
    right = (y - to_y) / length, (to_x - x) / length
    for far in (abs(right[0]) * (len(arrow.amount) * LETTER / 2 + 5) + abs(right[1]) * 9, 0.0):
        for share in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8):
            yield x + share * (to_x - x) + far * right[0], y + share * (to_y - y) + far * right[1]


def _around(at: Point, words: str) -> tuple[float, float, float, float]:
    half = len(words) * LETTER / 2 + 2
    return at[0] - half, at[1] - 7, at[0] + half, at[1] + 7


def _meet(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
