"""How a split tensor gets another shape: where its cells have to lie first, and how the result is split.

A worker can reshape its block by itself if the block's cells are a box of both shapes. This file computes layouts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Any, NamedTuple

from distdl.geometry.boxes import Intervals, Shape, balanced
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.layouts.spreading import SPACIOUS, Spread


class Reshape(NamedTuple):
    """How a tensor is reshaped.

    Attributes:
        needed: the layout that the tensor has to have first; None if it has it.
        target: the layout of the result.
    """

    needed: KnownLayout | None
    target: KnownLayout


class _Fit(NamedTuple):
    """Splits of the dims before and after a reshape, under which each worker's cells are a box of both shapes."""

    before: list[Intervals]
    after: list[Intervals]


def place(layout: KnownLayout, dim: int) -> int:
    """The index of the interval that has the one cell along a dim of extent 1."""
    return next(at for at, (start, stop) in enumerate(layout.intervals[dim]) if stop > start)


def plan_reshape(layout: KnownLayout, shape: Shape) -> Reshape:
    """How to reshape a tensor of a layout.

    Dims before and after the reshape fall into groups of equal volume. A group of one dim on either side keeps its
    split. In any other, each worker's cells have to be a box of both shapes. If they are not, the group is split anew
    over as many places. If that cannot be, a dim that keeps its split is split further, over these places, too. If
    there is no such dim, some workers are left out.

    Where all cells move anyway (``flatten`` of rows behind channels), the places go at once to a long dim before the
    group, such as that of samples: the next function reads whole features more often than whole samples.
    """
    context, extents = layout.context, layout.extents
    workers = layout.partition.workers
    if not prod(extents):
        return Reshape(None, context.whole(shape, int(workers.flat[0])))
    dims = [dim for dim, n in enumerate(extents) if n != 1]
    workers = workers[tuple(slice(None) if n != 1 else place(layout, dim) for dim, n in enumerate(extents))]
    given = [layout.intervals[dim] for dim in dims]
    groups = _groups([extents[dim] for dim in dims], [n for n in shape if n != 1])
    grid = workers.reshape([prod(workers.shape[i:j]) for (i, j), _ in groups])  # one axis for each group
    kept = [at for at, ((i, j), after) in enumerate(groups) if j - i == 1 == len(after)]
    outer: list[Intervals] = [given[groups[at][0][0]] if at in kept else () for at in range(len(groups))]
    found: dict[int, _Fit] = {}
    for at, ((i, j), after) in enumerate(groups):
        if at in kept:
            continue
        before = [extents[dim] for dim in dims[i:j]]
        own = given[i:j]
        fit = _as_it_is(before, after, own)
        places = grid.shape[at]
        spacious = [one for one in kept if one < at and outer[one][-1][1] >= SPACIOUS * grid.shape[one] * places]
        if fit is None and not (len(own[0]) == 1 and spacious):
            fit = _fit(before, after, places)
        if fit is None:
            roomy = spacious or [one for one in kept if outer[one][-1][1] >= grid.shape[one] * places]
            if roomy:
                grid = _give_away(grid, outer, at, max(roomy, key=lambda one: outer[one][-1][1] / grid.shape[one]))
            else:
                used = next(n for n in range(places, 0, -1) if _fit(before, after, n) is not None)
                grid = grid.take(range(used), axis=at)
            fit = _fit(before, after, grid.shape[at])
        assert fit is not None
        found[at] = fit
    fits = [_Fit([outer[at]], [outer[at]]) if at in kept else found[at] for at in range(len(groups))]
    before_, after_ = [one for fit in fits for one in fit.before], [one for fit in fits for one in fit.after]
    needed = context.layout(grid.reshape([len(one) for one in before_]), before_)
    owned = context.layout(workers, given)
    target = _with_units(context, grid, after_, shape)
    return Reshape(None if needed is owned else _with_units(context, grid, before_, extents), target)


def _give_away(grid: Any, outer: list[Intervals], at: int, to: int) -> Any:
    """Split one group further over the places of another one, which is whole then. Gives the new array of workers.

    Args:
        outer: the intervals of each group; those of the group that is split further are replaced in the list. The new
            ones lie inside of the old ones, unless the old ones are too uneven.
        at, to: the group that gives its places away, and the one that gets them.
    """
    longest, extent = max(stop - start for start, stop in outer[to]), outer[to][-1][1]
    if longest > 2 * -(-extent // len(outer[to])):
        outer[to] = balanced(extent, len(outer[to]))
    spread = Spread(tuple(range(len(outer))), grid, tuple(tuple(one or ((0, 1),)) for one in outer))
    spread = spread.whole_along(at, [to])
    outer[to] = spread.along(to)
    return spread.workers


def _with_units(context: Context, grid: Any, intervals: list[Intervals], shape: Shape) -> KnownLayout:
    """The layout of a shape, from the intervals of its dims of extent other than 1."""
    rest = iter(intervals)
    full = [((0, 1),) if n == 1 else next(rest) for n in shape]
    return context.layout(grid.reshape([len(one) for one in full]), full)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[tuple[int, int], list[int]]]:
    """The groups of dims of equal volume of two shapes without extents of 1.

    Returns: for each group, the first dim before the reshape and the one behind the last, and the extents after it.
    """
    found, i, k = [], 0, 0
    while i < len(before):
        j, m = i + 1, k + 1
        a, b = before[i], after[k]
        while a != b:
            if a < b:
                a, j = a * before[j], j + 1
            else:
                b, m = b * after[m], m + 1
        found.append(((i, j), list(after[k:m])))
        i, k = j, m
    return found


def _scaled(intervals: Intervals, by: int, unit: int = 1) -> Intervals:
    """Intervals counted in other cells: ``unit`` of the old cells are ``by`` of the new ones."""
    return tuple((start // unit * by, stop // unit * by) for start, stop in intervals)


def _whole(extents: Sequence[int]) -> list[Intervals]:
    return [((0, n),) for n in extents]


def _as_it_is(before: Sequence[int], after: Sequence[int], intervals: Sequence[Intervals]) -> _Fit | None:
    """The splits as they are, if each worker's cells are a box of the other shape, too; else None.

    They are if only the outermost dim is split, at places where cells of the outermost dims of both shapes end. They
    are as well if the outermost dim of one shape is split into single cells, and the same holds inside of each cell.
    """
    units = gcd(before[0], after[0])
    unit = before[0] // units
    if all(len(along) == 1 for along in intervals[1:]) and all(stop % unit == 0 for _, stop in intervals[0]):
        return _Fit(list(intervals), [_scaled(intervals[0], after[0] // units, unit), *_whole(after[1:])])
    if units == 1 or len(intervals[0]) % units:
        return None
    if before[0] == units and intervals[0] == balanced(units, units):
        inner = _as_it_is(before[1:], [after[0] // units, *after[1:]], intervals[1:])
        return inner and _Fit(list(intervals), _repeated(inner.after, units))
    if after[0] == units:
        first = intervals[0][: len(intervals[0]) // units]
        if intervals[0] != _repeated([first], units)[0]:
            return None
        inner = _as_it_is([unit, *before[1:]], after[1:], [first, *intervals[1:]])
        return inner and _Fit(list(intervals), [balanced(units, units), *inner.after])
    return None


def _fit(before: Sequence[int], after: Sequence[int], places: int) -> _Fit | None:
    """Splits over a number of places, as even as possible, for which each worker's cells are a box of both shapes.

    Returns: None if there are no such splits.
    """
    if places == 1:
        return _Fit(_whole(before), _whole(after))
    if not before or not after:
        return None
    units = gcd(before[0], after[0])
    if units >= places:
        split = balanced(units, places)
        return _Fit(
            [_scaled(split, before[0] // units), *_whole(before[1:])],
            [_scaled(split, after[0] // units), *_whole(after[1:])],
        )
    # split the outermost dim of one shape into single cells, and each of them further
    if units == 1 or places % units:
        return None
    if before[0] == units:
        inner = _fit(before[1:], [after[0] // units, *after[1:]], places // units)
        return inner and _Fit([balanced(units, units), *inner.before], _repeated(inner.after, units))
    if after[0] == units:
        inner = _fit([before[0] // units, *before[1:]], after[1:], places // units)
        return inner and _Fit(_repeated(inner.before, units), [balanced(units, units), *inner.after])
    return None


def _repeated(splits: list[Intervals], times: int) -> list[Intervals]:
    """Splits in which the outermost dim is longer by a factor, and each part of it is split as the whole was."""
    first, *rest = splits
    extent = first[-1][1]
    return [tuple((start + n * extent, stop + n * extent) for n in range(times) for start, stop in first), *rest]
