"""Which workers talk to which: the groups behind broadcasts, sum-reductions and all-sum-reductions, as array slices.

Everything here is about arrays of worker numbers, one axis for each axis of a partition. A group is a strided view, so
its cost does not depend on how many workers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from distdl.environment.arguments import checks_arguments
from distdl.environment.types import is_array_of_whole_numbers
from distdl.transport.communicator import Group as Group
from distdl.transport.communicator import IntArray as IntArray
from distdl.transport.communicator import LongGroup


@checks_arguments
def dims(shape: Sequence[int]) -> str:
    """A shape for people: ``2x3x2``."""
    return "x".join(str(int(extent)) for extent in shape)


def describe(workers: IntArray) -> str:
    """Shape and numbers, for people: ``2x2 on workers 4..7``; long lists are shortened."""
    listed = workers.ravel()
    if listed.size > 2 and (np.diff(listed) == 1).all():
        return f"{dims(workers.shape)} on workers {listed[0]}..{listed[-1]}"
    names = ", ".join(str(worker) for worker in listed[:16].tolist())
    return f"{dims(workers.shape)} on workers {names}{', ..' if listed.size > 16 else ''}"


def whole_numbers(values: ArrayLike, what: str) -> IntArray:
    """An array of whole numbers.

    Raises: TypeError for anything else.
    """
    if not is_array_of_whole_numbers(values) or np.asarray(values).dtype == bool:  # booleans may be meant for a mask
        raise TypeError(f"{what} needs whole numbers; got {values!r}")
    return np.asarray(values, dtype=np.int64)


def topology(workers: IntArray, shape: ArrayLike, how_to_start: Callable[[int], str] = lambda workers: "") -> IntArray:
    """The workers, row-major, over a grid of this shape, one entry of which may be -1.

    Args:
        how_to_start: what the error adds where there are too few workers; see :meth:`Communicator.how_to_start`.
    Raises: ValueError unless the grid has as many places as there are workers; TypeError for a list of lists.
    """
    numbers = np.atleast_1d(whole_numbers(shape, "a topology"))
    if numbers.ndim > 1:
        raise TypeError(f"a topology needs whole numbers, one for each axis; got {shape!r}")
    extents: list[int] = numbers.tolist()
    known = prod(extent for extent in extents if extent != -1)
    if extents.count(-1) == 1 and known > 0 and workers.size % known == 0:
        extents[extents.index(-1)] = workers.size // known
    if not extents or min(extents) < 1 or prod(extents) != workers.size:
        places, fewest = max(prod(extents), 0), abs(prod(extents))
        there = "is 1 worker" if workers.size == 1 else f"are {workers.size} workers"
        hint = f"; P[:{fewest}] has the first {fewest} of them" if 0 < fewest < workers.size else ""
        hint = how_to_start(fewest) if fewest > workers.size else hint
        raise ValueError(
            f"a topology must have as many places as there are workers; {dims(extents)} has {places} "
            f"places, and there {there} ({describe(workers)}){hint}"
        )
    return workers.reshape(extents)


def check_spread(
    few: Sequence[int], many: Sequence[int], rule: str = "Broadcast", names: tuple[str, str] = ("P_x", "P_y")
) -> None:
    """Check that a partition of shape ``few`` spreads over one of shape ``many``.

    Both are aligned at their last axis, ``few`` being extended on the left with ones; then each of its axes must be 1
    or equal the other's.

    Raises: ValueError that names the axis and both shapes.
    """
    few_name, many_name = names
    both = f"({few_name}: {dims(few)}, {many_name}: {dims(many)})"
    if len(few) > len(many):
        raise ValueError(
            f"{rule} needs {few_name} to have at most as many axes as {many_name}; "
            f"{few_name} has {len(few)} and {many_name} has {len(many)} {both}"
        )
    padded = (1,) * (len(many) - len(few)) + tuple(few)
    for axis, (n, m) in enumerate(zip(padded, many, strict=True)):
        if n not in (1, m):
            raise ValueError(
                f"{rule} needs every axis of {few_name} to be 1 or to equal {many_name}'s; "
                f"axis {axis} is {n} in {few_name} and {m} in {many_name} {both}"
            )


def source_of(few: IntArray, target: Sequence[int]) -> int:
    """The worker in ``few`` that feeds the worker at index ``target`` of the larger partition."""
    index = target[len(target) - few.ndim :]
    return int(few[tuple(0 if n == 1 else i for n, i in zip(few.shape, index, strict=True))])


def targets_of(few: IntArray, many: IntArray, source: Sequence[int]) -> IntArray:
    """The workers in ``many`` that are fed by the worker at index ``source`` of ``few``, row-major (a view)."""
    index = [slice(None) if n == 1 else slice(i, i + 1) for n, i in zip(few.shape, source, strict=True)]
    return many[(..., *index)]


def line_of(workers: IntArray, axes: Sequence[int], index: Sequence[int]) -> IntArray:
    """The workers that one reaches from ``index`` by moving along the given axes (a view)."""
    return workers[tuple(slice(None) if axis in axes else slice(i, i + 1) for axis, i in enumerate(index))]


def check_axes(axes: int | Sequence[int], dim: int, what: str) -> tuple[int, ...]:
    """Partition axes as a sorted tuple of numbers from 0 to ``dim - 1``; negative ones count from the end.

    Raises: ValueError for an axis that does not exist or is named twice; TypeError for what is no whole number.
    """
    try:
        listed = [index(axis) for axis in (axes if isinstance(axes, Iterable) else [axes])]
    except TypeError:
        raise TypeError(f"{what} needs axes as whole numbers; got {axes!r}") from None
    if any(not -dim <= axis < dim for axis in listed):
        raise ValueError(f"{what} needs axes of a partition that has {dim} of them, 0 to {dim - 1}; got {listed}")
    positive = sorted(axis % dim for axis in listed)
    if len(set(positive)) != len(positive):
        raise ValueError(f"{what} needs each axis at most once; got {listed} of a partition with {dim} axes")
    return tuple(positive)


def keep_axes(key: Any, workers: IntArray) -> IntArray:
    """``workers[key]`` for a key of integers, slices and ``...``, where an integer keeps its axis, with one place."""
    keys = key if isinstance(key, tuple) else (key,)
    kinds = (int, np.integer, slice, type(Ellipsis))
    if not all(isinstance(one, kinds) and not isinstance(one, bool) for one in keys):
        raise TypeError(f"a partition is sliced by integers, slices and '...'; got {key!r}")
    workers[keys]  # raises IndexError for a place or an axis that does not exist
    return workers[tuple(slice(one, one + 1 or None) if isinstance(one, (int, np.integer)) else one for one in keys)]


def root_first(root: int, workers: IntArray) -> Group:
    """The group of ``root`` and ``workers``: the root, then the others in their order."""
    return LongGroup((root, *(worker for worker in workers.ravel().tolist() if worker != root)))


def teams_of(
    few: IntArray, many: IntArray, worker: int | None = None
) -> tuple[list[tuple[int, IntArray]], list[tuple[int, IntArray]]]:
    """Who feeds whom when ``few`` spreads over ``many``: pairs of a root and a view of the workers that it feeds.

    Returns: the pairs whose root is ``worker``, and those in which ``worker`` is fed; each list has at most one entry.
        Without a worker: all pairs, and nothing.
    """
    if worker is None:
        return [(int(few[at]), targets_of(few, many, at)) for at in np.ndindex(few.shape)], []
    led = [(worker, targets_of(few, many, at)) for at in np.argwhere(few == worker).tolist()]
    sources = [source_of(few, at) for at in np.argwhere(many == worker).tolist()]
    fed = [(s, targets_of(few, many, at)) for s in sources for at in np.argwhere(few == s).tolist()]
    return led, fed


def first_of_each(few: Sequence[int], many: IntArray) -> IntArray:
    """For each worker of a partition of shape ``few``, the first of the workers in ``many`` that it feeds.

    The axes are those of ``many``, so the result broadcasts against it.
    """
    padded = (1,) * (many.ndim - len(few)) + tuple(few)
    return many[tuple(slice(0, n) for n in padded)]
