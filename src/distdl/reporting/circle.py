"""Workers on a circle, and an arrow with its bytes for each pair of which one sends to the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import cos, hypot, pi, sin

from distdl.drawing.moves import amount
from distdl.drawing.scene import Arrow, Panel, Rect, Scene, composed, with_amounts

_MOST = 72  # arrows; of more, the heaviest are drawn


def circle(workers: Sequence[int], sends: Counter[tuple[int, int]]) -> Scene:
    """The picture of who sends how much to whom.

    Args:
        sends: bytes from one worker to another.
    """
    radius = max(105.0, len(workers) * 13.0) if len(workers) > 1 else 0.0
    width = 2 * radius + 90
    places = {}
    for number, worker in enumerate(workers):
        angle = 2 * pi * number / len(workers) - 0.75 * pi
        places[worker] = width / 2 + radius * cos(angle), 20 + width / 2 + radius * sin(angle)
    rects = [
        Rect(x - 16, y - 12, 32, 24, "block", worker, str(worker), f"worker {worker}")
        for worker, (x, y) in places.items()
    ]
    heaviest = sorted(((pair, n) for pair, n in sends.items() if n), key=lambda one: (-one[1], one[0]))
    arrows = [_arrow(sender, receiver, n, places) for (sender, receiver), n in heaviest[:_MOST]]
    arrows, notes = with_amounts(arrows, rects, width)
    if len(heaviest) > _MOST:
        notes.append(f"of {len(heaviest)} arrows, the {_MOST} with most bytes are drawn")
    return composed("Who sends to whom", [Panel("", width, width + 24, rects, arrows)], notes)


def _arrow(sender: int, receiver: int, nbytes: int, places: dict[int, tuple[float, float]]) -> Arrow:
    """An arrow between two workers, a little to its right, so that the one that goes back has its own line."""
    (x, y), (to_x, to_y) = places[sender], places[receiver]
    length = hypot(to_x - x, to_y - y)
    along_x, along_y = (to_x - x) / length, (to_y - y) / length
    aside, near = 6.0, 21.0
    start = x + near * along_x - aside * along_y, y + near * along_y + aside * along_x
    end = to_x - near * along_x - aside * along_y, to_y - near * along_y + aside * along_x
    much = amount(nbytes, 1)
    return Arrow(sender, receiver, start, end, much, f"{sender} -> {receiver}: {much}")
