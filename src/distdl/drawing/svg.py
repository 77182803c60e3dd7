"""SVG of a scene. It has its own background, light or dark as the reader's system is, and a tool tip for each part."""

from __future__ import annotations

from collections.abc import Iterator
from math import hypot
from xml.sax.saxutils import escape, quoteattr

from distdl.drawing.scene import LINE, MARGIN, Arrow, Rect, Scene

# Okabe and Ito's colours, which colour-blind eyes tell apart, a little lighter so that black is readable on all
COLOURS = ("#7fc6ee", "#ecb53e", "#3cb793", "#f4ea6a", "#e08347", "#d999bb", "#4795c9", "#c9c9c9")
_HEAD = """<style>.distdl-paper{fill:#fff} .distdl-tensor{fill:#f1f1f4;stroke:#9a9aa3} .distdl-ink{fill:#1c1c22}
.distdl-soft{fill:#5b5b66} .distdl-line{stroke:#1c1c22;fill:none} .distdl-casing{stroke:#fff;fill:none;opacity:.85}
.distdl-amount{fill:#1c1c22;stroke:#fff;stroke-width:4px;stroke-linejoin:round;paint-order:stroke}
@media (prefers-color-scheme:dark){
.distdl-paper{fill:#17181c} .distdl-tensor{fill:#26272d;stroke:#74747f} .distdl-ink{fill:#ececf1}
.distdl-soft{fill:#a9a9b5} .distdl-line{stroke:#ececf1} .distdl-casing{stroke:#17181c}
.distdl-amount{fill:#ececf1;stroke:#17181c}}</style>
<defs><pattern id="distdl-hatch" width="6" height="6" patternUnits="userSpaceOnUse">
<path d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5" stroke="#111" stroke-opacity=".6"/></pattern>
<pattern id="distdl-dots" width="5" height="5" patternUnits="userSpaceOnUse">
<circle fill="#84848e" cx="2.5" cy="2.5" r="1"/></pattern></defs>"""
_FILLED = 'fill="{colour}" stroke="#111"'
_LOOKS = {
    "block": [_FILLED + ' stroke-width="1.4"'],
    "piece": [_FILLED + ' stroke-width=".6"'],
    "lane": [_FILLED + ' stroke-width=".6"'],
    "halo": ['fill="{colour}" fill-opacity=".75"', 'fill="url(#distdl-hatch)" stroke="#111" stroke-width=".7"'],
    "padding": ['class="distdl-paper"', 'fill="url(#distdl-dots)" stroke="#8b8b95" stroke-width=".7"'],
    "tensor": ['class="distdl-tensor" stroke-dasharray="2 2"'],
    "window": ['class="distdl-line" stroke-width="1.2" stroke-dasharray="5 3"'],
    "outline": ['fill="none" stroke="#111" stroke-width="1.4"'],
    "empty": ['fill="none" stroke="{colour}" stroke-width="5"', 'class="distdl-line" stroke-dasharray="2 2"'],
}


def svg(scene: Scene) -> str:
    """The scene as an SVG document."""
    width, height = round(scene.width), round(scene.height)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"'
    fonts = 'font-family="DejaVu Sans,Verdana,Helvetica,Arial,sans-serif" font-size="11"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {fonts} aria-label={quoteattr(scene.title)}>{_HEAD}',
        f'<rect class="distdl-paper" width="{width}" height="{height}" rx="6"/>',
        _words(MARGIN, 28, scene.title, 'class="distdl-ink" font-size="15" font-weight="bold"'),
    ]
    for panel in scene.panels:
        parts.append(f'<g transform="translate({panel.x:g} {panel.y:g})">')
        parts.append(_words(0, 11, panel.caption, 'class="distdl-ink" font-size="12" font-weight="bold"'))
        parts += [line for rect in panel.rects for line in _rect(rect)]
        parts += [line for arrow in panel.arrows for line in _arrow(arrow)]
        for arrow in panel.arrows:  # last, so that no line crosses out an amount
            if arrow.at is not None:
                looks = 'class="distdl-amount" text-anchor="middle"'
                parts.append(_words(arrow.at[0], arrow.at[1] + 4, arrow.amount, looks))
        parts.append("</g>")
    first = height - MARGIN - LINE * len(scene.notes) + 11
    parts += [_words(MARGIN, first + LINE * n, note, 'class="distdl-soft"') for n, note in enumerate(scene.notes)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _words(x: float, y: float, text: str, looks: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {looks}>{escape(text)}</text>' if text else ""


def _rect(rect: Rect) -> Iterator[str]:
    if rect.kind == "words":
        yield _words(rect.x, rect.y, rect.label, 'class="distdl-soft"')
        return
    place = f'x="{rect.x:.1f}" y="{rect.y:.1f}" width="{rect.width:.1f}" height="{rect.height:.1f}"'
    looks = _LOOKS[rect.kind]
    if not (rect.width and rect.height):  # SVG does not draw a rectangle without an area
        place, looks = f'd="M{rect.x:.1f} {rect.y:.1f}h{rect.width:.1f}v{rect.height:.1f}"', _LOOKS["empty"]
    shape, colour = "path" if place[0] == "d" else "rect", COLOURS[rect.worker % len(COLOURS)]
    yield f"<g><title>{escape(rect.title)}</title>" if rect.title else "<g>"
    yield from (f"<{shape} {place} {look.format(colour=colour)}/>" for look in looks)
    columns, rows = rect.cells
    lines = [f"M{x:.1f} {rect.y:.1f}v{rect.height:.1f}" for x in columns]
    lines += [f"M{rect.x:.1f} {y:.1f}h{rect.width:.1f}" for y in rows]
    if lines:
        yield f'<path d="{"".join(lines)}" stroke="#111" stroke-opacity=".16" stroke-width=".7"/>'
    bold = 'text-anchor="middle" font-size="12" font-weight="bold" fill="#111"'
    yield _words(rect.middle[0], rect.middle[1] + 4, rect.label, bold) + "</g>"


def _arrow(arrow: Arrow) -> Iterator[str]:
    (x, y), (to_x, to_y) = arrow.start, arrow.end
    length = hypot(to_x - x, to_y - y) or 1.0
    along_x, along_y = (to_x - x) / length, (to_y - y) / length
    neck_x, neck_y = to_x - 7 * along_x, to_y - 7 * along_y
    line = f'd="M{x:.1f} {y:.1f}L{neck_x:.1f} {neck_y:.1f}"'
    yield f"<g><title>{escape(arrow.title)}</title>"
    if arrow.stays:
        line = f'd="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"'
        yield f'<path {line} stroke="#8b8b95" stroke-dasharray="3 4"/></g>'
        return
    head = [(to_x, to_y), *((neck_x + s * 3.5 * along_y, neck_y - s * 3.5 * along_x) for s in (1, -1))]
    yield f'<path class="distdl-casing" {line} stroke-width="4"/><path class="distdl-line" {line} stroke-width="1.3"/>'
    yield f'<polygon class="distdl-ink" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in head)}"/>'
    yield f'<circle class="distdl-ink" cx="{x:.1f}" cy="{y:.1f}" r="2"/></g>'
