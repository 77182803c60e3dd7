"""Text of a scene, for a terminal: its blocks as boxes of characters, and a line for each movement."""

from __future__ import annotations

from distdl.drawing.scene import Panel, Rect, Scene

_ACROSS, _DOWN = 7.0, 14.0  # pixels of a character
_FILL = {"padding": ".", "halo": "/", "block": " "}  # in the order in which they lie upon each other
_MOST_ROWS = 200


def text(scene: Scene) -> str:
    """The scene in characters."""
    parts, above = [scene.title], None
    for panel in scene.panels:
        pictured, more = _pictured(panel), len(panel.rows) - _MOST_ROWS
        rows = [f"  {row}" for row in panel.rows[:_MOST_ROWS]] + [f"  and {more} more"] * (more > 0)
        parts.append("\n".join([panel.caption, *(pictured if pictured != above else []), *rows]))
        above = pictured
    return "\n\n".join([*parts, *(["\n".join(scene.notes)] if scene.notes else [])])


def _pictured(panel: Panel) -> list[str]:
    """The rectangles of a panel, unless it shows who sends to whom: then the list says it all."""
    if any(rect.kind in ("outline", "lane") for rect in panel.rects):
        return []
    canvas = [[" "] * (round(panel.width / _ACROSS) + 99) for _ in range(round(panel.height / _DOWN) + 2)]
    rects = [rect for kind in _FILL for rect in panel.rects if rect.kind == kind]
    for rect in rects:
        _put(canvas, rect)
    for rect in [*rects, *(rect for rect in panel.rects if rect.kind == "words")]:
        start = round(rect.middle[0] / _ACROSS) - len(rect.label) // 2 * (rect.kind != "words")
        canvas[round(rect.middle[1] / _DOWN)][start : start + len(rect.label)] = rect.label
    return [line for line in ("".join(line).rstrip() for line in canvas) if line]


def _put(canvas: list[list[str]], rect: Rect) -> None:
    left, top = round(rect.x / _ACROSS), round(rect.y / _DOWN)
    right, bottom = round((rect.x + rect.width) / _ACROSS), round((rect.y + rect.height) / _DOWN)
    for row in range(top, bottom + 1):
        for column in range(left, right + 1):
            edges = (column in (left, right)) + 2 * (row in (top, bottom)) if rect.kind == "block" else 0
            mark = (_FILL[rect.kind], "|", "-", "+")[edges]
            if mark != "-" or canvas[row][column] not in "+|":
                canvas[row][column] = mark
