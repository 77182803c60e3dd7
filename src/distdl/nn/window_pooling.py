"""What the pooling layers have in common, and the base of those whose windows slide."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from distdl.agreement import Agreement
from distdl.agreement.header import Headers
from distdl.exchange.route import Route, move
from distdl.geometry.boxes import Box, Shape, shape
from distdl.geometry.windows import PoolSliding
from distdl.nn.module import Module, Option, check_buffer_manager, local, stay
from distdl.partition import Partition
from distdl.partition.groups import dims
from distdl.partition.layout import Layout
from distdl.plan.planners import copy
from distdl.tensors.connection import outside
from distdl.transport.label import Label


@dataclass(frozen=True, eq=False)
class Piece:
    """What follows from the headers, for this worker.

    Attributes:
        route: of the cells that windows need; None where every worker has them already.
        dtype: of the tensor.
        result: shape of the local result.
        before: cells of padding in front of the window, for each dim of space, which torch's operator adds.
        behind: cells that are appended to the window, as ``F.pad`` takes them.
        divisor: what a sum is divided by to be an average: one number, or one for each place.
        first: where the window begins in the tensor, for each dim of space.
        extents: global extents of the tensor in space.
    """

    route: Route | None
    dtype: torch.dtype
    result: Shape
    before: Shape
    behind: Shape
    divisor: int | torch.Tensor
    first: Shape
    extents: Shape


class Pooling(Module):
    r"""Pool over windows of space, each worker completing its block by the cells around it.

    Forward: sequentially the same as torch's layer. Adjoint: the transpose, gradients of halo cells adding up on the
    workers that own them.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        kernel_size: extents of the window, in cells; one number, or one for each dim of space.
        stride: distance between windows. **1 by default**, unlike torch; None for the kernel's size.
        padding: cells before and behind the tensor, at most half the kernel.
        dilation: distance between the cells of a window (max pooling only).
        buffer_manager: checked for its type; not used.
        ceil_mode: whether the last window may reach beyond the padding behind, if it starts in front of that.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in space, longer blocks first, else as x is. Workers outside P_x return a clone of their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        another rank, smaller than the window, or of a dtype that torch's operator does not take.
    """

    space: ClassVar[int]
    P_x = Option[Partition]()
    kernel_size = Option[Shape]()
    stride = Option[Shape]()
    padding = Option[Shape]()
    dilation = Option[Shape]()
    ceil_mode = Option[bool]()

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        buffer_manager: Any = None,
        ceil_mode: bool = False,
        options: tuple[object, ...] = (),
    ) -> None:
        super().__init__()
        check_buffer_manager(buffer_manager)
        name = type(self).__name__
        self.P_x = P_x
        stride = kernel_size if stride is None else stride
        sliding = PoolSliding.of(name, self.space, kernel_size, stride, padding, dilation)
        self._sliding = replace(sliding, ceil_mode=bool(ceil_mode))
        check_axes_of(name, P_x, self.space)
        if any(2 * p > k for p, k in zip(self._sliding.padding, self._sliding.kernel, strict=True)):
            raise ValueError(f"{name} needs padding of at most half the kernel; got {padding} and kernel {kernel_size}")
        self.label = Label(f"{name} (P_x: {P_x}; kernel {dims(self._sliding.kernel)})")
        self.kernel_size, self.stride = self._sliding.kernel, self._sliding.stride
        self.padding, self.dilation = self._sliding.padding, self._sliding.dilation
        self.ceil_mode = self._sliding.ceil_mode
        self._results = ResultTypes(self.sample, (1, 1, *self._sliding.spans))
        identity = (self._sliding, P_x.workers.shape, *options)
        self._agreement = Agreement.among(P_x, self.label, identity, self._derive)

    @abstractmethod
    def sample(self, x: torch.Tensor) -> torch.Tensor:
        """torch's operator, on a tensor of one window."""

    @abstractmethod
    def operate(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Pool the window of this worker."""

    def divisor(self, outputs: Box, extents: Shape) -> int | torch.Tensor:
        """What the sums at these outputs in space are divided by."""
        return 1

    def forward(self, x: torch.Tensor) -> Any:
        if self.P_x.comm.rank not in self.P_x:
            return outside(x)
        x, piece = self._window(x)
        return self._local(lambda window: self.operate(window, piece), x, piece)

    def _window(self, x: torch.Tensor) -> tuple[torch.Tensor, Piece]:
        """The cells that this worker's outputs read."""
        decision = self._agreement.reach((x,), (int(self._results.of(x) is not None),))
        piece = decision.outcome
        if piece.route is None:
            return stay(x.to(piece.dtype), decision.carried[0]), piece
        return move(piece.route, x, piece.dtype, (0,), decision.carried[0]), piece

    def _local(self, operator: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, piece: Piece) -> torch.Tensor:
        return local(operator, piece.result, (x, (1, 1, *self._sliding.spans)))

    def _derive(self, headers: Headers) -> Piece:
        name, P_x, me = type(self).__name__, self.P_x, self.P_x.comm.rank
        owned = Layout.tiled(P_x, headers.shapes(P_x, name, P_x.workers.ndim))
        extents = owned.extents[2:]
        dtype = taken_dtype(headers, P_x, name)
        inputs, outputs = self._sliding.windows(name, extents, P_x.workers.shape[2:])
        inside = [
            [(max(start, 0), min(stop, extent)) for start, stop in along]
            for along, extent in zip(inputs, extents, strict=True)
        ]
        needed = Layout.of(P_x, [*owned.intervals[:2], *inside])
        moves = needed.intervals != owned.intervals
        plan = copy(owned, needed, me) if moves else None
        route = None if plan is None else Route(plan, P_x.comm, headers.members, self.label, keeps_format=True)
        computed = Layout.of(P_x, [*owned.intervals[:2], *outputs])[me]
        box = needed[me]
        piece = Piece(route, dtype, shape(computed), (0,) * self.space, (), 1, tuple(i for i, _ in box[2:]), extents)
        if 0 in piece.result:
            return piece
        window = Layout.of(P_x, [*owned.intervals[:2], *inputs])[me]
        before, behind = self._margins(window[2:], box[2:])
        return replace(piece, before=before, behind=behind, divisor=self.divisor(computed[2:], extents))

    def _margins(self, window: Box, inside: Box) -> tuple[Shape, Shape]:
        """The padding that torch's operator adds at both ends, and what is then missing behind.

        Padding by torch's operator is no cell: where nothing in a window exceeds minus infinity, a cell is chosen. With
        what is behind there are at least as many cells as the kernel spans: torch's 3-d average refuses fewer, and of a
        window that falls between the cells (of a dilation larger than the tensor) its maximum chooses a place behind.
        """
        before = tuple(first - start for (start, _), (first, _) in zip(window, inside, strict=True))
        behind = [
            max(stop - last - width, cells - (last - first), 0)
            for (_, stop), (first, last), width, cells in zip(window, inside, before, self._sliding.spans, strict=True)
        ]
        flat = tuple(number for width in reversed(behind) for number in (0, width))
        return before, flat if any(flat) else ()


class ResultTypes:
    """Which dtype torch's operator makes of a tensor's; None where it does not take it.

    Args:
        sample: the operator.
        least: shape of a tensor that it accepts.
    """

    def __init__(self, sample: Callable[[torch.Tensor], torch.Tensor], least: Shape) -> None:
        self._sample = sample
        self._least = least
        self._known: dict[object, torch.dtype | None] = {}

    def of(self, x: Any) -> torch.dtype | None:
        """The dtype of the result, found out on zeros, once for each dtype and device, with autocast and without."""
        if not isinstance(x, torch.Tensor) or x.is_meta:
            return None
        key = (x.dtype, x.device, torch.is_autocast_enabled(x.device.type))
        if key not in self._known:
            try:
                self._known[key] = self._sample(torch.zeros(self._least, dtype=x.dtype, device=x.device)).dtype
            except RuntimeError:
                self._known[key] = None
        return self._known[key]


def taken_dtype(headers: Headers, P_x: Partition, name: str) -> torch.dtype:
    """The dtype of the tensors, of which each worker reports in its first extra whether torch's operator takes it."""
    dtype = headers.dtype(P_x, name)
    shapes = headers.shapes(P_x, name, P_x.workers.ndim)
    taken = headers.extras(P_x)[..., 0] != 0
    if not (taken | (shapes.prod(axis=-1) == 0)).all():
        raise ValueError(f"{name} needs a dtype that torch's operator takes; got {dtype}")
    return dtype


def check_axes_of(name: str, P_x: Partition, space: int) -> None:
    """Check that a partition has axes for batch, channels and space."""
    if P_x.workers.ndim != space + 2:
        raise ValueError(f"{name} needs P_x: batch x channels x {space} dims of space; got {P_x}")


def cut(y: torch.Tensor, result: Shape) -> torch.Tensor:
    """The first outputs in space; padding behind may have made more."""
    return y[(slice(None), slice(None), *(slice(extent) for extent in result[2:]))] if y.shape != result else y


def in_space(indices: torch.Tensor, local: Shape, first: Shape, extents: Shape) -> torch.Tensor:
    """Numbers of cells in flattened space, from their numbers in a flattened window of it.

    Args:
        local: extents of the window.
        first: where it begins.
        extents: those of all space.
    """
    found, step = torch.zeros_like(indices), 1
    for extent, start, whole in zip(reversed(local), reversed(first), reversed(extents), strict=True):
        found += (indices % extent + start) * step
        indices = indices // extent
        step *= whole
    return found
