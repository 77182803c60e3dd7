"""Buffers of the published interface. Our message memory belongs to the communicator; layers only check these."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distdl.environment.arguments import checks_arguments
from distdl.environment.types import Count


class MPIExpandableBuffer:
    """A flat array that grows to the largest size that was asked of it, and views of it.

    Attributes:
        raw_buffer: 1-d array of exactly ``capacity`` elements.
        views: from a shape to the view of that shape.
    """

    @checks_arguments
    def __init__(self, dtype: Any, initial_capacity: Count = 0) -> None:
        self.dtype = dtype
        self.raw_buffer: NDArray[Any] = _empty(dtype, initial_capacity)
        self.views: dict[tuple[int, ...], NDArray[Any]] = {}

    @property
    def capacity(self) -> int:
        return self.raw_buffer.size

    @checks_arguments
    def expand(self, new_capacity: Count) -> None:
        """Grow to this many elements, keeping the values; a buffer that is large enough stays the same object."""
        if new_capacity > self.capacity:
            grown = _empty(self.dtype, new_capacity)
            grown[: self.capacity] = self.raw_buffer
            self.raw_buffer = grown
            for shape in self.views:
                self.views[shape] = self._view(shape)

    @checks_arguments
    def allocate_view(self, view_shape: Sequence[Count]) -> None:
        """Have a view of this shape, and as much capacity as it needs."""
        shape = tuple(int(extent) for extent in view_shape)
        self.expand(prod(shape))
        self.views[shape] = self._view(shape)

    @checks_arguments
    def get_view(self, view_shape: Sequence[Count]) -> NDArray[Any]:
        """The view of this shape, made if there is none."""
        shape = tuple(int(extent) for extent in view_shape)
        if shape not in self.views:
            self.allocate_view(shape)
        return self.views[shape]

    def _view(self, shape: tuple[int, ...]) -> NDArray[Any]:
        return self.raw_buffer[: prod(shape)].reshape(shape)


def _empty(dtype: Any, capacity: int) -> NDArray[Any]:
    """Memory for so many elements.

    Raises: TypeError for what is no dtype of NumPy's; ValueError for more than can be addressed.
    """
    try:
        if dtype is None:  # which NumPy takes for float64
            raise TypeError
        nbytes = np.dtype(dtype).itemsize * capacity
    except TypeError:
        raise TypeError(f"a buffer needs a dtype of NumPy's; got {dtype!r}") from None
    if nbytes > sys.maxsize:
        raise ValueError(f"a buffer needs at most {sys.maxsize} bytes; got a capacity of {capacity} {np.dtype(dtype)}")
    return np.empty(capacity, dtype=dtype)


class MPIBufferManager:
    """Expandable buffers by dtype.

    Attributes:
        buffers_map: from a dtype, as it was asked for, to its buffers.
    """

    def __init__(self) -> None:
        self.buffers_map: dict[Any, list[MPIExpandableBuffer]] = {}

    @checks_arguments
    def request_buffers(self, num_buffers: Count, dtype: Any) -> list[MPIExpandableBuffer]:
        """The first ``num_buffers`` buffers of a dtype; those that are missing are made."""
        buffers = self.buffers_map.setdefault(dtype, [])
        buffers += [MPIExpandableBuffer(dtype) for _ in range(num_buffers - len(buffers))]
        return buffers[:num_buffers]
