"""What moves, in words and in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distdl.geometry.boxes import Box, shape, volume
from distdl.partition.groups import dims
from distdl.plan import Move


@dataclass(frozen=True)
class Flow:
    """All that one worker sends to another, or keeps: where each piece lies in x of the source and y of the target."""

    source: int
    target: int
    pieces: tuple[tuple[Box, Box], ...]

    @property
    def cells(self) -> int:
        return sum(volume(src) for src, _ in self.pieces)


def flows(moves: Iterable[Move]) -> list[Flow]:
    """The moves, by pairs of workers; those without a cell are left out."""
    found: dict[tuple[int, int], list[tuple[Box, Box]]] = {}
    for move in moves:
        if volume(move.src):
            found.setdefault((move.source, move.target), []).append((move.src, move.dst))
    return [Flow(source, target, tuple(pieces)) for (source, target), pieces in sorted(found.items())]


def amount(cells: int, itemsize: int | None) -> str:
    """So many cells, in words: their bytes, if it is known how many an element has.

    >>> amount(1, None), amount(6, None), amount(6, 4), amount(1536, 4)
    ('1 cell', '6 cells', '24 B', '6 KiB')
    """
    if itemsize is None:
        return "1 cell" if cells == 1 else f"{cells} cells"
    size, units = float(cells * itemsize), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.{4 if size >= 1000 else 3}g} {units[0]}"


def words(box: Box) -> str:
    """A box as one writes an index."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def held(worker: int, box: Box, itemsize: int | None) -> str:
    """What a worker has, in words."""
    return f"worker {worker}: {words(box)}, {dims(shape(box)) or '0-d'}, {amount(volume(box), itemsize)}"
