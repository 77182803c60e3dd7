"""The rule for functions whose operands share dims, like ``einsum``: how the work is split, and what each worker needs.

The dims of all operands have labels (see ``spreading``). The work is split as the largest operand is. If a worker needs
a label whole, the axis that splits this label splits another one instead. If a label is summed over, each worker may
also sum its own part of it, and the partial sums are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from distdl.geometry.boxes import Interval, Shape
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.layouts.spreading import SPACIOUS, Labels, Spread, spread_of
from distdl.globals.moving.alignment import check_dense, redistribute_block, redistribute_blocks
from distdl.globals.rules.applying import autocast_dtype
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import name_of
from distdl.tensors.connection import local
from distdl.tensors.modes import unobserved


class Need:
    """The part of one operand that this worker needs, and how it is redistributed.

    Args:
        described: the layout of the operand; the shape of a replicated one.
    Attributes:
        moves: the layouts from which and to which it is redistributed; None if it is not.
        arrives: the shape of this worker's part after that.
        cells: how many cells one worker gets then, at most.
    """

    def __init__(
        self, context: Context, described: Any, labels: Sequence[Hashable], spread: Spread, extents: dict[Hashable, int]
    ) -> None:
        shape = tuple(described.extents) if isinstance(described, KnownLayout) else tuple(described)
        # in the operand's own order of dims, so that its strides are those of torch's tensor
        order = [label for label in spread.labels if label not in labels] + list(labels)
        axes = [spread.labels.index(label) for label in order]
        behind = len(order) - len(labels)
        workers = spread.workers.transpose(axes)
        along: list[tuple[Interval, ...]] = [((0, 1),) * places for places in workers.shape]
        for axis, (label, extent) in enumerate(zip(labels, shape, strict=True), behind):
            whole = extent != extents[label]
            along[axis] = ((0, extent),) * len(along[axis]) if whole else spread.intervals[axes[axis]]
        needed = context.layout(workers, along)
        box = needed.box[behind:]
        self.index = tuple(slice(*one) for one in box)
        self.local: Shape = tuple(stop - start for start, stop in box)
        self.arrives = self.local if needed.active else (0,) * max(len(self.local), 1)
        self.whole = self.local == shape
        self.least = (1,) * len(shape)
        self.moves: tuple[KnownLayout, KnownLayout] | None = None
        self.cells = 0
        if not isinstance(described, KnownLayout):
            return
        own = spread_of(described, labels, spread.labels, {**extents, **dict(zip(labels, shape, strict=True))})
        owned = context.layout(
            own.workers.transpose(axes),
            [own.intervals[axis] if label in labels else ((0, 1),) for axis, label in zip(axes, order, strict=True)],
        )
        if owned is not needed:
            self.cells = max((prod(map(_length, box)) for box in needed.values()), default=0)
            self.moves = (owned, needed) if order else (owned.lifted(1), needed.lifted(1))

    def __call__(self, operand: Any, context: Context, name: str) -> torch.Tensor:
        """Return this worker's part of an operand."""
        block = self.given(operand, context)
        return block if self.moves is None else redistribute_block(block, *self.moves, name).reshape(self.arrives)

    def given(self, operand: Any, context: Context) -> torch.Tensor:
        """Return this worker's part of an operand, or its block, if that has to be redistributed to become the part."""
        if type(operand) is not GlobalTensor:
            plain = entered(operand, context)
            check_dense(plain)
            return plain if self.whole else plain[self.index]
        block = block_of(operand)
        return block if self.moves is None else block.reshape(self.moves[0].local)


def _length(interval: Interval) -> int:
    return max(interval[1] - interval[0], 0)


class Work:
    """How workers compute a function of labelled operands. It is set up once for operands in the same layouts.

    Args:
        described: for each operand, its layout; the shape of a replicated one.
        labels: for each operand, the labels of its dims.
        out: the labels of the result. The function sums over the others, or needs them whole.
        adds: whether the function may be applied to parts of a label that it sums over, and the results added up.
        lead: the place of the operand that says how the work is split; if None, the largest.
        whole: labels of the result along which it is not split, either.
    """

    def __init__(
        self, context: Context, described: Sequence[Any], labels: Sequence[Sequence[Hashable]],
        out: Sequence[Hashable], adds: bool, lead: int | None, whole: Sequence[Hashable],
    ) -> None:  # fmt: skip
        self.context = context
        self._dtypes: dict[Hashable, torch.dtype] = {}
        extents: dict[Hashable, int] = {}
        for one, own in zip(described, labels, strict=True):
            shape = one.extents if isinstance(one, KnownLayout) else one
            for label, extent in zip(own, shape, strict=True):
                extents[label] = extent if extents.get(label, 1) == 1 else extents[label]
        order: Labels = tuple(dict.fromkeys([*out, *(label for own in labels for label in own)]))
        known = [place for place, one in enumerate(described) if isinstance(one, KnownLayout)]
        if lead is None:
            lead = max(known, key=lambda place: described[place].size.numel())
        spread = spread_of(described[lead], labels[lead], order, extents)

        def needs(spread: Spread) -> list[Need]:
            return [Need(context, one, own, spread, extents) for one, own in zip(described, labels, strict=True)]

        def cells(spread: Spread) -> int:
            return sum(need.cells for need in needs(spread))

        spread, summed = _whole_where_needed(spread, out, whole, adds, cells)
        self.out = tuple(out)
        self.needs = needs(spread)
        self._place_results(spread, summed, labels[lead])
        # torch computes products of single cells, and of none, by other functions
        idle = 0 in self.partial or any(0 in need.local for need in self.needs)
        self.tries = idle or any(len(along) > 1 and min(map(_length, along)) < 2 for along in spread.intervals)

    def _place_results(self, spread: Spread, summed: Sequence[Hashable], leading: Sequence[Hashable]) -> None:
        """Set the layouts of the partial sums before and after they are redistributed, and of the result.

        Args:
            summed: the labels along which partial sums are added up: dims of one cell for each worker, in front.
            leading: the labels of the leading operand.
        """
        entries = replace(
            spread,
            intervals=tuple(
                tuple((at, at + 1) for at in range(len(along))) if label in summed else along
                for label, along in zip(spread.labels, spread.intervals, strict=True)
            ),
        )
        self.entries = entries.layout(self.context, [*summed, *self.out])
        self.summed = len(summed)
        for label in summed:
            # split along the samples of the leading operand, if they are many: the next layer reads whole features
            least = SPACIOUS * entries.places(label)
            long = [one for one in leading if one in self.out and entries.longest(one) >= least]
            entries = entries.whole_along(label, long[:1] or list(self.out))
        self.gathered = entries.layout(self.context, [*summed, *self.out])
        self.result = entries.layout(self.context, self.out)
        blank = (0,) * max(len(self.out), 1)
        self.partial = self.entries.local[self.summed :] if self.entries.active else blank
        if not self.summed and not self.out:
            self.partial = self.result.local

    def mine(self, label: Hashable) -> Interval:
        """Return the cells along a label of the result that this worker computes; an empty interval if it is idle."""
        return self.entries.box[self.summed + self.out.index(label)]

    def parts(self, operands: Sequence[Any], name: str) -> list[torch.Tensor]:
        """Return this worker's part of each operand. All messages travel at the same time."""
        found = [need.given(one, self.context) for need, one in zip(self.needs, operands, strict=True)]
        moving = [(place, need.moves) for place, need in enumerate(self.needs) if need.moves is not None]
        blocks = redistribute_blocks([(found[place], *moves) for place, moves in moving], name)
        for (place, _), block in zip(moving, blocks, strict=True):
            found[place] = block.reshape(self.needs[place].arrives)
        return found

    def __call__(
        self, func: Callable[..., torch.Tensor], operands: Sequence[Any], name: str, options: Hashable = ()
    ) -> GlobalTensor:
        """Apply a function to this worker's parts of the operands, and return the global result.

        Args:
            options: those options of the function on which the dtype of its result depends.
        """
        parts = self.parts(operands, name)
        dtype = self.result_dtype(func, operands, (name, options))
        y = local(func, self.partial, *zip(parts, (need.least for need in self.needs), strict=True))
        return self.finish(y if dtype is None else y.to(dtype), name)

    def result_dtype(
        self, func: Callable[..., torch.Tensor], operands: Sequence[Any], kind: Hashable
    ) -> torch.dtype | None:
        """Return the dtype of the result, the same on every worker; None if torch's result of any part has it anyway.

        For single cells, torch computes products by other functions, which autocast casts otherwise; for no cells, it
        takes dtypes that it refuses else. So the function is tried once, on zeros of one or two cells along each dim.

        Args:
            kind: with the function's name, the key of this dtype.
        Raises: the error that other workers get for these dtypes, also if torch takes this worker's parts.
        """
        cast = autocast_dtype(operands[0])
        if cast is None and not self.tries:
            return None
        key = (name_of(func), kind, cast, *[one.dtype for one in operands])
        if key not in self._dtypes:
            shapes = [
                [max(min(n, 2), least) for n, least in zip(one.shape, need.least, strict=True)]
                for one, need in zip(operands, self.needs, strict=True)
            ]
            with torch.no_grad(), unobserved():
                given = zip(shapes, operands, strict=True)
                few = (torch.zeros(shape, dtype=one.dtype, device=one.device) for shape, one in given)
                self._dtypes[key] = func(*few).dtype
        return self._dtypes[key]

    def finish(self, y: torch.Tensor, name: str) -> GlobalTensor:
        """Return the global result of what this worker has computed; partial sums are added up."""
        if self.summed:
            y = y.reshape(self.entries.local)
            y = redistribute_block(y, self.entries, self.gathered, name)
            if self.result.active:
                y = y.sum(tuple(range(self.summed)), dtype=y.dtype)
            y = y.reshape(self.result.local)
        return GlobalTensor._of(y, self.result)


def _whole_where_needed(
    spread: Spread, out: Sequence[Hashable], whole: Sequence[Hashable], adds: bool, cells: Callable[[Spread], int]
) -> tuple[Spread, list[Hashable]]:
    """Make those labels of a spread whole that may not be split, in the way by which one worker gets fewest cells.

    Args:
        out, whole, adds: as of :class:`Work`.
        cells: returns how many cells one worker gets for a spread, at most.
    Returns: the new spread, and the labels along which partial sums are added up.
    """
    summed: list[Hashable] = []
    free = [one for one in out if one not in whole]
    for label in spread.labels:
        if label in free or spread.places(label) == 1:
            continue
        ways = [(spread.whole_along(label, [one]), False) for one in free if spread.longest(one) > 1]
        if adds and label not in out:
            ways.append((spread, True))
        if not ways:
            ways = [(spread.whole_along(label, []), False)]

        def cost(way: tuple[Spread, bool]) -> int:
            return cells(way[0]) + (2 if way[1] else 1) * way[0].volume(out)

        spread, added = min(ways, key=cost) if len(ways) > 1 else ways[0]
        if added:
            summed.append(label)
    return spread, summed


def work_on(
    operands: Sequence[Any], labels: Sequence[Sequence[Hashable]], out: Sequence[Hashable], adds: bool = True,
    lead: int | None = None, whole: Sequence[Hashable] = (),
) -> Work:  # fmt: skip
    """Return the work for these operands, made once: see :class:`Work`."""
    context: Context = next(one._context for one in operands if type(one) is GlobalTensor)
    described = tuple(one._layout if type(one) is GlobalTensor else tuple(one.shape) for one in operands)
    key = ("work", described, tuple(map(tuple, labels)), tuple(out), adds, lead, tuple(whole))
    return context.keep(key, lambda: Work(context, described, labels, out, adds, lead, whole))


def check_shapes(func: Callable[..., Any], operands: Sequence[Any], *rest: Any, compares: bool = False) -> None:
    """Let torch check the shapes of whole operands, once for each combination.

    Args:
        compares: whether torch looks only which sizes are equal, 0 or 1. Then one check counts for all shapes in which
            the same ones are. Some checks take milliseconds, and the length of a text may be new in every call.
    Raises: on every worker the error that torch raises.
    """
    shapes = tuple(tuple(one.shape) for one in operands)
    context: Context = next(one._context for one in operands if type(one) is GlobalTensor)

    def check() -> bool:
        func(*(torch.empty(shape, device="meta") for shape in shapes), *rest)
        return True

    def ask() -> bool:
        return context.keep(("compared", func, _numbered(shapes), rest), check) if compares else check()

    context.keep(("checked", func, shapes, rest), ask)


def _numbered(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Number the sizes in shapes by their first occurrence; 0 and 1 stay."""
    numbers = {0: 0, 1: 1}
    return tuple(tuple(numbers.setdefault(n, len(numbers)) for n in shape) for shape in shapes)
