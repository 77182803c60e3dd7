r"""A convolution that leaves the block where it lies: what cells of other blocks add to its edges comes later.

A window is a copy of the block with cells of other blocks around it. Here, nothing is copied: torch convolves the
block, with zeros around it, while the cells around it are under way, and then these add what is missing::

    x    [ block ]  --convolve-->  y                                    no message
         rim  ==>  the cells around other blocks (h)                    under way meanwhile
    h    --convolve, by the taps that read them-->  added to y at its edges

    dy at the edges  -->  dh  ==>  the rims of other blocks             under way while torch computes
    dy               -->  dx, dw, db of the block;  dx += what arrives for its rim;  dw += what dy says of h

It is one autograd node, which saves the block itself, and h. Where its derivative is differentiated, that of windows is
taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn import functional

from distdl.exchange import Operator
from distdl.geometry.boxes import Interval, Shape
from distdl.geometry.edges import Line, Rim, Strip, around, rims
from distdl.ops.setup import Site
from distdl.partition import Layout
from distdl.plan.planners import edges
from distdl.tensors.derivatives import NONE
from distdl.tensors.function import Function
from distdl.transport import Pending

_FIRST = 2  # the first dim of space
_LARGE = 4  # blocks of fewer times as many elements as there are weights are copied into windows
_BACKWARD = torch.ops.aten.convolution_backward.default


def worthwhile(lines: Sequence[Line], blocks: Layout, windows: Layout, outputs: Layout, weights: int) -> bool:
    """Whether blocks are convolved where they lie, on every worker: then all of them do.

    Torch's padding has to fit each block, and blocks must not be thin beside what is around them. Nor small beside the
    weights: two copies of a block are saved, and each edge reads the weights three times, and writes them once.

    Args:
        weights: how many.
    """
    if prod(blocks.extents) < _LARGE * weights * len(blocks):
        return False
    moves = False
    for dim, line in enumerate(lines, _FIRST):
        own, out = blocks.rulers[dim].intervals, outputs.rulers[dim].intervals
        for block, run in zip(own, out, strict=True):
            empty = block[0] == block[1] and run[0] == run[1]
            if not empty and line.padding_of(block, run) is None:
                return False
        for (i, j), before, behind in zip(own, *around(own, windows.rulers[dim].intervals), strict=True):
            width = before[1] - before[0] + behind[1] - behind[0]
            if 2 * width > j - i:
                return False
            moves = moves or width > 0
    return moves


@dataclass(frozen=True)
class Kernel:
    """torch's convolution.

    Attributes:
        stride, padding, dilation: for each dim of space.
    """

    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        zeros = (0,) * len(self.stride)
        return torch.convolution(x, weight, bias, self.stride, self.padding, self.dilation, False, zeros, self.groups)

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needed: Sequence[bool]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of x, weight and bias, as needed."""
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _BACKWARD(
            dy, x, weight, [weight.shape[0]], self.stride, self.padding, self.dilation, False,
            (0,) * len(self.stride), self.groups, needed,
        )  # fmt: skip
        return found


@dataclass(frozen=True)
class Side:
    """What the cells on one side of a block add to its outputs.

    Attributes:
        dim: along which they stand beside the block.
        cells: where they are among all cells around the block along the dim.
        margins: zeros around them, as ``F.pad`` takes them; None if there are none.
    """

    dim: int
    cells: Interval
    strip: Strip
    kernel: Kernel
    margins: tuple[int, ...] | None

    def _run(self, tensor: torch.Tensor, run: Interval) -> torch.Tensor:
        return tensor.narrow(self.dim, run[0], run[1] - run[0])

    def _cells(self, h: torch.Tensor) -> torch.Tensor:
        h = self._run(h, self.cells)
        return h if self.margins is None else functional.pad(h, self.margins)

    def add(self, y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor) -> None:
        """Add to y what these cells add."""
        added = self.kernel(self._cells(h), self._run(weight, self.strip.taps))
        self._run(y, self.strip.outputs).add_(added)

    def backward(
        self, dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, needed: Sequence[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients of these cells, and of the taps that read them, as needed."""
        dy, taps = self._run(dy, self.strip.outputs), self._run(weight, self.strip.taps)
        dh, of_taps, _ = self.kernel.backward(dy, self._cells(h), taps, (needed[0], needed[1], False))
        return dh if dh is None or self.margins is None else functional.pad(dh, [-n for n in self.margins]), of_taps

    def add_taps(self, dw: torch.Tensor, of_taps: torch.Tensor) -> None:
        """Add the gradient of the taps to that of the kernel."""
        self._run(dw, self.strip.taps).add_(of_taps)


@dataclass(frozen=True, eq=False)
class Around:
    """The cells around this worker's block along one dim: how they come, and what they add.

    Attributes:
        rim: what others read of the block.
    """

    dim: int
    rim: Rim
    operator: Operator
    sides: tuple[Side, ...]

    @classmethod
    def of(
        cls, dim: int, lines: Sequence[Line], site: Site, blocks: Layout, windows: Layout, outputs: Layout,
        kernel: Kernel, dtype: torch.dtype,
    ) -> Around:  # fmt: skip
        """Those of this worker."""
        own = blocks.rulers[dim].intervals
        sides = around(own, windows.rulers[dim].intervals)
        plan = edges(blocks, windows, dim, site.me)
        active = site.me in blocks.partition
        operator = site.operator(plan, dtype, NONE, [plan.inputs.get(site.me, (0,))])
        if not active:
            return cls(dim, Rim(0, 0, 0), operator, ())
        place = blocks.partition.index_of(site.me)[dim]
        index = blocks.partition.index_of(site.me)
        # (along later dims, the cells are as wide as the window: nothing stands around them)
        padding = tuple(
            0 if other == dim or (other > dim and len(blocks.rulers[other].intervals) > 1) else n
            for other, n in enumerate(kernel.padding, _FIRST)
        )
        beside, found, start = Kernel(kernel.stride, padding, kernel.dilation, kernel.groups), [], 0
        for cells in (side[place] for side in sides):
            run = start, start + cells[1] - cells[0]
            strip = lines[dim - _FIRST].strip(cells, outputs.rulers[dim].intervals[index[dim]])
            if strip is not None:
                behind = (0, 0) * (len(blocks.rulers) - 1 - dim)
                margins = (*behind, *strip.margins) if any(strip.margins) else None
                found.append(Side(dim, run, strip, beside, margins))
            start = run[1]
        return cls(dim, rims(own, *sides)[place], operator, tuple(found))

    def begin(self, x: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Begin to fetch the cells around the block."""
        dim, (extent, first, last) = self.dim, self.rim
        if first and last:
            x = torch.cat([x.narrow(dim, 0, first), x.narrow(dim, extent - last, last)], dim)
        elif first + last < extent:
            x = x.narrow(dim, extent - last if last else 0, first + last)
        return self.operator.begin(x)

    def begin_back(self, dh: Sequence[torch.Tensor], h: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Begin to send gradients to where the cells are, and to receive those of the rim.

        Args:
            dh: of the cells of each side.
            h: the cells.
        """
        if len(dh) == 1 and dh[0].shape == h.shape:
            return self.operator.T.begin(dh[0])
        gradient = torch.zeros_like(h)
        for side, one in zip(self.sides, dh, strict=True):
            gradient.narrow(self.dim, side.cells[0], side.cells[1] - side.cells[0]).copy_(one)
        return self.operator.T.begin(gradient)

    def add(self, dx: torch.Tensor, rim: torch.Tensor) -> None:
        """Add the gradient of the rim to that of the block."""
        dim, (extent, first, last) = self.dim, self.rim
        if first:
            dx.narrow(dim, 0, first).add_(rim.narrow(dim, 0, first))
        if last:
            dx.narrow(dim, extent - last, last).add_(rim.narrow(dim, first, last))


@dataclass(frozen=True, eq=False)
class InPlace:
    """A convolution of this worker's block, and of what is around it.

    Attributes:
        kernel: of the block.
        result: shape of y.
        around: for each split dim.
        by_windows: the same function of x, weight and bias, differentiable any number of times.
    """

    kernel: Kernel
    result: Shape
    around: tuple[Around, ...]
    by_windows: Callable[..., torch.Tensor]

    @classmethod
    def of(
        cls, lines: Sequence[Line], site: Site, dtype: torch.dtype, layouts: tuple[Layout, Layout, Layout],
        result: Shape, groups: int, by_windows: Callable[..., torch.Tensor],
    ) -> InPlace:  # fmt: skip
        """That of this worker.

        Args:
            layouts: the blocks of x, the windows around them, and the blocks of y.
        """
        blocks, _, outputs = layouts
        padding = [0] * len(lines)
        if 0 not in result and site.me in blocks.partition:
            runs = zip(lines, blocks[site.me][_FIRST:], outputs[site.me][_FIRST:], strict=True)
            padding = [line.padding_of(*run) or 0 for line, *run in runs]
        kernel = Kernel(
            tuple(line.stride for line in lines), tuple(padding), tuple(line.dilation for line in lines), groups
        )
        split = [dim for dim, ruler in enumerate(blocks.rulers) if dim >= _FIRST and len(ruler.intervals) > 1]
        found = [Around.of(dim, lines, site, *layouts, kernel, dtype) for dim in split]
        return cls(kernel, result, tuple(found), by_windows)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = _InPlace.apply(x, weight, bias, self)
        return y


class _InPlace(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, steps: InPlace
    ) -> torch.Tensor:
        begun = [one.begin(x) for one in steps.around]
        y = steps.kernel(x, weight, bias) if 0 not in steps.result else x.new_zeros(steps.result)
        for one, (h, pending) in zip(steps.around, begun, strict=True):
            pending.wait()
            for side in one.sides:
                side.add(y, h, weight)
        ctx.steps = steps
        ctx.save_for_backward(x, weight, bias, *(h for h, _ in begun))
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, *cells = ctx.saved_tensors  # (before any message: a checkpoint recomputes here)
        steps: InPlace = ctx.steps
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            given = [one for one, wanted in zip((x, weight, bias), needed, strict=True) if wanted]
            again = iter(torch.autograd.grad(steps.by_windows(x, weight, bias), given, dy, create_graph=True))
            return *(next(again) if wanted else None for wanted in needed), None
        needs_x = needed[0]
        begun, of_taps = [], []
        for one, h in zip(steps.around, cells, strict=True):
            found = [side.backward(dy, h, weight, needed) for side in one.sides]
            of_taps += [(side, dw) for side, (_, dw) in zip(one.sides, found, strict=True)]
            if needs_x:
                begun.append((one, *one.begin_back([dh for dh, _ in found if dh is not None], h)))
        if 0 not in steps.result:
            dx, dw, db = steps.kernel.backward(dy, x, weight, needed)
        else:
            dx, dw, db = torch.zeros_like(x), torch.zeros_like(weight), weight.new_zeros(weight.shape[:1])
        for side, of_side in of_taps:
            if of_side is not None:
                side.add_taps(dw, of_side)
        for one, rim, pending in begun:
            pending.wait()
            one.add(dx, rim)
        return *(one if wanted else None for one, wanted in zip((dx, dw, db), needed, strict=True)), None
