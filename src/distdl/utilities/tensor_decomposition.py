"""Published helpers for the blocks of a tensor: arrays of shape ``P_shape + (dim,)``, an entry for each index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import IntArray
from distdl.utilities.slicing import assemble_slices, compute_intersection, compute_subshape, range_index


@checks_arguments
def compute_subtensor_shapes_balanced(global_tensor_structure: Any, P_shape: Sequence[int]) -> IntArray:
    """Shapes of the blocks of a tensor that is split as evenly as possible.

    Args:
        global_tensor_structure: anything with the global ``shape``.
    """
    shape = _shape_of(global_tensor_structure)
    blocks = [compute_subshape(P_shape, index, shape) for index in range_index(P_shape)]
    return np.array(blocks).reshape(*(int(n) for n in P_shape), len(shape))


@checks_arguments
def compute_subtensor_shapes_unbalanced(
    local_tensor_structure: Any, P_x: Partition, P_y: Partition | None = None
) -> IntArray | None:
    """Shapes of the blocks that the workers of a partition have. Collective over the workers of both partitions.

    Args:
        local_tensor_structure: anything with the local ``shape``; used on the workers of ``P_x``.
        P_x: the partition that has the tensor.
        P_y: other workers that learn of it.
    Returns: None on workers outside both.
    """
    blocks = None
    if P_x.active:
        local = _shape_of(local_tensor_structure)
        blocks = np.array(P_x.allgather_data(local)).reshape(*P_x.shape, len(local))
    if P_y is None:
        return blocks
    everyone = P_x | P_y
    known: IntArray | None = everyone.broadcast_data(blocks, root=0) if everyone.active else None
    return known


def _shape_of(structure: Any) -> list[int]:
    if not hasattr(structure, "shape"):
        raise TypeError(f"a tensor is needed, or what has its shape; got a {type(structure).__name__}")
    return [int(extent) for extent in structure.shape]


@checks_arguments
def compute_subtensor_start_indices(shapes: IntArray) -> IntArray:
    """The first cell of each block, of blocks of these shapes that lie side by side in a grid."""
    return compute_subtensor_stop_indices(shapes) - shapes


@checks_arguments
def compute_subtensor_stop_indices(shapes: IntArray) -> IntArray:
    """The cell behind the last one of each block."""
    return np.stack([shapes[..., dim].cumsum(axis=dim) for dim in range(shapes.shape[-1])], axis=-1)


@checks_arguments
def compute_subtensor_intersection_slice(
    x_start_index: ArrayLike, x_stop_index: ArrayLike, y_start_index: ArrayLike, y_stop_index: ArrayLike
) -> Any:
    """What block x shares with block y: slices of block x, or None if they share nothing."""
    start, stop, shared = compute_intersection(x_start_index, x_stop_index, y_start_index, y_stop_index)
    origin = np.atleast_1d(x_start_index)
    return assemble_slices(start - origin, stop - origin) if shared.all() else None
