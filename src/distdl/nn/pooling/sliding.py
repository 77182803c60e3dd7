"""The pooling layers whose windows slide: largest cell, mean, and power mean."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from operator import index
from typing import Any

from distdl.geometry.boxes import Shape
from distdl.geometry.windows import PoolSliding
from distdl.nn.module import Option, check_buffer_manager
from distdl.nn.pooling.layer import PoolingLayer
from distdl.ops.pooling import Average, Maximum, Pooling, Power
from distdl.partition import Partition, dims
from distdl.partition.arguments import checks_arguments


class _Published(int):
    """The stride of a call that gives none, which is thus told from a stride of 1 that is given."""


_ONE = _Published(1)
_untold = threading.Lock()  # taken, for good, by the first layer of this process that warns


def _warn_of_stride(name: str) -> None:
    if _untold.acquire(blocking=False):
        warnings.warn(
            f"{name} has stride 1 where no stride is given, as published; torch's layer then has the size of the "
            "kernel. Pass stride=1, or stride=None for the size of the kernel",
            stacklevel=5,  # the user's call, above the check of arguments, the constructor, and _sliding
        )


def _sliding(
    name: str, space: int, P_x: Partition, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> PoolSliding:
    """The windows. Worker 0 warns if no stride was given and the layer's default differs from torch's.

    Raises: ValueError that names the layer.
    """
    sliding = PoolSliding.of(name, space, kernel, kernel if stride is None else stride, padding, dilation)
    if stride is _ONE and max(sliding.kernel) > 1 and P_x.comm.rank == 0:
        _warn_of_stride(name)
    return replace(sliding, ceil_mode=bool(ceil_mode))


def _arguments(name: str, op: Pooling) -> dict[str, Any]:
    """The arguments of :class:`PoolingLayer` that follow from windows that slide.

    Raises: ValueError that names the layer.
    """
    op.check(name)
    sliding = op.sliding
    return {
        "op": op,
        "least": op.least,
        "shown": f"kernel {dims(sliding.kernel)}",
        "kernel_size": sliding.kernel,
        "stride": sliding.stride,
        "padding": sliding.padding,
        "dilation": sliding.dilation,
        "ceil_mode": sliding.ceil_mode,
    }


class _Sliding:
    """The public attributes of layers whose windows slide."""

    kernel_size = Option[Shape]()
    stride = Option[Shape]()
    padding = Option[Shape]()
    dilation = Option[Shape]()
    ceil_mode = Option[bool]()


class _MaxPool(PoolingLayer, _Sliding):
    r"""Pool over windows of space: the largest cell of each. A worker gets the cells around its block that it needs.

    Forward: the same as torch's layer on the whole tensor. Adjoint: the transpose; gradients of cells that several
    workers read add up on the workers that own them.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        kernel_size: extents of the window, in cells; one number, or one for each dim of space.
        stride: distance between windows. **1 by default**, unlike torch; None for the kernel size. A process in which
            none is given warns once.
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

    return_indices = Option[bool]()

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        kernel_size: Any,
        stride: Any = _ONE,
        padding: Any = 0,
        dilation: Any = 1,
        buffer_manager: Any = None,
        *,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> None:
        check_buffer_manager(buffer_manager)
        name = type(self).__name__
        sliding = _sliding(name, self.space, P_x, kernel_size, stride, padding, dilation, ceil_mode)
        super().__init__(P_x, **_arguments(name, Pooling(Maximum(bool(return_indices)), sliding)))
        self.return_indices = bool(return_indices)


class _AvgPool(PoolingLayer, _Sliding):
    r"""Pool over windows of space: the mean of each. A worker gets the cells around its block that it needs.

    Forward: the same as torch's layer on the whole tensor. Adjoint: the transpose; gradients of cells that several
    workers read add up on the workers that own them.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        kernel_size: extents of the window, in cells; one number, or one for each dim of space.
        stride: distance between windows. **1 by default**, unlike torch; None for the kernel size. A process in which
            none is given warns once.
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

    count_include_pad = Option[bool]()
    divisor_override = Option[int | None]()

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        kernel_size: Any,
        stride: Any = _ONE,
        padding: Any = 0,
        dilation: Any = 1,
        buffer_manager: Any = None,
        *,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        check_buffer_manager(buffer_manager)
        name = type(self).__name__
        sliding = _sliding(name, self.space, P_x, kernel_size, stride, padding, dilation, ceil_mode)
        divisor: Any = divisor_override
        divisor = index(divisor) if hasattr(divisor, "__index__") else divisor
        if any(n > 1 for n in sliding.dilation):
            raise ValueError(f"{name} has no dilation; got {dilation}")
        super().__init__(P_x, **_arguments(name, Pooling(Average(bool(count_include_pad), divisor), sliding)))
        self.count_include_pad, self.divisor_override = bool(count_include_pad), divisor


class _LPPool(PoolingLayer, _Sliding):
    r"""The power mean times the size of the kernel, as torch has it: :math:`y = (k \cdot \text{mean}(x^p))^{1/p}`.

    The mean is over the cells that a window has in the tensor. Where p is infinite, y is the largest absolute value;
    where it is minus infinite, the smallest.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        norm_type: the power p, not 0.
        kernel_size: extents of the window, in cells; one number, or one for each dim of space.
        stride: distance between windows. **1 by default**, unlike torch; None for the kernel size. A process in which
            none is given warns once.
        ceil_mode: whether the last window may reach beyond the tensor, if it starts in it.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in space, longer blocks first, and in batch and channels as x is. Workers outside P_x return a clone of
        their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        the wrong rank, smaller than the window, or of a dtype that torch's operator does not accept.
    """

    norm_type = Option[float]()

    @checks_arguments
    def __init__(
        self, P_x: Partition, norm_type: float, kernel_size: Any, stride: Any = _ONE, ceil_mode: bool = False
    ) -> None:
        name = type(self).__name__
        sliding = _sliding(name, self.space, P_x, kernel_size, stride, 0, 1, ceil_mode)
        power = Power(float(norm_type) if isinstance(norm_type, int) else norm_type)
        super().__init__(P_x, **_arguments(name, Pooling(power, sliding)))
        self.norm_type = float(norm_type)


class DistributedMaxPool1d(_MaxPool):
    __doc__ = _MaxPool.__doc__
    space = 1


class DistributedMaxPool2d(_MaxPool):
    __doc__ = _MaxPool.__doc__
    space = 2


class DistributedMaxPool3d(_MaxPool):
    __doc__ = _MaxPool.__doc__
    space = 3


class DistributedAvgPool1d(_AvgPool):
    __doc__ = _AvgPool.__doc__
    space = 1


class DistributedAvgPool2d(_AvgPool):
    __doc__ = _AvgPool.__doc__
    space = 2


class DistributedAvgPool3d(_AvgPool):
    __doc__ = _AvgPool.__doc__
    space = 3


class DistributedLPPool1d(_LPPool):
    __doc__ = _LPPool.__doc__
    space = 1


class DistributedLPPool2d(_LPPool):
    __doc__ = _LPPool.__doc__
    space = 2


class DistributedLPPool3d(_LPPool):
    __doc__ = _LPPool.__doc__
    space = 3
