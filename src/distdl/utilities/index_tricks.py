"""Published helpers from the place in a flattened array to its index."""

from collections.abc import Sequence

import numpy as np

from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import IntArray


@checks_arguments
def cartesian_index_c(shape: Sequence[int], i: int) -> IntArray:
    """The index of element ``i`` in row-major (C) order."""
    return np.array(np.unravel_index(i, shape))


@checks_arguments
def cartesian_index_f(shape: Sequence[int], i: int) -> IntArray:
    """The index of element ``i`` in column-major (Fortran) order."""
    return np.array(np.unravel_index(i, shape, order="F"))
