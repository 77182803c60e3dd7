"""Published helpers for sizes and places of blocks: :mod:`distdl.geometry.boxes` with NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from distdl.geometry.boxes import balanced
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import IntArray, check_axes

Slices = tuple[slice, ...]


def _interval(P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike) -> tuple[IntArray, IntArray]:
    """Where the block at an index starts and stops, along each dim."""
    lengths = [np.size(one) for one in (P_shape, index, shape) if np.ndim(one)]
    if len(set(lengths)) > 1:
        raise ValueError(f"P_shape, index and shape need one length, to broadcast; got lengths {lengths}")
    workers, place, extent = np.broadcast_arrays(np.atleast_1d(P_shape), np.atleast_1d(index), np.atleast_1d(shape))
    intervals = [balanced(int(n), int(p))[int(i)] for p, i, n in zip(workers, place, extent, strict=True)]
    starts, stops = np.array(intervals, dtype=np.int64).reshape(-1, 2).T
    return (starts, stops) if lengths else (starts[0], stops[0])


@checks_arguments
def compute_subshape(P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike) -> IntArray:
    """Shape of the block at an index of a partition, when a tensor is split as evenly as possible.

    Args:
        P_shape, index, shape: number of workers, place, and global extent, for each dim.
    Returns: the extents of the block, in elements, as NumPy integers; the remainder goes to the lowest places.
    Raises: ValueError if their lengths differ.
    """
    start, stop = _interval(P_shape, index, shape)
    return stop - start


@checks_arguments
def compute_start_index(P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike) -> IntArray:
    """The first cell of that block, along each dim."""
    return _interval(P_shape, index, shape)[0]


@checks_arguments
def compute_stop_index(P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike) -> IntArray:
    """The cell behind the last one of that block, along each dim."""
    return _interval(P_shape, index, shape)[1]


@checks_arguments
def compute_intersection(
    r0_start_index: ArrayLike, r0_stop_index: ArrayLike, r1_start_index: ArrayLike, r1_stop_index: ArrayLike
) -> tuple[IntArray, IntArray, IntArray]:
    """What two boxes share: its first cell, the cell behind its last, and its shape (0 where they do not meet)."""
    start = np.maximum(np.atleast_1d(r0_start_index), np.atleast_1d(r1_start_index))
    stop = np.minimum(np.atleast_1d(r0_stop_index), np.atleast_1d(r1_stop_index))
    return start, stop, np.maximum(stop - start, 0)


@checks_arguments
def assemble_slices(start_index: ArrayLike, stop_index: ArrayLike) -> Slices:
    """The index that cuts a box out of a tensor."""
    bounds = zip(np.atleast_1d(start_index), np.atleast_1d(stop_index), strict=True)
    return tuple(slice(int(start), int(stop), 1) for start, stop in bounds)


@checks_arguments
def compute_nd_slice_shape(slices: Sequence[slice]) -> tuple[int, ...]:
    """Extents of what slices with a start and a stop cut out."""
    return tuple(cut.stop - cut.start for cut in slices)


@checks_arguments
def compute_nd_slice_volume(slices: Sequence[slice]) -> int:
    """Number of elements that they cut out."""
    return prod(compute_nd_slice_shape(slices))


@checks_arguments
def range_index(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All indices of an array of this shape, row-major."""
    yield from product(*(range(int(extent)) for extent in shape))


@checks_arguments
def worker_layout(shape: Sequence[int]) -> IntArray:
    """The ranks of a partition of this shape, at their indices."""
    extents = tuple(int(extent) for extent in shape)
    return np.arange(prod(extents)).reshape(extents)


@checks_arguments
def assemble_index_filter(index: Sequence[int], axes: int | Sequence[int], invert: bool = False) -> Slices:
    """Slices that keep the given axes at this index and let the others run; with ``invert`` the other way round."""
    kept = set(check_axes(axes, len(index), "an index filter"))
    return tuple(
        slice(int(place), int(place) + 1) if (axis in kept) != invert else slice(None)
        for axis, place in enumerate(index)
    )


@checks_arguments
def filtered_range_index(shape: Sequence[int], index_filter: Sequence[slice | int]) -> Iterator[tuple[int, ...]]:
    """The indices of an array of this shape, row-major, that a filter of slices or places lets through."""
    ranges = [range(int(extent)) for extent in shape]
    allowed = [places[let] for places, let in zip(ranges, index_filter, strict=True)]
    yield from product(*((places,) if isinstance(places, int) else places for places in allowed))


@checks_arguments
def compute_partition_intersection(
    P_r_shape: ArrayLike, r_index: ArrayLike, P_s_shape: ArrayLike, s_index: ArrayLike, x_global_shape: ArrayLike
) -> Any:
    """What the block at ``r_index`` of one partition shares with the block at ``s_index`` of another one.

    Both split the tensor as evenly as possible.

    Returns: slices of the block at ``r_index``, or None if they share nothing.
    """
    own = _interval(P_r_shape, r_index, x_global_shape)
    start, stop, shared = compute_intersection(*own, *_interval(P_s_shape, s_index, x_global_shape))
    return assemble_slices(start - own[0], stop - own[0]) if shared.all() else None
