"""The distributed adaptive max pooling layers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from distdl.agreement.header import Carried, Headers
from distdl.exchange.route import Route, move
from distdl.geometry.boxes import Interval, Shape, runs, shape
from distdl.geometry.windows import adaptive
from distdl.nn.adaptive_pooling import AdaptivePooling, parts_of
from distdl.nn.module import Option, local, stay
from distdl.nn.runs import Runs
from distdl.nn.window_pooling import in_space
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.plan.planners import copy
from distdl.tensors.connection import outside


@dataclass(frozen=True, eq=False)
class Stage:
    """The largest cells along one dim: of the parts of windows in this block, then of the parts from all blocks.

    Attributes:
        cells: the cells of each part.
        parts: shape of this worker's parts.
        route: from parts, laid end to end along the dim, to the parts of this worker's outputs; None as of averages.
        slots: the parts of each output, as they arrive.
        result: shape of this worker's outputs along this dim.
        first, step: number of the block's first cell along the dim; numbers between neighbours along it, in all space.
    """

    cells: Runs
    parts: Shape
    route: Route | None
    slots: Runs
    result: Shape
    first: int
    step: int


@dataclass(frozen=True, eq=False)
class Stages:
    """What follows from the headers for a maximum: its stages, the last dim first.

    Attributes:
        whole: as of averages; then there are no stages.
        first, extents: where the block begins in space, and the global extents of space.
        result: shape of this worker's outputs.
    """

    dtype: torch.dtype
    whole: bool
    stages: tuple[Stage, ...]
    first: Shape
    extents: Shape
    result: Shape


class AdaptiveMaxPooling(AdaptivePooling):
    """The largest cell of each window.

    A maximum is no sum, so parts are copied, and compared where they arrive: one dim after the other, the last first.
    So among equal cells the first in memory's order gets the gradient, as in torch. A part along a dim that is split is
    one number for each cell of the dims before it.

    Args:
        return_indices: return also where in space each cell stands, as torch does: its number in the flattened global
            space. They take messages of their own.
    """

    kind = "max"
    return_indices = Option[bool]()

    def __init__(self, P_x: Partition, output_size: Any, return_indices: bool = False) -> None:
        super().__init__(P_x, output_size, (return_indices,))
        self.return_indices = bool(return_indices)

    def forward(self, x: torch.Tensor) -> Any:
        if self.P_x.comm.rank not in self.P_x:
            return (outside(x), torch.zeros_like(x, dtype=torch.int64)) if self.return_indices else outside(x)
        go, carried = self._reach(x)
        y = x = stay(x.to(go.dtype), carried)
        found: torch.Tensor | None = None
        if go.whole:
            y, chosen = _choose(lambda block: self.operator(block, go.result[2:], True), go.result, x)
            found = in_space(chosen, x.shape[2:], go.first, go.extents) if self.return_indices else None
        for stage in go.stages:
            y, chosen = _choose(stage.cells.largest, stage.parts, y)
            if self.return_indices:
                numbers = (chosen + stage.first) * stage.step
                found = numbers if found is None else numbers + found.gather(stage.cells.dim, chosen)
            if stage.route is not None:
                y = move(stage.route, y, y.dtype, (0,), carried)
                y, chosen = _choose(stage.slots.largest, stage.result, y)
                if found is not None:
                    found = move(stage.route, found, torch.int64, (0,), Carried(False))
                    found = found.gather(stage.slots.dim, chosen)
        y = y.to(self._results.of(x) or go.dtype)
        y = y.clone() if y is x else y
        return y if found is None else (y, found.contiguous())

    def _derive(self, headers: Headers) -> Stages:
        dtype, owned, computed = self._layouts(headers)
        me = self.P_x.comm.rank
        stages, whole = [], True
        before = owned
        for dim in reversed(range(2, self.space + 2)):
            after = Layout.of(
                self.P_x, [*before.intervals[:dim], computed.intervals[dim], *before.intervals[dim + 1 :]]
            )
            stages.append(self._stage(headers, dim, before, after, prod(owned.extents[dim + 1 :])))
            _, alike = parts_of(owned[me][dim], owned.extents[dim], computed.extents[dim])
            whole = whole and alike and stages[-1].route is None and 0 not in shape(computed[me])
            before = after
        first = tuple(start for start, _ in owned[me][2:])
        listed = () if whole else tuple(stages)
        return Stages(dtype, whole, listed, first, owned.extents[2:], shape(computed[me]))

    def _stage(self, headers: Headers, dim: int, before: Layout, after: Layout, step: int) -> Stage:
        me = self.P_x.comm.rank
        extent, count = before.extents[dim], after.extents[dim]
        places = [adaptive(block, count, extent) for block in before.intervals[dim]]
        outputs = [output for place in places for output in range(*place)]  # they never decrease
        tiles = runs([stop - start for start, stop in places])

        def slots(of: Interval, origin: int = 0) -> Interval:
            return bisect_left(outputs, of[0]) - origin, bisect_left(outputs, of[1]) - origin

        def laid(intervals: Sequence[Interval]) -> Layout:
            return Layout.of(self.P_x, [*before.intervals[:dim], intervals, *before.intervals[dim + 1 :]])

        tiled, needed = laid(tiles), laid([slots(span) for span in after.intervals[dim]])
        moves = tiled.intervals != needed.intervals
        cells, arriving = Runs(dim, 1, 1), Runs(dim, 1, 1)
        if 0 not in shape(tiled[me]):
            intervals, _ = parts_of(before[me][dim], extent, count)
            cells = Runs.of(dim, intervals, shape(before[me])[dim])
        if 0 not in shape(after[me]):
            start, stop = needed[me][dim]
            windows = [slots((output, output + 1), start) for output in range(*after[me][dim])]
            arriving = Runs.of(dim, windows, stop - start)
        return Stage(
            cells,
            shape(tiled[me]),
            self._route(headers, copy(tiled, needed, me)) if moves else None,
            arriving,
            shape(after[me]),
            before[me][dim][0],
            step,
        )


def _choose(
    operator: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], result: Shape, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What an operator makes of this worker's block, and what it chooses; also where there is nothing to choose."""
    chosen = torch.zeros(result if 0 in result else (), dtype=torch.int64, device=x.device)

    def operate(block: torch.Tensor) -> torch.Tensor:
        nonlocal chosen
        y, places = operator(block)
        chosen = chosen if 0 in result else places
        return y

    return local(operate, result, (x, (1,) * x.dim())), chosen


class DistributedAdaptiveMaxPool1d(AdaptiveMaxPooling):
    space = 1


class DistributedAdaptiveMaxPool2d(AdaptiveMaxPooling):
    space = 2


class DistributedAdaptiveMaxPool3d(AdaptiveMaxPooling):
    space = 3
