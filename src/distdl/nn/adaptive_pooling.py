"""Adaptive pooling: as many outputs as asked for, whatever the size of the input. The base, and the averages.

Their windows differ in length and may share a cell; torch's adaptive operator, applied to a block, would place others.
So every worker reduces the *part* of each window that lies in its own block, and the parts are put together where the
output belongs. Moving the windows instead would bring all cells of a pooling to one to a single worker.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar

import torch
from torch.nn import functional

from distdl.agreement import Agreement
from distdl.agreement.header import Carried, Headers
from distdl.exchange.route import Route, move
from distdl.geometry.boxes import Interval, Shape, balanced, shape
from distdl.geometry.windows import adaptive
from distdl.nn.module import Module, Option, local, stay
from distdl.nn.runs import Runs, along
from distdl.nn.window_pooling import ResultTypes, check_axes_of, taken_dtype
from distdl.partition import Partition
from distdl.partition.groups import dims
from distdl.partition.layout import Layout
from distdl.plan import Plan
from distdl.plan.planners import copy
from distdl.tensors.connection import outside
from distdl.tensors.dtypes import HALVES
from distdl.transport.label import Label


class AdaptivePooling(Module):
    r"""Pool to a given global shape in space.

    Along each dim, output o of n is reduced from the cells from ``floor(o L / n)`` to ``ceil((o + 1) L / n)`` of L.
    Forward: each worker reduces what lies in its own block, and the parts are put together on the worker that has the
    output. Adjoint: the transpose. A worker may have no output, if there are fewer than workers.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        output_size: global extents of y in space, one number or one for each dim; None in place of one keeps x's.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in space, longer blocks first, else as x is. Workers outside P_x return a clone of their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        another rank, empty in space, or of a dtype that torch's operator does not take.
    """

    space: ClassVar[int]
    kind: ClassVar[str]
    P_x = Option[Partition]()
    output_size = Option[tuple[int | None, ...]]()

    def __init__(self, P_x: Partition, output_size: Any, options: tuple[object, ...] = ()) -> None:
        super().__init__()
        name = type(self).__name__
        check_axes_of(name, P_x, self.space)
        self.P_x = P_x
        self.output_size = _sizes(name, output_size, self.space)
        self.label = Label(f"{name} (P_x: {P_x}; output {'x'.join(map(str, self.output_size))})")
        self._results = ResultTypes(self.sample, (1,) * (self.space + 2))
        identity = (self.output_size, P_x.workers.shape, *options)
        self._agreement = Agreement.among(P_x, self.label, identity, self._derive)

    @abstractmethod
    def _derive(self, headers: Headers) -> Any:
        """What follows from the headers."""

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        """torch's operator, on a tensor of one cell."""
        y: torch.Tensor = self.operator(x, (1,) * self.space)
        return y

    def operator(self, x: torch.Tensor, *options: Any) -> Any:
        """torch's own, for a whole tensor."""
        return getattr(functional, f"adaptive_{self.kind}_pool{self.space}d")(x, *options)

    def _reach(self, x: torch.Tensor) -> tuple[Any, Carried]:
        decision = self._agreement.reach((x,), (int(self._results.of(x) is not None),))
        return decision.outcome, decision.carried[0]

    def _layouts(self, headers: Headers) -> tuple[torch.dtype, Layout, Layout]:
        """The dtype, where x is, and where y will be."""
        name, P_x = type(self).__name__, self.P_x
        owned = Layout.tiled(P_x, headers.shapes(P_x, name, P_x.workers.ndim))
        dtype = taken_dtype(headers, P_x, name)
        if 0 in owned.extents[2:]:
            raise ValueError(f"{name} needs an input that is not empty in space; its shape is {dims(owned.extents)}")
        counts = [x if n is None else n for x, n in zip(owned.extents[2:], self.output_size, strict=True)]
        spans = [balanced(n, places) for n, places in zip(counts, P_x.workers.shape[2:], strict=True)]
        return dtype, owned, Layout.of(P_x, [*owned.intervals[:2], *spans])

    def _route(self, headers: Headers, plan: Plan) -> Route:
        return Route(plan, self.P_x.comm, headers.members, self.label)


def _sizes(name: str, given: Any, space: int) -> tuple[int | None, ...]:
    """One size for each dim of space, from one for all or a sequence."""
    try:
        listed = [given] * space if hasattr(given, "__index__") else list(given)
        sizes = tuple(None if size is None else index(size) for size in listed)
    except TypeError:
        sizes = ()
    if len(sizes) != space or any(size is not None and size < 1 for size in sizes):
        raise ValueError(
            f"{name} needs output_size to be one whole number at least 1, or {space} of them or None; got {given!r}"
        )
    return sizes


def parts_of(block: Interval, extent: int, count: int) -> tuple[list[Interval], bool]:
    """Which of a block's cells each of the outputs reads that read any; and whether torch would read them alike.

    It would if the block were the tensor. (An output that reads more than these has its own part of them.)
    """
    start, stop = block
    first, last = adaptive(block, count, extent)
    windows = [adaptive((output, output + 1), extent, count) for output in range(first, last)]
    parts = [(max(i, start) - start, min(j, stop) - start) for i, j in windows]
    alike = parts == [adaptive((o, o + 1), stop - start, last - first) for o in range(last - first)]
    return parts, alike


@dataclass(frozen=True, eq=False)
class Sums:
    """What follows from the headers for an average: parts of windows are summed, and added up where outputs belong.

    Attributes:
        route: from parts to outputs; None where every window lies in the block of the worker that has the output.
        dtype: of x. The parts of a tensor with half of float32's width are summed, and moved, in float32.
        whole: whether the block has the windows that torch gives it; then torch's operator does it all.
        along: for each dim of space, its runs of cells and the lengths of the windows of which they are parts.
        parts: shape of this worker's parts.
    """

    route: Route | None
    dtype: torch.dtype
    whole: bool
    along: tuple[tuple[Runs, torch.Tensor], ...]
    parts: Shape


class AdaptiveAveragePooling(AdaptivePooling):
    """The mean of each window.

    Every worker divides the sum of its part of a window by the window's size; ``y[window] += part`` is the movement. A
    pooling to one cell sends one number for each channel and worker.
    """

    kind = "avg"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.P_x.comm.rank not in self.P_x:
            return outside(x)
        go, carried = self._reach(x)
        x = stay(x.to(go.dtype), carried)

        def pool(block: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.operator(block, go.parts[2:]) if go.whole else _part_sums(block, go)
            return y

        y = local(pool, go.parts, (x, (1,) * x.dim()))
        if go.route is not None:
            y = move(go.route, y, y.dtype, (0,), carried)
        return y.to(self._results.of(x) or go.dtype)

    def _derive(self, headers: Headers) -> Sums:
        dtype, owned, computed = self._layouts(headers)
        me, space = self.P_x.comm.rank, range(2, self.space + 2)
        touched = list(owned.intervals)
        for dim in space:
            extent, count = owned.extents[dim], computed.extents[dim]
            touched[dim] = tuple(adaptive(block, count, extent) for block in owned.intervals[dim])
        parts = Layout.of(self.P_x, touched)
        moves = parts.intervals != computed.intervals
        route = self._route(headers, copy(computed, parts, me).T) if moves else None
        if 0 in shape(parts[me]):
            blank = tuple((Runs(dim, 1, 1), torch.ones(1)) for dim in space)
            return Sums(route, dtype, False, blank, shape(parts[me]))
        reduced, whole = [], not moves
        for dim in space:
            extent, count = owned.extents[dim], computed.extents[dim]
            intervals, alike = parts_of(owned[me][dim], extent, count)
            windows = [adaptive((output, output + 1), extent, count) for output in range(*parts[me][dim])]
            lengths = torch.tensor([stop - start for start, stop in windows])
            reduced.append((Runs.of(dim, intervals, shape(owned[me])[dim]), lengths))
            whole = whole and alike
        return Sums(route, dtype, whole, tuple(reduced), shape(parts[me]))


def _part_sums(x: torch.Tensor, go: Sums) -> torch.Tensor:
    """This worker's part of each mean; the last dim first, as it lies together in memory."""
    with torch.autocast(x.device.type, enabled=False):
        y = x.float() if x.dtype in HALVES else x
        for reduced, lengths in reversed(go.along):
            y = reduced.total(y) / along(reduced.dim, lengths, x)
    return y


class DistributedAdaptiveAvgPool1d(AdaptiveAveragePooling):
    space = 1


class DistributedAdaptiveAvgPool2d(AdaptiveAveragePooling):
    space = 2


class DistributedAdaptiveAvgPool3d(AdaptiveAveragePooling):
    space = 3
