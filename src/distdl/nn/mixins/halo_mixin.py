"""Sizes of halos: how far the inputs that a worker's outputs read reach beyond the block that it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distdl.partition.groups import IntArray
from distdl.utilities.slicing import compute_start_index, compute_stop_index
from distdl.utilities.tensor_decomposition import (
    compute_subtensor_shapes_balanced,
    compute_subtensor_start_indices,
    compute_subtensor_stop_indices,
)
from distdl.utilities.torch import TensorStructure

Exchange = tuple[IntArray, IntArray, IntArray, IntArray] | tuple[None, None, None, None]


class HaloMixin:
    """Halo sizes for a layer that slides a kernel. Inherit it with :class:`ConvMixin` or :class:`PoolingMixin`."""

    _compute_out_shape: Any
    _compute_min_input_range: Any
    _compute_max_input_range: Any

    def _compute_exchange_info(
        self,
        x_global_shape: Sequence[int],
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        partition_active: bool,
        partition_shape: Sequence[int],
        partition_index: Any,
        subtensor_shapes: Any = None,
    ) -> Exchange:
        """Sizes for a :class:`HaloExchange`, and which cells of its result the layer reads.

        The output is split as evenly as possible. Cells beyond the border of the tensor do not belong to a halo.

        Args:
            x_global_shape: extents of the input, in elements.
            kernel_size, stride, padding, dilation: for the last dims; the first ones get 1 (padding 0).
            partition_active, partition_shape, partition_index: the attributes of the partition.
            subtensor_shapes: local shape of the input at each index, an array of shape ``partition_shape + (dim,)``;
                None for as even a split as possible.
        Returns: four ``(dim, 2)`` arrays of integers, or four times None where the partition is not active: the halo
            before and after the block, in cells; how much of it is received; how much the neighbours before and after
            receive from here; the range of block and halo that the outputs read. If they do not read the first cells of
            the block, there is no halo on that side and the range begins above 0.
        """
        if not partition_active:
            return None, None, None, None
        shape = tuple(int(n) for n in partition_shape)
        if subtensor_shapes is None:
            whole = TensorStructure()
            whole.shape = x_global_shape
            subtensor_shapes = compute_subtensor_shapes_balanced(whole, shape)
        blocks = np.asarray(subtensor_shapes)
        geometry = [_extended(option, len(shape), 1) for option in (kernel_size, stride, dilation)]
        geometry.insert(2, _extended(padding, len(shape), 0))

        def reach(index: Sequence[int]) -> IntArray:
            return self._compute_reach(x_global_shape, geometry, shape, index, blocks)

        index = tuple(int(i) for i in partition_index)
        signed = reach(index)
        halo = np.maximum(signed, 0)
        send = np.zeros_like(halo)
        for dim, side in np.ndindex(halo.shape):
            neighbour = (*index[:dim], index[dim] + (-1, 1)[side], *index[dim + 1 :])
            if 0 <= neighbour[dim] < shape[dim]:
                send[dim, side] = max(reach(neighbour)[dim, 1 - side], 0)
        needed = np.stack([np.maximum(-signed[:, 0], 0), blocks[index] + halo.sum(axis=1)], axis=1)
        return halo, halo.copy(), send, needed

    def _compute_reach(
        self,
        extents: Sequence[int],
        geometry: Sequence[Sequence[int]],
        shape: Sequence[int],
        index: Sequence[int],
        blocks: IntArray,
    ) -> IntArray:
        """How far the inputs needed at an index reach beyond its block, per dim and side; negative if not as far."""
        outputs = self._compute_out_shape(extents, *geometry)
        start, stop = compute_start_index(shape, index, outputs), compute_stop_index(shape, index, outputs)
        first = np.maximum(self._compute_min_input_range(start, *geometry), 0)
        last = np.minimum(self._compute_max_input_range(stop - 1, *geometry), np.asarray(extents) - 1)
        before = compute_subtensor_start_indices(blocks)[tuple(index)] - first
        behind = last + 1 - compute_subtensor_stop_indices(blocks)[tuple(index)]
        reach = np.stack([before, behind], axis=1)
        reach[stop == start] = 0  # without outputs there is nothing to read
        return reach


def _extended(option: Sequence[int], dim: int, fill: int) -> list[int]:
    given = [int(n) for n in np.atleast_1d(np.asarray(option))]
    return [fill] * (dim - len(given)) + given
