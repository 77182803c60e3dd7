"""The two charts of the front page, drawn of our own measurements: SVG that takes the colours of the page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

# The most bytes of tensors that a worker held, in MiB: benchmarks/memory.py, global tensors, 2026-11-29.
MEMORY = {"1 worker": 622.9, "2 workers": 310.2, "4 workers": 156.0, "8 workers": 78.8}
# A step on one worker / on two, in ms: "make bench", 2026-11-25, as docs/developers/performance.md has it.
STEPS = {
    "U-Net, 64 x 64 x 64": (773.6, 273.1),
    "U-Net, 256 x 256": (395.4, 226.0),
    "ResNet-18, images split": (790.4, 486.5),
    "Attention, 48 x 48": (90.8, 68.1),
    "U-Net, 64 x 64": (27.8, 30.0),
}
ROW, LABEL, WIDTH = 30, 160, 230


def chart(title: str, bars: dict[str, tuple[float, str]], marked: float | None = None) -> str:
    """One bar for each entry, to scale.

    Args:
        bars: the length of each bar, and the text behind it.
        marked: where a dashed line stands.
    """
    longest = max([length for length, _ in bars.values()])
    height = ROW * len(bars) + 4

    def shapes() -> Iterator[str]:
        for number, (name, (length, text)) in enumerate(bars.items()):
            y, width = ROW * number + 4, WIDTH * length / longest
            yield f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
            yield f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{ROW - 9}" rx="2"/>'
            yield f'<text x="{LABEL + width + 6:.1f}" y="{y + 15}">{escape(text)}</text>'
        if marked is not None:
            x = LABEL + WIDTH * marked / longest
            yield f'<path d="M{x:.1f} 0V{height}"/>'

    return (
        f'<svg class="chart" viewBox="0 0 {LABEL + WIDTH + 70} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(shapes())}</svg>\n"
    )


def memory() -> str:
    """What each worker holds at most, over the number of workers."""
    return chart("Memory per worker", {name: (size, f"{size:.0f} MiB") for name, size in MEMORY.items()})


def speed() -> str:
    """How many times faster than one worker two workers on two cores are; the line is at 1."""
    ratios = {name: alone / two for name, (alone, two) in STEPS.items()}
    return chart("Speed of two workers", {name: (ratio, f"{ratio:.1f}x") for name, ratio in ratios.items()}, marked=1)
