r"""A convolution that leaves the block where it lies: what cells of other blocks add to its edges comes later.

A window is a copy of the block with cells of other blocks around it. Here, nothing is copied: torch convolves the
block, with zeros around it, while the cells around it are under way, and then these add what is missing::

    x    [ block ]  --convolve-->  y                                    no message
         rim  ==>  the cells around other blocks (h)                    under way meanwhile
    h    --convolve, by the taps that read them-->  added to y at its edges

    dy at the edges  -->  dh  ==>  the rims of other blocks             under way while torch computes
    dy               -->  dx, dw, db of the block;  dx += what arrives for its rim;  dw += what dy says of h

It is one autograd node, which saves the block itself, and h. Where its derivative is differentiated, that of windows is
taken. A transposed convolution has the same picture, with other edges: what a cell adds to outputs beyond its block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from numpy import array_equal
from torch.nn import functional

from distdl.exchange import Operator
from distdl.geometry.boxes import Interval, Shape
from distdl.geometry.edges import Crop, Rim, Strip, beside, rims
from distdl.ops.kernel import Kernel, Lines
from distdl.ops.setup import Site, blank_shape
from distdl.partition import Layout, Signature
from distdl.plan.planning import edges
from distdl.tensors.derivatives import NONE
from distdl.tensors.function import Function, gradients_of
from distdl.transport import Pending

_FIRST = 2  # the first dim of space
_LARGE = 4  # blocks of fewer times as many elements as there are weights are copied into windows
_LONG = 1 << 17  # bytes of a block of which copies cost more than one more exchange


def stays(site: Site, signatures: Sequence[Signature], outputs: Layout) -> bool:
    """Whether x lies where it is worked on, and so will y, no channel is split, and torch's kernels are all it takes.

    Args:
        signatures: of x, w and b.
    """
    blocks, workers = signatures[0].layout, site.partition.workers
    return (
        workers.shape[1] * workers.shape[2] == 1
        and array_equal(blocks.partition.workers.ravel(), workers.ravel())
        and array_equal(blocks.partition.workers, outputs.partition.workers)
        and {one.dtype for one in signatures} in ({torch.float32}, {torch.float64})
        and not any(one.derivatives.tangent for one in signatures)
    )


def fits(x: Signature, weight: Signature, lines: Lines, windows: Layout, outputs: Layout) -> bool:
    """Whether blocks that stay are convolved where they lie, on every worker: then all of them do.

    Torch's padding has to fit each block, and blocks must not be thin beside what is around them. Nor small beside the
    weights: two copies of a block are saved, and each edge reads the weights three times, and writes them once. Where
    weights have to come, cells come after them and not at the same time.

    Args:
        windows: what the outputs of each worker read, over the partition of x.
    """
    blocks = x.layout
    if prod(blocks.extents) < _LARGE * prod(weight.layout.extents) * len(blocks):
        return False
    if not weight.layout.is_everywhere and prod(blocks.extents) * x.dtype.itemsize < _LONG * len(blocks):
        return False
    moves = False
    for dim, line in enumerate(lines, _FIRST):
        own, out = blocks.rulers[dim].intervals, outputs.rulers[dim].intervals
        for block, run in zip(own, out, strict=True):
            if block[0] == block[1] and run[0] == run[1]:
                continue
            crop = line.crop(block, run) if block[0] < block[1] and run[0] < run[1] else None
            if crop is None or not crop.exact:
                return False
        for (i, j), before, behind in zip(own, *beside(own, windows.rulers[dim].intervals), strict=True):
            width = before[1] - before[0] + behind[1] - behind[0]
            if 2 * width > j - i:
                return False
            moves = moves or width > 0
    return moves


@dataclass(frozen=True)
class Side:
    """What the cells on one side of a block add to its outputs.

    Attributes:
        dim: along which they stand beside the block.
        cells: where they are among all cells around the block along the dim.
        margins: zeros around them, as ``F.pad`` takes them; None if there are none.
        trims: the same around what the kernel makes of them.
    """

    dim: int
    cells: Interval
    strip: Strip
    kernel: Kernel
    margins: tuple[int, ...] | None
    trims: tuple[int, ...] | None

    def _run(self, tensor: torch.Tensor, run: Interval) -> torch.Tensor:
        return tensor.narrow(self.dim, run[0], run[1] - run[0])

    def add(self, y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor) -> None:
        """Add to y what these cells add."""
        cells = _padded(self._run(h, self.cells), self.margins)
        added = self.kernel(cells, self._run(weight, self.strip.taps))
        self._run(y, self.strip.outputs).add_(_padded(added, self.trims))

    def backward(
        self, dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, needed: Sequence[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients of these cells, and of the taps that read them, as needed."""
        dy = _padded(self._run(dy, self.strip.outputs), self.trims, -1)
        cells, taps = _padded(self._run(h, self.cells), self.margins), self._run(weight, self.strip.taps)
        dh, of_taps, _ = self.kernel.backward(dy, cells, taps, (needed[0], needed[1], False))
        return dh if dh is None else _padded(dh, self.margins, -1), of_taps

    def add_taps(self, dw: torch.Tensor, of_taps: torch.Tensor) -> None:
        """Add the gradient of the taps to that of the kernel."""
        self._run(dw, self.strip.taps).add_(of_taps)


def _padded(tensor: torch.Tensor, widths: tuple[int, ...] | None, sign: int = 1) -> torch.Tensor:
    return tensor if widths is None else functional.pad(tensor, [sign * width for width in widths])


def _widths(dims: Sequence[tuple[int, int]]) -> tuple[int, ...] | None:
    """Zeros before and behind each dim of space, as ``F.pad`` takes them; None if there are none."""
    flat = tuple(width for along in reversed(dims) for width in along)
    return flat if any(flat) else None


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
        cls, dim: int, lines: Lines, site: Site, blocks: Layout, windows: Layout, outputs: Layout, groups: int,
        dtype: torch.dtype,
    ) -> Around:  # fmt: skip
        """Those of this worker."""
        own = blocks.rulers[dim].intervals
        sides = beside(own, windows.rulers[dim].intervals)
        plan = edges(blocks, windows, dim, site.me)
        active = site.me in blocks.partition
        operator = site.operator(plan, dtype, NONE, [plan.inputs.get(site.me, (0,))])
        if not active:
            return cls(dim, Rim(0, 0, 0), operator, ())
        place = blocks.partition.index_of(site.me)[dim]
        rim = rims(own, *sides)[place]
        if 0 in outputs.shapes[site.me]:
            return cls(dim, rim, operator, ())
        # in earlier dims these cells are as wide as the block, and in later dims as the window
        cells_of, computed = (*blocks[site.me][:dim], *windows[site.me][dim:]), outputs[site.me]
        found, start = [], 0
        for cells in (side[place] for side in sides):
            run = start, start + cells[1] - cells[0]
            strip = lines[dim - _FIRST].strip(cells, computed[dim])
            if strip is not None:
                crops = [
                    line.crop(cells_of[d], computed[d]) or Crop(0) if d != dim else Crop(0, 0, *strip.trims)
                    for d, line in enumerate(lines, _FIRST)
                ]
                margins = _widths([strip.margins if d == dim else (0, 0) for d, _ in enumerate(lines, _FIRST)])
                trims = _widths([(crop.before, crop.behind) for crop in crops])
                found.append(Side(dim, run, strip, Kernel.of(lines, groups, crops), margins, trims))
            start = run[1]
        return cls(dim, rim, operator, tuple(found))

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
        differentiates: whether x carries a gradient on any worker.
        by_windows: the same function of x, weight and bias, differentiable any number of times.
    """

    kernel: Kernel
    result: Shape
    around: tuple[Around, ...]
    differentiates: bool
    by_windows: Callable[..., torch.Tensor]

    @classmethod
    def of(
        cls, lines: Lines, site: Site, x: Signature, windows: Layout, outputs: Layout, groups: int,
        by_windows: Callable[..., torch.Tensor],
    ) -> InPlace:  # fmt: skip
        """That of this worker. See :func:`fits`."""
        blocks = x.layout
        result = outputs.shapes[site.me] if site.me in outputs.partition else blank_shape(x.local)
        crops = [Crop(0)] * len(lines)
        if 0 not in result and site.me in blocks.partition:
            runs = zip(lines, blocks[site.me][_FIRST:], outputs[site.me][_FIRST:], strict=True)
            crops = [line.crop(*run) or Crop(0) for line, *run in runs]
        split = [dim for dim, ruler in enumerate(blocks.rulers) if dim >= _FIRST and len(ruler.intervals) > 1]
        found = [Around.of(dim, lines, site, blocks, windows, outputs, groups, x.dtype) for dim in split]
        kernel = Kernel.of(lines, groups, crops)
        return cls(kernel, result, tuple(found), x.derivatives.gradient, by_windows)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.differentiates and not x.requires_grad:
            # x of another worker requires a gradient, and that gradient has terms from this worker
            x = x.detach().requires_grad_()
        y: torch.Tensor = _InPlace.apply(x, weight, bias, self)
        return y


class _InPlace(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, steps: InPlace
    ) -> torch.Tensor:
        ctx.began = steps.around[0].operator.history
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
        # before any message, as this is where a checkpoint recomputes its forward
        x, weight, bias, *cells = ctx.saved_tensors
        steps: InPlace = ctx.steps
        needed = ctx.needs_input_grad[:3]
        if needed[0] or torch.is_grad_enabled():
            steps.around[0].operator.derive(ctx.began)
        if torch.is_grad_enabled():
            return *gradients_of(steps.by_windows, (x, weight, bias), needed, dy), None
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
            dx, dw = torch.zeros_like(x), torch.zeros_like(weight)
            db = weight.new_zeros(steps.kernel.biases(weight))
        for side, of_side in of_taps:
            if of_side is not None:
                side.add_taps(dw, of_side)
        for one, rim, pending in begun:
            pending.wait()
            one.add(dx, rim)
        return *(one if wanted else None for one, wanted in zip((dx, dw, db), needed, strict=True)), None
