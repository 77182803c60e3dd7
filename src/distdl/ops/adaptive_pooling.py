"""Adaptive pooling: as many outputs as asked for, whatever the extent of the input.

The windows differ in length and may share a cell; torch's adaptive operator, applied to a block, would place others.
So every worker reduces the *part* of each window that lies in its own block, and the parts are put together where the
output belongs. Moving the windows instead would bring all cells of a pooling to one cell to a single worker.

    x        | 0  1  2  3  4 | 5  6  7  8  9 |
    windows  ( 0  1)(2  3)(4   5)(6  7)(8  9)            window 2 lies in both blocks
    parts      0     1    2    2   3     4               the second worker sends its part of it to the first
    y        |    0   1   2  |     3   4     |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import torch
from torch.nn import functional

from distdl.exchange import Together
from distdl.geometry.boxes import Interval, Intervals, Shape, balanced, runs, shape
from distdl.geometry.windows import adaptive
from distdl.ops.averaging import AdaptiveMean, average
from distdl.ops.pooling import choose, in_space, largest_cells
from distdl.ops.segments import Segments, along
from distdl.ops.setup import Setup, Site, same
from distdl.partition import Layout, Signature, dims
from distdl.plan.planning import copy
from distdl.tensors.connection import local
from distdl.tensors.constants import Constant
from distdl.tensors.derivatives import NONE
from distdl.tensors.dtypes import HALVES, without_autocast

Step = Callable[..., tuple[torch.Tensor, ...]]

_MOST = 1 << 22  # outputs along a dim: each is planned by itself


@dataclass(frozen=True)
class AdaptiveAverage:
    """The mean of each window.

    Every worker divides the sum of its part of a window by the window's length; ``y[window] += part`` is the movement.
    A pooling to one cell sends one number for each channel and worker. A tensor with half of float32's width is summed,
    and moved, in float32.

    Attributes:
        extents: global extents of y in space; None in place of one keeps that of x.
        result: the dtype of y, where that is known to be another than that of x (under autocast).
    """

    extents: tuple[int | None, ...]
    result: torch.dtype | None = None
    indices: ClassVar[bool] = False

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        """torch's operator, on a cell for each output. (It takes other dtypes where it has to make one cell.)"""
        outputs = tuple(1 if extent == 1 else 2 for extent in self.extents)
        if prod(outputs) == 1:
            self._whole(x, outputs)
        return self._whole(x.expand(1, 2, *outputs), outputs)

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        (x,) = signatures
        owned, me, space = x.layout, site.me, range(2, 2 + len(self.extents))
        computed = _computed(site.label.kind, owned, self.extents)
        touched = list(owned.intervals)
        for dim in space:
            touched[dim] = tuple(
                adaptive(block, computed.extents[dim], owned.extents[dim]) for block in owned.intervals[dim]
            )
        parts = Layout.along(owned.partition, touched)
        own, wide = shape(parts.box_of(me)), torch.float32 if x.dtype in HALVES else x.dtype
        moves = parts.intervals != computed.intervals
        reduced, whole = [], not moves and 0 not in own
        for dim in () if 0 in own else space:
            extent, count = owned.extents[dim], computed.extents[dim]
            intervals, alike = _parts_of(owned.box_of(me)[dim], extent, count)
            windows = [adaptive((output, output + 1), extent, count) for output in range(*parts.box_of(me)[dim])]
            lengths = Constant(torch.tensor([stop - start for start, stop in windows], device="cpu"))
            reduced.append((Segments.of(dim, intervals, shape(owned.box_of(me))[dim]), lengths))
            whole = whole and alike

        def part_sums(block: torch.Tensor) -> torch.Tensor:
            with without_autocast(block.device):
                y = block.to(wide)
                for segments, lengths in reversed(reduced):  # the last dim first: it lies together in memory
                    y = segments.total(y) / along(segments.dim, lengths.on(y.device), y)
            return y

        def mean(block: torch.Tensor) -> torch.Tensor:
            return self._whole(block, own[2:]) if whole else part_sums(block)

        def pool(block: torch.Tensor) -> torch.Tensor:
            return local(mean, own, (block.to(x.dtype), (1,) * len(own)))

        add = site.operator(copy(computed, parts, me).T, wide, x.derivatives, [own]) if moves else same

        def finish(y: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = add(y)
            return total.to(self.result or x.dtype)

        stay = site.identity(x.dtype, x.derivatives, x.local)
        return Setup(Together(stay), pool, finish, (computed,))

    def _whole(self, x: torch.Tensor, outputs: Shape) -> torch.Tensor:
        """torch's own operator, for a block that has the windows that torch gives it."""
        how = AdaptiveMean(_planar(x, outputs))
        # for a single mean, torch saves nothing for backward
        return how.pool(x) if prod(how.outputs) == 1 else average(x, how)


@dataclass(frozen=True)
class AdaptiveMaximum:
    """The largest cell of each window.

    A maximum is no sum, so parts are copied, and compared where they arrive: one dim after the other, the last first.
    So among equal cells the first in memory's order gets the gradient, as in torch. A part along a dim that is split is
    one number for each cell of the dims before it.

    Attributes:
        extents: global extents of y in space; None in place of one keeps that of x.
        indices: whether to return also where each cell stands: its number in the flattened global space. They move
            beside the cells, as messages of their own.
        result: the dtype of y, where that is known to be another than that of x (under autocast).
    """

    extents: tuple[int | None, ...]
    indices: bool = False
    result: torch.dtype | None = None

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        """torch's operator, on a tensor of one cell."""
        return self._whole(x, (1,) * len(self.extents))[0]

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        (x,) = signatures
        owned, me = x.layout, site.me
        computed = _computed(site.label.kind, owned, self.extents)
        first, result = tuple(start for start, _ in owned.box_of(me)[2:]), shape(computed.box_of(me))
        steps: list[Step] = []
        before, alike = owned, 0 not in result
        for dim in reversed(range(2, 2 + len(self.extents))):
            after = _with(before, dim, computed.intervals[dim])
            steps += _Round(dim, before, after, prod(owned.extents[dim + 1 :])).steps(site, x, self.indices)
            alike = alike and _parts_of(owned.box_of(me)[dim], owned.extents[dim], after.extents[dim])[1]
            before = after
        movement = next((place for place, step in enumerate(steps) if isinstance(step, Together)), len(steps))
        own, others = steps[:movement], steps[movement:]

        def all_dims(block: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y, numbers = choose(lambda block: self._whole(block, result[2:]), result, block, (1,) * len(result))
            return (y, in_space(numbers, block.shape[2:], first, owned.extents[2:])) if self.indices else (y,)

        if alike and not others:
            own = [all_dims]

        def pool(block: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found: tuple[torch.Tensor, ...] = (block.to(x.dtype),)
            for step in own:
                found = step(*found)
            return found if others or found[0] is not block else (block.clone(), *found[1:])

        def finish(found: tuple[torch.Tensor, ...]) -> Any:
            for step in others:
                found = step(*found)
            y = found[0].to(self.result or x.dtype)
            return (y, found[1].contiguous()) if self.indices else y

        stay = site.identity(x.dtype, x.derivatives, x.local)
        return Setup(Together(stay), pool, finish, (computed,) * (1 + self.indices))

    def _whole(self, x: torch.Tensor, outputs: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        """torch's own operator, for a block that has the windows that torch gives it."""
        outputs = _planar(x, outputs)
        pool = functional.adaptive_max_pool2d if len(outputs) == 2 else functional.adaptive_max_pool3d
        return largest_cells(x, lambda x: pool(x, outputs, True), len(outputs))


@dataclass(frozen=True)
class _Round:
    """The largest cells along one dim: of the parts of windows in each block, then of the parts from all blocks.

    Attributes:
        before, after: the layout before and after the dim is reduced.
        stride: numbers between neighbours along the dim, in all space.
    """

    dim: int
    before: Layout
    after: Layout
    stride: int

    @cached_property
    def places(self) -> list[Interval]:
        """For each block along the dim, the outputs of which it has parts."""
        count, extent = self.after.extents[self.dim], self.before.extents[self.dim]
        return [adaptive(block, count, extent) for block in self.before.intervals[self.dim]]

    @cached_property
    def laid(self) -> list[int]:
        """The outputs of all parts, which lie end to end along the dim. They never decrease."""
        return [output for place in self.places for output in range(*place)]

    def slots(self, outputs: Interval) -> Interval:
        """Where the parts of some outputs lie."""
        return bisect_left(self.laid, outputs[0]), bisect_left(self.laid, outputs[1])

    @cached_property
    def parts(self) -> Layout:
        """The parts that each worker makes."""
        return _with(self.before, self.dim, runs([stop - start for start, stop in self.places]))

    @cached_property
    def needed(self) -> Layout:
        """The parts of its own outputs, which each worker gets."""
        return _with(self.before, self.dim, [self.slots(span) for span in self.after.intervals[self.dim]])

    @property
    def moves(self) -> bool:
        return self.parts.intervals != self.needed.intervals

    def steps(self, site: Site, x: Signature, indices: bool) -> list[Step]:
        """What a worker does, one after the other. A step takes, and returns, values and, if asked for, indices."""
        dim, me, parts = self.dim, site.me, shape(self.parts.box_of(site.me))
        segments = Segments(dim, 1, 1)
        if 0 not in parts:
            intervals, _ = _parts_of(self.before.box_of(me)[dim], self.before.extents[dim], self.after.extents[dim])
            segments = Segments.of(dim, intervals, shape(self.before.box_of(me))[dim])
        first = self.before.box_of(me)[dim][0]
        steps: list[Step] = [_choosing(segments, parts, (first, self.stride) if indices else None)]
        if self.moves:
            plan = copy(self.parts, self.needed, me)
            movements = [site.operator(plan, x.dtype, x.derivatives, [parts])]
            if indices:
                movements.append(site.operator(plan, torch.int64, NONE, [parts]))
            result = shape(self.after.box_of(me))
            arriving = Segments(dim, 1, 1)
            if 0 not in result:
                start, stop = self.needed.box_of(me)[dim]
                outputs = [self.slots((output, output + 1)) for output in range(*self.after.box_of(me)[dim])]
                arriving = Segments.of(dim, [(i - start, j - start) for i, j in outputs], stop - start)
            steps += [Together(*movements), _choosing(arriving, result)]
        return steps


def _choosing(segments: Segments, result: Shape, place: tuple[int, int] | None = None) -> Step:
    """A step that takes the largest cell of each segment.

    Args:
        place: number of the block's first cell along the dim, and the step of numbers between neighbours along it; None
            where the cells bring their numbers along, or nobody asks for them.
    """

    def largest(x: torch.Tensor, *numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, chosen = choose(segments.largest, result, x, (1,) * len(result))
        found = [brought.gather(segments.dim, chosen) if chosen.numel() else chosen for brought in numbers]
        if place is not None:
            own = (chosen + place[0]) * place[1]
            found = [own + found[0]] if found else [own]
        return (y.to(x.dtype), *found)  # under autocast, torch may have returned a wider dtype

    return largest


def _planar(x: torch.Tensor, outputs: Shape) -> Shape:
    """How many outputs torch's operator in a plane makes of x, in one dim with a row for each channel.

    (Its own in one dim returns a view of a plane.)
    """
    return outputs if len(outputs) > 1 else (x.shape[1], *outputs)


def _computed(name: str, owned: Layout, asked: tuple[int | None, ...]) -> Layout:
    """Where y will be.

    Raises: ValueError if x is empty in space, or if there are more outputs than can be planned one by one.
    """
    if 0 in owned.extents[2:]:
        raise ValueError(f"{name} needs an input that is not empty in space; its shape is {dims(owned.extents)}")
    counts = [extent if n is None else n for extent, n in zip(owned.extents[2:], asked, strict=True)]
    if max(counts) > _MOST:
        raise ValueError(f"{name} makes at most {_MOST} outputs along a dim; got {max(counts)}")
    spans = [balanced(n, places) for n, places in zip(counts, owned.partition.workers.shape[2:], strict=True)]
    return Layout.along(owned.partition, [*owned.intervals[:2], *spans])


def _with(layout: Layout, dim: int, intervals: Intervals) -> Layout:
    """The layout with other intervals along one dim."""
    return Layout.along(layout.partition, [*layout.intervals[:dim], intervals, *layout.intervals[dim + 1 :]])


def _parts_of(block: Interval, extent: int, count: int) -> tuple[list[Interval], bool]:
    """Which of a block's cells each of the outputs reads that read any; and whether torch would read them alike.

    It would if the block were the tensor. (An output that reads more than these has its own part of them.)
    """
    start, stop = block
    first, last = adaptive(block, count, extent)
    windows = [adaptive((output, output + 1), extent, count) for output in range(first, last)]
    parts = [(max(i, start) - start, min(j, stop) - start) for i, j in windows]
    alike = parts == [adaptive((o, o + 1), stop - start, last - first) for o in range(last - first)]
    return parts, alike
