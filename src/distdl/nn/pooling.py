"""The distributed pooling layers whose windows slide: largest cell, mean, and power mean."""

from __future__ import annotations

from math import isinf, isnan, prod
from operator import index
from typing import Any

import torch
from torch.nn import functional

from distdl.geometry.boxes import Box, Shape
from distdl.nn.module import Option
from distdl.nn.window_pooling import Piece, Pooling, cut, in_space
from distdl.partition import Partition
from distdl.tensors.connection import outside
from distdl.tensors.dtypes import HALVES


class MaxPooling(Pooling):
    """The largest cell of each window.

    Args:
        return_indices: return also where in space each cell stands, as torch does: its number in the flattened global
            space.
    """

    return_indices = Option[bool]()

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        buffer_manager: Any = None,
        *,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> None:
        super().__init__(P_x, kernel_size, stride, padding, dilation, buffer_manager, ceil_mode, (return_indices,))
        self.return_indices = bool(return_indices)

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        found: Any = self._pool(x, (0,) * self.space)
        y: torch.Tensor = found[0] if self.return_indices else found
        return y

    def operate(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        return cut(self._pool(_lowest(x, piece.behind), piece.before), piece.result)

    def forward(self, x: torch.Tensor) -> Any:
        if not self.return_indices:
            return super().forward(x)
        if self.P_x.comm.rank not in self.P_x:
            return outside(x), torch.zeros_like(x, dtype=torch.int64)
        x, piece = self._window(x)
        indices = torch.zeros(piece.result, dtype=torch.int64, device=x.device)

        def pool(window: torch.Tensor) -> torch.Tensor:
            nonlocal indices
            window = _lowest(window, piece.behind)
            y, found = self._pool(window, piece.before)
            if 0 not in piece.result:
                indices = in_space(cut(found, piece.result), window.shape[2:], piece.first, piece.extents)
            return cut(y, piece.result)

        return self._local(pool, x, piece), indices

    def _pool(self, x: torch.Tensor, padding: Shape) -> Any:
        pool = getattr(functional, f"max_pool{self.space}d")
        geometry = (self._sliding.kernel, self._sliding.stride, padding, self._sliding.dilation)
        return pool(x, *geometry, return_indices=self.return_indices)


def _lowest(x: torch.Tensor, behind: Shape) -> torch.Tensor:
    """The window, and behind it cells that are never the largest."""
    if not behind:
        return x
    lowest = float("-inf") if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    return functional.pad(x, behind, value=lowest)


class Averaging(Pooling):
    """Base of the layers that average each window. Cells outside the tensor are zeros, and those of the padding count.

    What a window has beyond the padding (``ceil_mode``) never does.
    """

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        return _average(x, self._sliding.kernel, self._sliding.stride, (0,) * self.space, 1)

    def operate(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        x = functional.pad(x, piece.behind) if piece.behind else x
        geometry = (self._sliding.kernel, self._sliding.stride, piece.before)
        if isinstance(piece.divisor, int):
            return cut(_average(x, *geometry, piece.divisor), piece.result)
        # where a tensor has half of float32's width, torch adds up and divides in float32, and rounds once
        wide = x.float() if x.dtype in HALVES else x
        sums = cut(_average(wide, *geometry, 1), piece.result)
        rounding = None if sums.dtype.is_floating_point else "trunc"
        means = torch.div(sums, piece.divisor.to(sums.device), rounding_mode=rounding)
        return means if wide is x else means.to(self._results.of(x) or x.dtype)

    def divisor(self, outputs: Box, extents: Shape) -> int | torch.Tensor:
        return self._counted(outputs, extents, padded=True)

    def _counted(self, outputs: Box, extents: Shape, padded: bool) -> int | torch.Tensor:
        """How many cells each of these outputs averages; whether those of the padding count is ``padded``."""
        counts = [self._sliding.counts(dim, extents[dim], along, padded) for dim, along in enumerate(outputs)]
        if all(min(along) == max(along) for along in counts):
            return prod(along[0] for along in counts)
        return torch.stack(torch.meshgrid(*map(torch.tensor, counts), indexing="ij")).prod(dim=0)


class AveragePooling(Averaging):
    """The mean of each window. It has no dilation.

    Args:
        count_include_pad: whether cells of the padding, which are zeros, count. What a window has beyond the padding
            (``ceil_mode``) never does.
        divisor_override: divides the sums, whatever counts. (torch has it in 2-d and 3-d; here 1-d has it, too.)
    """

    count_include_pad = Option[bool]()
    divisor_override = Option[int | None]()

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        buffer_manager: Any = None,
        *,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        options = (count_include_pad, divisor_override)
        super().__init__(P_x, kernel_size, stride, padding, dilation, buffer_manager, ceil_mode, options)
        self.count_include_pad = bool(count_include_pad)
        self.divisor_override = _divisor(type(self).__name__, divisor_override)
        if any(n > 1 for n in self._sliding.dilation):
            raise ValueError(f"{type(self).__name__} has no dilation; got {dilation}")

    def divisor(self, outputs: Box, extents: Shape) -> int | torch.Tensor:
        if self.divisor_override is not None:
            return self.divisor_override
        return self._counted(outputs, extents, self.count_include_pad)


def _divisor(name: str, divisor: Any) -> int | None:
    try:
        number = None if divisor is None else index(divisor)
    except TypeError:
        number = 0
    if number == 0:
        raise ValueError(f"{name} needs divisor_override to be a whole number other than 0, or None; got {divisor!r}")
    return number


def _average(x: torch.Tensor, kernel: Shape, stride: Shape, padding: Shape, divisor: int) -> torch.Tensor:
    if len(kernel) == 1:  # as torch computes it; its operator in one dim has no divisor
        return _average(x.unsqueeze(-2), (1, *kernel), (1, *stride), (0, *padding), divisor).squeeze(-2)
    pool = functional.avg_pool2d if len(kernel) == 2 else functional.avg_pool3d
    return pool(x, kernel, stride, padding, divisor_override=divisor)


class PowerPooling(Averaging):
    r"""The power mean times the size of the kernel, as torch has it: :math:`y = (k \cdot \text{mean}(x^p))^{1/p}`.

    The mean is over the cells that a window has in the tensor. Where p is infinite, y is the largest absolute value;
    where it is minus infinite, the smallest.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``.
        norm_type: the power p, not 0.
        kernel_size: extents of the window, in cells.
        stride: distance between windows; 1 by default as in all pooling here, None for the kernel's size.
        ceil_mode: whether the last window may reach beyond the tensor, if it starts in it.
    """

    norm_type = Option[float]()

    def __init__(
        self, P_x: Partition, norm_type: float, kernel_size: Any, stride: Any = 1, ceil_mode: bool = False
    ) -> None:
        super().__init__(P_x, kernel_size, stride, ceil_mode=ceil_mode, options=(norm_type,))
        if not isinstance(norm_type, (int, float)) or isnan(norm_type) or norm_type == 0:
            raise ValueError(f"{type(self).__name__} needs norm_type to be a number other than 0; got {norm_type!r}")
        self.norm_type = float(norm_type)

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        lp_pool = getattr(functional, f"lp_pool{self.space}d")
        kernel = self._sliding.kernel if self.space > 1 else self._sliding.kernel[0]
        y: torch.Tensor = lp_pool(x, self.norm_type, kernel)
        return y

    def operate(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        if isinf(self.norm_type):
            pool = getattr(functional, f"max_pool{self.space}d")
            sign = 1 if self.norm_type > 0 else -1
            cells = _lowest(sign * x.abs(), piece.behind)
            return sign * cut(pool(cells, self._sliding.kernel, self._sliding.stride), piece.result)
        means = super().operate(x.pow(self.norm_type), piece)
        sums = (torch.sign(means) * functional.relu(torch.abs(means))).mul(prod(self._sliding.kernel))
        return sums.pow(1.0 / self.norm_type)


class DistributedMaxPool1d(MaxPooling):
    space = 1


class DistributedMaxPool2d(MaxPooling):
    space = 2


class DistributedMaxPool3d(MaxPooling):
    space = 3


class DistributedAvgPool1d(AveragePooling):
    space = 1


class DistributedAvgPool2d(AveragePooling):
    space = 2


class DistributedAvgPool3d(AveragePooling):
    space = 3


class DistributedLPPool1d(PowerPooling):
    space = 1


class DistributedLPPool2d(PowerPooling):
    space = 2


class DistributedLPPool3d(PowerPooling):
    space = 3
