"""Borders: what stands around a tensor that is padded. Pure integer functions.

A cell before the tensor or behind it stands for a cell of the tensor, which follows from the mode:

    reflect      3 2 1 | 0 1 2 3 4 | 3 2 1
    replicate    0 0 0 | 0 1 2 3 4 | 4 4 4
    circular     2 3 4 | 0 1 2 3 4 | 0 1 2        (the tensor repeats)

or for none (``zeros`` and ``constant``). So a window in the coordinates of the tensor, which may begin below 0 or end
beyond its extent, is filled in two steps. A plan fetches cells: the window itself, or, where other cells stand for
those outside, the hull of all that it reads. Then each worker puts what it has fetched in its places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distdl.geometry.boxes import Box, Interval, Intervals, Shape

REPEATING = ("reflect", "replicate", "circular")  # the modes in which cells of the tensor stand around it
CONVOLUTION_MODES = ("zeros", *REPEATING)  # as torch's convolutions call them
PADDING_MODES = ("constant", *REPEATING)  # as torch's padding calls them


def source(cell: int, extent: int, mode: str) -> int:
    """The cell of the tensor that stands at ``cell``, at most one extent away from it. (``reflect``, ``replicate``.)"""
    last = extent - 1
    return abs(last - abs(last - cell)) if mode == "reflect" else min(max(cell, 0), last)


def read(window: Interval, extent: int, mode: str) -> Interval:
    """The cells that have to be fetched to fill a window. Beyond the tensor, zeros are what one finds there."""
    start, stop = window
    if mode == "constant":
        return (min(max(start, 0), extent), min(max(stop, 0), extent))
    if mode in ("zeros", "circular") or stop <= start:
        return window
    turning = [source(cell, extent, mode) for cell in (start, 0, extent - 1, stop - 1) if start <= cell < stop]
    return (min(turning), max(turning) + 1)


@dataclass(frozen=True)
class Border:
    """How a tensor is padded.

    Attributes:
        mode: one of ``CONVOLUTION_MODES``, or ``constant`` for a value other than zero.
        widths: for each dim of the tensor, the cells before and behind it; negative numbers cut cells off.
    """

    mode: str = "zeros"
    widths: tuple[tuple[int, int], ...] = ()

    def check(self, name: str, extents: Shape) -> None:
        """Check that a tensor can be padded so.

        Raises: ValueError that names the layer, the dim, the padding and the extent.
        """
        for dim, ((before, behind), extent) in enumerate(zip(self.widths, extents, strict=True)):
            kept = extent + min(before, 0) + min(behind, 0)
            rules = {
                "zeros": ("not to cut off more than there is", kept >= 0),
                "constant": ("not to cut off more than there is", kept >= 0),
                "reflect": ("to be smaller than the input", max(before, behind) < extent),
                "replicate": ("to have a cell to repeat", extent > 0),
                "circular": ("to be at most what it repeats", kept >= max(before, behind, 0)),
            }
            rule, holds = rules[self.mode]
            least = 1 if self.mode in ("reflect", "replicate") else 0
            if (before, behind) != (0, 0) and not (holds and extent + before + behind >= least):
                raise ValueError(
                    f"{name} needs padding {rule}, and cells that remain; mode {self.mode!r}, in dim {dim} the padding "
                    f"is {before} and {behind} and the extent {extent}"
                )

    def fetched(self, windows: Sequence[Intervals], extents: Shape) -> list[Intervals]:
        """Along each dim, the cells that have to be fetched to fill each of the windows."""
        if self.mode in ("zeros", "circular"):
            return list(windows)
        return [
            [read(window, extent, self.mode) for window in along]
            for along, extent in zip(windows, extents, strict=True)
        ]

    def repeats(self, extents: Shape) -> dict[int, Interval]:
        """The cells that repeat, for each dim where some do: those that are not cut off."""
        if self.mode != "circular":
            return {}
        return {
            dim: (max(-before, 0), extent + min(behind, 0))
            for dim, ((before, behind), extent) in enumerate(zip(self.widths, extents, strict=True))
            if max(before, behind) > 0
        }

    def steps(self, window: Box, extents: Shape) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """How a window is filled from what was fetched for it: for each dim that needs it, the cells to take.

        They are numbered from the first that was fetched.
        """
        if self.mode not in ("reflect", "replicate"):
            return ()
        found = []
        for dim, ((start, stop), extent) in enumerate(zip(window, extents, strict=True)):
            if start < stop and not 0 <= start <= stop <= extent:
                first, _ = read((start, stop), extent, self.mode)
                found.append((dim, tuple(source(cell, extent, self.mode) - first for cell in range(start, stop))))
        return tuple(found)

    def margins(self, window: Box, extents: Shape) -> Shape:
        """What is missing before and behind, as ``F.pad`` takes it: the last dim first. Empty if nothing is."""
        if self.mode != "constant":
            return ()
        missing = []
        for (start, stop), extent in reversed(list(zip(window, extents, strict=True))):
            first, last = read((start, stop), extent, self.mode)
            before = min(max(first - start, 0), stop - start)
            missing += [before, stop - start - (last - first) - before]
        return tuple(missing) if any(missing) else ()
