"""The pooling layers whose windows slide: largest cell, mean, and power mean."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any

from distdl.geometry.windows import PoolSliding
from distdl.nn.layer import Layer
from distdl.nn.module import check_buffer_manager, options
from distdl.nn.pooling.results import build, pool
from distdl.ops.pooling import Average, Maximum, Pooling, Power
from distdl.partition import Partition, dims
from distdl.partition.arguments import checks_arguments


@checks_arguments
def _max_pool(
    self: Any,
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
    r"""Pool over windows of space: the largest cell of each. A worker gets the cells around its block that it needs.

    Forward: the same as torch's layer on the whole tensor. Adjoint: the transpose; gradients of cells that several
    workers read add up on the workers that own them.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        kernel_size: extents of the window, in cells; one number, or one for each dim of space.
        stride: distance between windows. **1 by default**, unlike torch; None for the kernel size.
        padding: cells before and after the tensor, at most half the kernel.
        dilation: distance between the cells of a window.
        buffer_manager: checked for its type; not used.
        ceil_mode: whether the last window may reach beyond the padding at the end, if it starts before it.
        return_indices: also return where in space each cell lies, as torch does: its number in the flattened global
            space.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in space, longer blocks first, and in batch and channels as x is. Workers outside P_x return a clone of
        their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        the wrong rank, smaller than the window, or of a dtype that torch's operator does not accept.
    """
    check_buffer_manager(buffer_manager)
    sliding = _sliding(self, kernel_size, stride, padding, dilation, ceil_mode)
    _build(self, P_x, Pooling(Maximum(bool(return_indices)), sliding))
    self.return_indices = bool(return_indices)


@checks_arguments
def _average_pool(
    self: Any,
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
    r"""Pool over windows of space: the mean of each. A worker gets the cells around its block that it needs.

    Forward: the same as torch's layer on the whole tensor. Adjoint: the transpose; gradients of cells that several
    workers read add up on the workers that own them.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        kernel_size: extents of the window, in cells; one number, or one for each dim of space.
        stride: distance between windows. **1 by default**, unlike torch; None for the kernel size.
        padding: cells before and after the tensor, at most half the kernel. They are zeros.
        dilation: only 1 is accepted, as averages have none.
        buffer_manager: checked for its type; not used.
        ceil_mode: whether the last window may reach beyond the padding at the end, if it starts before it.
        count_include_pad: whether cells of the padding count. Cells of a window beyond the padding (``ceil_mode``)
            never count.
        divisor_override: divides the sums, instead of the count. (torch has it in 2-d and 3-d; here 1-d has it too.)
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in space, longer blocks first, and in batch and channels as x is. Workers outside P_x return a clone of
        their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        the wrong rank, smaller than the window, or of a dtype that torch's operator does not accept.
    """
    check_buffer_manager(buffer_manager)
    sliding = _sliding(self, kernel_size, stride, padding, dilation, ceil_mode)
    divisor: Any = divisor_override
    divisor = index(divisor) if hasattr(divisor, "__index__") else divisor
    if any(n > 1 for n in sliding.dilation):
        raise ValueError(f"{type(self).__name__} has no dilation; got {dilation}")
    _build(self, P_x, Pooling(Average(bool(count_include_pad), divisor), sliding))
    self.count_include_pad, self.divisor_override = bool(count_include_pad), divisor


@checks_arguments
def _power_pool(
    self: Any, P_x: Partition, norm_type: float, kernel_size: Any, stride: Any = 1, ceil_mode: bool = False
) -> None:
    r"""The power mean times the size of the kernel, as torch has it: :math:`y = (k \cdot \text{mean}(x^p))^{1/p}`.

    The mean is over the cells that a window has in the tensor. Where p is infinite, y is the largest absolute value;
    where it is minus infinite, the smallest.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        norm_type: the power p, not 0.
        kernel_size: extents of the window, in cells; one number, or one for each dim of space.
        stride: distance between windows. **1 by default**, unlike torch; None for the kernel size.
        ceil_mode: whether the last window may reach beyond the tensor, if it starts in it.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in space, longer blocks first, and in batch and channels as x is. Workers outside P_x return a clone of
        their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        the wrong rank, smaller than the window, or of a dtype that torch's operator does not accept.
    """
    sliding = _sliding(self, kernel_size, stride, 0, 1, ceil_mode)
    _build(self, P_x, Pooling(Power(float(norm_type) if isinstance(norm_type, int) else norm_type), sliding))
    self.norm_type = float(norm_type)


def _sliding(self: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> PoolSliding:
    name = type(self).__name__
    sliding = PoolSliding.of(name, self.space, kernel, kernel if stride is None else stride, padding, dilation)
    return replace(sliding, ceil_mode=bool(ceil_mode))


def _build(self: Any, P_x: Partition, op: Pooling) -> None:
    op.check(type(self).__name__)
    sliding = op.sliding
    build(self, P_x, op, op.least, f"kernel {dims(sliding.kernel)}")
    self.P_x, self.kernel_size, self.stride, self.padding = P_x, sliding.kernel, sliding.stride, sliding.padding
    self.dilation, self.ceil_mode = sliding.dilation, sliding.ceil_mode


class DistributedMaxPool1d(Layer):
    __doc__, space = _max_pool.__doc__, 1
    P_x, kernel_size, stride, padding, dilation, ceil_mode, return_indices = options(7)
    __init__, forward = _max_pool, pool


class DistributedMaxPool2d(Layer):
    __doc__, space = _max_pool.__doc__, 2
    P_x, kernel_size, stride, padding, dilation, ceil_mode, return_indices = options(7)
    __init__, forward = _max_pool, pool


class DistributedMaxPool3d(Layer):
    __doc__, space = _max_pool.__doc__, 3
    P_x, kernel_size, stride, padding, dilation, ceil_mode, return_indices = options(7)
    __init__, forward = _max_pool, pool


class DistributedAvgPool1d(Layer):
    __doc__, space = _average_pool.__doc__, 1
    P_x, kernel_size, stride, padding, dilation, ceil_mode, count_include_pad, divisor_override = options(8)
    __init__, forward = _average_pool, pool


class DistributedAvgPool2d(Layer):
    __doc__, space = _average_pool.__doc__, 2
    P_x, kernel_size, stride, padding, dilation, ceil_mode, count_include_pad, divisor_override = options(8)
    __init__, forward = _average_pool, pool


class DistributedAvgPool3d(Layer):
    __doc__, space = _average_pool.__doc__, 3
    P_x, kernel_size, stride, padding, dilation, ceil_mode, count_include_pad, divisor_override = options(8)
    __init__, forward = _average_pool, pool


class DistributedLPPool1d(Layer):
    __doc__, space = _power_pool.__doc__, 1
    P_x, kernel_size, stride, padding, dilation, ceil_mode, norm_type = options(7)
    __init__, forward = _power_pool, pool


class DistributedLPPool2d(Layer):
    __doc__, space = _power_pool.__doc__, 2
    P_x, kernel_size, stride, padding, dilation, ceil_mode, norm_type = options(7)
    __init__, forward = _power_pool, pool


class DistributedLPPool3d(Layer):
    __doc__, space = _power_pool.__doc__, 3
    P_x, kernel_size, stride, padding, dilation, ceil_mode, norm_type = options(7)
    __init__, forward = _power_pool, pool
