"""Edges: what cells around a block add to the outputs of a convolution. Pure integer functions.

A block can be convolved where it lies, with zeros around it. What its outputs then lack is what they read of other
blocks, and only outputs near its edges do. Of a kernel of 3 taps with padding 1, in a block of the cells 4 to 7::

    block, with zeros   . [ 4  5  6  7 ] .     ->  y[4] y[5] y[6] y[7]
    before            3                        ->  y[4] += w[0] x[3]
    behind                               8     ->                 y[7] += w[2] x[8]
"""

from __future__ import annotations

from typing import NamedTuple

from distdl.geometry.boxes import Interval, Intervals
from distdl.geometry.windows import sliding, sliding_extent, span


class Line(NamedTuple):
    """The geometry of a convolution along one dim, in cells."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    def crop(self, cells: Interval, outputs: Interval) -> Crop | None:
        """With which zeros on both sides some cells have just these outputs; None if there is no such number."""
        before = cells[0] - sliding(outputs, *self)[0]
        if before < 0 or cells[1] <= cells[0]:
            return None
        count = sliding_extent(cells[1] - cells[0], self.kernel, self.stride, (before, before), self.dilation)
        return Crop(before) if count == outputs[1] - outputs[0] > 0 else None

    def strip(self, cells: Interval, outputs: Interval) -> Strip | None:
        """What some cells add to these outputs; None if it is nothing."""
        k, s, p, d = self
        first, stop = cells
        o = max(outputs[0], -(-(first - span(k, d) + 1 + p) // s))
        end = min(outputs[1], (stop - 1 + p) // s + 1)
        if stop <= first or end <= o:
            return None
        start, last = o * s - p, (end - 1) * s - p  # where the first and the last window begin
        taps = max(-(-(first - last) // d), 0), min((stop - 1 - start) // d + 1, k)
        if taps[0] >= taps[1]:
            return None
        read = start + taps[0] * d, last + (taps[1] - 1) * d + 1
        return Strip((first - read[0], read[1] - stop), taps, (o - outputs[0], end - outputs[0]))


class Crop(NamedTuple):
    """How torch's operator comes to a run of outputs: what it takes, and what is then cut off or added.

    Attributes:
        padding, output_padding: options of the operator, in cells of its inputs; of a transposed convolution, in cells
            of its outputs.
        before, behind: cells of zeros to add to its outputs; negative: cells to cut off.
    """

    padding: int
    output_padding: int = 0
    before: int = 0
    behind: int = 0

    @property
    def exact(self) -> bool:
        """Whether the operator has just these outputs."""
        return self.before == self.behind == 0

    def plain(self) -> Crop:
        """The same without output padding, of a transposed convolution: by less padding, else by zeros.

        >>> Crop(2, 1).plain(), Crop(0, 1).plain()
        (Crop(padding=1, output_padding=0, before=-1, behind=0), Crop(padding=0, output_padding=0, before=0, behind=1))
        """
        padding = max(self.padding - self.output_padding, 0)
        less = self.padding - padding
        return Crop(padding, 0, self.before - less, self.behind + self.output_padding - less)


class Strip(NamedTuple):
    """What cells add to outputs.

    Attributes:
        margins: zeros before and behind the cells, with which the taps give just the outputs; negative numbers cut off.
        taps: those of the kernel that read cells.
        outputs: counted from the first of the worker's.
        trims: zeros before and behind what the taps give, with which it is just the outputs; negative numbers cut off.
    """

    margins: tuple[int, int]
    taps: Interval
    outputs: Interval
    trims: tuple[int, int] = (0, 0)


class Rim(NamedTuple):
    """The cells of a block that others read, at both ends of one dim: the first ones, then the last ones.

    Attributes:
        extent: of the block.
        first, last: how many. Where they would meet, all are among the first.
    """

    extent: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.first + self.last

    def place(self, cell: int, among_first: bool) -> int:
        """Where a cell of the block stands in the rim."""
        return cell if among_first or not self.last else cell - (self.extent - self.size)


def beside(blocks: Intervals, windows: Intervals) -> tuple[list[Interval], list[Interval]]:
    """What windows have before their blocks and behind them, within the tensor.

    >>> beside([(0, 4), (4, 8)], [(-1, 5), (3, 9)])
    ([(0, 0), (3, 4)], [(4, 5), (8, 8)])
    """
    extent = max(stop for _, stop in blocks)
    read = [window if window[0] < window[1] else block for block, window in zip(blocks, windows, strict=True)]
    before = [(min(max(first, 0), i), i) for (i, _), (first, _) in zip(blocks, read, strict=True)]
    behind = [(j, max(min(stop, extent), j)) for (_, j), (_, stop) in zip(blocks, read, strict=True)]
    return before, behind


def rims(blocks: Intervals, before: Intervals, behind: Intervals) -> list[Rim]:
    """What others read of each block, if they read these cells in front of theirs and behind them."""
    found = []
    for place, (i, j) in enumerate(blocks):
        first = max((stop - i for start, stop in behind[:place] if start < stop), default=0)
        last = max((j - start for start, stop in before[place + 1 :] if start < stop), default=0)
        n = j - i
        first, last = min(max(first, 0), n), min(max(last, 0), n)
        found.append(Rim(n, n, 0) if first + last >= n else Rim(n, first, last))
    return found
