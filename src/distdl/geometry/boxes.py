"""Intervals and boxes: half-open ranges of integers, and products of them.

A box says which part of a tensor is meant: ``((0, 3), (2, 5))`` is rows 0 to 2 and columns 2 to 4. Nothing here knows
about workers, tensors or messages.
"""

from collections.abc import Sequence
from math import prod

from distdl.environment.types import Count

Interval = tuple[int, int]
Intervals = Sequence[Interval]
Box = tuple[Interval, ...]
Shape = tuple[Count, ...]

MOST = 2**31 - 1  # cells that a dim, a kernel or a padding may have: what torch's operators count


def balanced(extent: int, parts: int) -> tuple[Interval, ...]:
    """Split ``range(extent)`` into ``parts`` runs whose lengths differ by at most one, the longer ones first.

    >>> balanced(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    if parts < 1 or extent < 0:
        raise ValueError(f"balanced needs extent >= 0 and parts >= 1; got extent {extent} and parts {parts}")
    short, longer = divmod(extent, parts)
    return runs([short + (part < longer) for part in range(parts)])


def runs(lengths: Sequence[Count]) -> tuple[Interval, ...]:
    """Lay runs of the given lengths end to end, from 0.

    >>> runs([3, 0, 2])
    ((0, 3), (3, 3), (3, 5))
    """
    intervals = []
    start = 0
    for length in lengths:
        intervals.append((start, start + int(length)))
        start += int(length)
    return tuple(intervals)


def whole(shape: Sequence[int]) -> Box:
    """The box of an entire tensor of this shape."""
    return tuple((0, int(extent)) for extent in shape)


def shape(box: Box) -> Shape:
    """Extents of a box, in elements; an inverted interval counts as empty."""
    return tuple(max(stop - start, 0) for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements in a box (1 for the box of a 0-d tensor)."""
    return prod(shape(box))


def meet(a: Box, b: Box) -> Box:
    """The intersection of two boxes of equal dimension. It may be empty: look at its volume."""
    return tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))


def around(box: Box, frame: Box) -> list[Box]:
    """Disjoint boxes that together are what ``frame`` has outside of ``box``, which lies in it."""
    found = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, frame, strict=True)):
        for interval in ((first, start), (stop, last)):
            found.append((*box[:dim], interval, *frame[dim + 1 :]))
    return [slab for slab in found if volume(slab)]


def hull(boxes: Sequence[Box]) -> Box:
    """The smallest box in which they all lie."""
    return tuple((min(i for i, _ in along), max(j for _, j in along)) for along in zip(*boxes, strict=True))


def within(box: Box, frame: Box) -> Box:
    """``box`` in coordinates whose origin is the first corner of ``frame``."""
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, frame, strict=True))


def shift(box: Box, offsets: Sequence[int]) -> Box:
    """``box`` moved by an offset per dimension."""
    return tuple((start + by, stop + by) for (start, stop), by in zip(box, offsets, strict=True))


def slices(box: Box, frame: Box | None = None) -> tuple[slice, ...]:
    """The index that cuts this box out of a tensor. With its frame: no longer than needed, empty for all of it."""
    needed = len(box)
    while frame is not None and needed and box[needed - 1] == frame[needed - 1]:
        needed -= 1
    return tuple(slice(start, stop) for start, stop in box[:needed])
