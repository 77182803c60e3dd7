"""Regions of memory: where the elements of a tensor lie that has a stride along each dim."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from distdl.geometry.boxes import Shape


class Region(NamedTuple):
    """Places in a memory.

    Attributes:
        offset: the first of them.
        extents: how many there are along each dim.
        strides: the distance from one to the next.
    """

    offset: int
    extents: Shape
    strides: Shape

    @classmethod
    def of(cls, shape: Shape, strides: Shape, offset: int, itemsize: int) -> Region:
        """That of a tensor, in bytes.

        Args:
            strides: in elements, as the offset; if there are none, it is contiguous.
        """
        strides = strides or contiguous(shape)
        return cls(offset * itemsize, (*shape, itemsize), (*(step * itemsize for step in strides), 1))

    @property
    def last(self) -> int:
        return self.offset + sum((n - 1) * step for n, step in zip(self.extents, self.strides, strict=True))


def contiguous(shape: Shape) -> Shape:
    """The strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def meet(one: Region, other: Region) -> bool:
    """Whether two regions have a place in common.

    They are told apart where the strides of both divide each other, as those of parts of one tensor do: then a place is
    a number with a digit for each stride, and the digits of a region are intervals. Others are taken to meet if the
    bytes between their first and last place do.
    """
    if 0 in one.extents or 0 in other.extents:
        return False
    if one.last < other.offset or other.last < one.offset:
        return False
    steps = sorted({step for region in (one, other) for _, step in _lines(region)} | {1}, reverse=True)
    if any(wide % narrow for wide, narrow in pairwise(steps)):
        return True
    digits, others = _digits(one, steps), _digits(other, steps)
    if digits is None or others is None:
        return True
    return all(a < d and c < b for (a, b), (c, d) in zip(digits, others, strict=True))


def overlaps_itself(shape: Shape, strides: Shape) -> bool:
    """Whether several elements of a tensor may lie in one place."""
    if 0 in shape:
        return False
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(shape, strides, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


def _lines(region: Region) -> list[tuple[int, int]]:
    """Extents and strides of the dims along which a region has several places."""
    return [(n, step) for n, step in zip(region.extents, region.strides, strict=True) if n > 1 and step]


def _digits(region: Region, steps: Sequence[int]) -> list[tuple[int, int]] | None:
    """The digits of the places of a region, from the first; None where they are no intervals."""
    rest = region.offset
    starts = []
    for step in steps:
        digit, rest = divmod(rest, step)
        starts.append(digit)
    counts = dict.fromkeys(steps, 1)
    for n, step in _lines(region):
        counts[step] += n - 1
    found: list[tuple[int, int]] = []
    for place in range(len(steps) - 1, -1, -1):
        start, count = starts[place], counts[steps[place]]
        if place:
            base = steps[place - 1] // steps[place]
            if start + count > base:
                if start or count % base:
                    return None
                # every digit of this place occurs, so the count goes on in the next place
                counts[steps[place - 1]] += count // base - 1
                count = base
        found.append((start, start + count))
    return found[::-1]
