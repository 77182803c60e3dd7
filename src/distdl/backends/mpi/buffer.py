"""Buffers of the published interface. Our message memory belongs to the communicator; layers only check these."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray


class MPIExpandableBuffer:
    """A flat array that grows to the largest size that was asked of it, and views of it.

    Attributes:
        raw_buffer: 1-d array of exactly ``capacity`` elements.
        views: from a shape to the view of that shape.
    """

    def __init__(self, dtype: Any, initial_capacity: int = 0) -> None:
        self.dtype = dtype
        self.raw_buffer: NDArray[Any] = np.empty(initial_capacity, dtype=dtype)
        self.views: dict[tuple[int, ...], NDArray[Any]] = {}

    @property
    def capacity(self) -> int:
        return self.raw_buffer.size

    def expand(self, new_capacity: int) -> None:
        """Grow to this many elements, keeping the values; a buffer that is large enough stays the same object."""
        if new_capacity > self.capacity:
            grown = np.empty(new_capacity, dtype=self.dtype)
            grown[: self.capacity] = self.raw_buffer
            self.raw_buffer = grown
            for shape in self.views:
                self.views[shape] = self._view(shape)

    def allocate_view(self, view_shape: Sequence[int]) -> None:
        """Have a view of this shape, and as much capacity as it needs."""
        shape = tuple(int(extent) for extent in view_shape)
        self.expand(prod(shape))
        self.views[shape] = self._view(shape)

    def get_view(self, view_shape: Sequence[int]) -> NDArray[Any]:
        """The view of this shape, made if there is none."""
        shape = tuple(int(extent) for extent in view_shape)
        if shape not in self.views:
            self.allocate_view(shape)
        return self.views[shape]

    def _view(self, shape: tuple[int, ...]) -> NDArray[Any]:
        return self.raw_buffer[: prod(shape)].reshape(shape)


class MPIBufferManager:
    """Expandable buffers by dtype.

    Attributes:
        buffers_map: from a dtype, as it was asked for, to its buffers.
    """

    def __init__(self) -> None:
        self.buffers_map: dict[Any, list[MPIExpandableBuffer]] = {}

    def request_buffers(self, num_buffers: int, dtype: Any) -> list[MPIExpandableBuffer]:
        """The first ``num_buffers`` buffers of a dtype; those that are missing are made."""
        buffers = self.buffers_map.setdefault(dtype, [])
        buffers += [MPIExpandableBuffer(dtype) for _ in range(num_buffers - len(buffers))]
        return buffers[:num_buffers]
