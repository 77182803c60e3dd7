"""Published helpers for sizes of blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from distdl.boxes import balanced
from distdl.groups import IntArray


def compute_subshape(P_shape: ArrayLike, index: ArrayLike, shape: ArrayLike) -> IntArray:
    """Shape of the block at an index of a partition, when a tensor is split as evenly as possible.

    Args:
        P_shape, index, shape: number of workers, place, and global extent, for each dim.
    Returns: the extents of the block, in elements, as NumPy integers; the remainder goes to the lowest places.
    Raises: ValueError if their lengths differ.
    """
    workers, place, extent = np.broadcast_arrays(np.atleast_1d(P_shape), np.atleast_1d(index), np.atleast_1d(shape))
    lengths = [np.size(one) for one in (P_shape, index, shape) if np.ndim(one)]
    if len(set(lengths)) > 1:
        raise ValueError(f"compute_subshape needs arrays of one length; got lengths {lengths}")
    runs = [balanced(int(n), int(p))[int(i)] for p, i, n in zip(workers, place, extent, strict=True)]
    sizes = np.array([stop - start for start, stop in runs])
    return sizes if lengths else sizes[0]
