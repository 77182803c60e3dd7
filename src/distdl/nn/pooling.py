"""The distributed pooling layers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch.nn import functional

from distdl.agreement import Agreement
from distdl.boxes import Box, Shape, shape
from distdl.exchange import Route, move
from distdl.groups import dims
from distdl.header import Headers
from distdl.layout import Layout
from distdl.nn.module import Module, check_buffer_manager, local
from distdl.partition import Partition
from distdl.planning import copy
from distdl.windows import Sliding


class Pooling(Module):
    r"""Pool over windows of space, each worker completing its block by the cells around it.

    Forward: sequentially the same as torch's layer. Adjoint: the transpose, gradients of halo cells adding up on the
    workers that own them.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        kernel_size: extents of the window, in cells; one number, or one for each dim of space.
        stride: distance between windows. **1 by default**, unlike torch.
        padding: cells before and behind the tensor, at most half the kernel.
        dilation: distance between the cells of a window (max pooling only).
        buffer_manager: checked for its type; not used.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in space, longer blocks first, else as x is. Workers outside P_x return a clone of their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        another rank or smaller than the window.
    """

    space: ClassVar[int]
    outside: ClassVar[float]

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        buffer_manager: Any = None,
    ) -> None:
        super().__init__()
        check_buffer_manager(buffer_manager)
        name = type(self).__name__
        self.P_x = P_x
        self._sliding = Sliding.of(name, self.space, kernel_size, stride, padding, dilation)
        if P_x.workers.ndim != self.space + 2:
            raise ValueError(f"{name} needs P_x: batch x channels x {self.space} dims of space; got {P_x}")
        if any(2 * p > k for p, k in zip(self._sliding.padding, self._sliding.kernel, strict=True)):
            raise ValueError(f"{name} needs padding of at most half the kernel; got {padding} and kernel {kernel_size}")
        self._name = f"{name} (P_x: {P_x}; kernel {dims(self._sliding.kernel)})"
        self._agreement = Agreement.among(P_x, self._name, (self._sliding, P_x.workers.shape), self._derive)

    @abstractmethod
    def operate(self, x: torch.Tensor) -> torch.Tensor:
        """The torch operator, on a local window."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.P_x.comm.rank not in self.P_x:
            return x.clone()
        decision = self._agreement.reach((x,))
        route, dtype, margins, result = decision.outcome
        x = move(route, x, dtype, (0,), decision.carried[0])

        def pool(block: torch.Tensor) -> torch.Tensor:
            return self.operate(functional.pad(block, margins, value=self.outside) if any(margins) else block)

        return local(pool, result, (x, (1, 1, *self._sliding.spans)))

    def _derive(self, headers: Headers) -> tuple[Route, torch.dtype, Shape, Shape]:
        name, P_x, me = type(self).__name__, self.P_x, self.P_x.comm.rank
        owned = Layout.tiled(P_x, headers.shapes(P_x, name, P_x.workers.ndim))
        inputs, outputs = self._sliding.windows(name, owned.extents[2:], P_x.workers.shape[2:])
        windows = Layout.of(P_x, [*owned.intervals[:2], *inputs])
        inside = [
            [(max(start, 0), min(stop, extent)) for start, stop in along]
            for along, extent in zip(inputs, owned.extents[2:], strict=True)
        ]
        needed = Layout.of(P_x, [*owned.intervals[:2], *inside])
        computed = Layout.of(P_x, [*owned.intervals[:2], *outputs])
        route = Route(copy(owned, needed, me), P_x.comm, headers.members, self._name)
        result = shape(computed[me])
        margins = () if 0 in result else _margins(windows[me], needed[me])
        return route, headers.dtype(P_x, name), margins, result


def _margins(window: Box, inside: Box) -> Shape:
    """How far a window reaches beyond its part inside the tensor, as ``F.pad`` takes it: the last dim first."""
    return tuple(
        width
        for (start, stop), (first, last) in reversed(list(zip(window, inside, strict=True)))
        for width in (first - start, stop - last)
    )


class MaxPooling(Pooling):
    """The largest cell of each window; cells outside the tensor count as minus infinity."""

    outside = float("-inf")

    def operate(self, x: torch.Tensor) -> torch.Tensor:
        pool = getattr(functional, f"max_pool{self.space}d")
        y: torch.Tensor = pool(x, self._sliding.kernel, self._sliding.stride, 0, self._sliding.dilation)
        return y


class AveragePooling(Pooling):
    """The mean of each window; cells outside the tensor are zeros that count. It has no dilation."""

    outside = 0.0

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        buffer_manager: Any = None,
    ) -> None:
        super().__init__(P_x, kernel_size, stride, padding, dilation, buffer_manager)
        if any(n > 1 for n in self._sliding.dilation):
            raise ValueError(f"{type(self).__name__} has no dilation; got {dilation}")

    def operate(self, x: torch.Tensor) -> torch.Tensor:
        pool = getattr(functional, f"avg_pool{self.space}d")
        y: torch.Tensor = pool(x, self._sliding.kernel, self._sliding.stride)
        return y


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
