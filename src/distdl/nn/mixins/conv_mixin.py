"""Which inputs a convolution reads: the published form of :mod:`distdl.geometry.windows`."""

from __future__ import annotations

from typing import Any

import numpy as np

from distdl.geometry.windows import sliding, sliding_extent
from distdl.partition.groups import IntArray


class ConvMixin:
    """Windows of a convolution. All arguments are sequences with a number for each dim, in cells."""

    def _compute_out_shape(self, shape: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> IntArray:
        """Number of outputs along each dim."""
        options = zip(shape, kernel_size, stride, padding, dilation, strict=True)
        return np.array([sliding_extent(n, k, s, (p, p), d) for n, k, s, p, d in options])

    def _compute_min_input_range(
        self, idx: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any
    ) -> IntArray:
        """The first cell that output ``idx`` reads. Cells below 0 are padding."""
        options = zip(idx, kernel_size, stride, padding, dilation, strict=True)
        return np.array([sliding((i, i + 1), k, s, p, d)[0] for i, k, s, p, d in options])

    def _compute_max_input_range(
        self, idx: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any
    ) -> IntArray:
        """The last cell that output ``idx`` reads."""
        options = zip(idx, kernel_size, stride, padding, dilation, strict=True)
        return np.array([sliding((i, i + 1), k, s, p, d)[1] - 1 for i, k, s, p, d in options])
