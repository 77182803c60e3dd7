"""Padding: what stands around a tensor that is split over workers, and what convolutions share with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from distdl.exchange import Together
from distdl.geometry.borders import Border
from distdl.geometry.boxes import Box, Shape, balanced
from distdl.ops.setup import Setup, Site, same
from distdl.partition import Layout, Signature
from distdl.plan.planning import copy
from distdl.tensors.connection import no_view
from distdl.tensors.constants import Constant
from distdl.tensors.memory import is_channels_last


@dataclass(frozen=True, eq=False)
class Filling:
    """How a worker fills its window once it has fetched the cells that the window reads.

    Attributes:
        takes: for each dim that needs it, the cells to take, numbered from the first that was fetched.
        margins: cells of the constant value around them, as ``F.pad`` takes it.
    """

    takes: tuple[tuple[int, Constant], ...] = ()
    margins: Shape = ()

    @classmethod
    def of(cls, border: Border, window: Box, extents: Shape) -> Filling:
        """For a window of a tensor of the given extents."""
        steps = border.steps(window, extents)
        takes = tuple((dim, Constant(torch.tensor(cells, device="cpu"))) for dim, cells in steps)
        return cls(takes, border.margins(window, extents))

    def fill(self, x: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """The window, from the cells that were fetched for it."""
        for dim, cells in self.takes:
            if dim > 1 and is_channels_last(x):
                x = x.movedim(1, -1).index_select(dim - 1, cells.on(x.device)).movedim(-1, 1)  # and it stays so
            else:
                x = x.index_select(dim, cells.on(x.device))
        return functional.pad(x, self.margins, value=value) if self.margins else x


@dataclass(frozen=True)
class Padding:
    r"""Pad a tensor, or cut cells off it.

    Forward: :math:`y[c] = x[s(c)]`, s(c) being the cell of x that stands for the cell c of y; where there is none, y is
    ``value``. Each worker fetches the cells that its block of y reads, and puts them in their places.

    Attributes:
        border: mode and widths, one pair for each dim.
        value: of the cells around x, in the mode ``constant``.
        padded: the dims that are split anew, as evenly as possible; the others stay as x is split.
    """

    border: Border
    value: float
    padded: tuple[int, ...]

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        (x,) = signatures
        owned, border, me = x.layout, self.border, site.me
        border.check(site.label.kind, owned.extents)
        if border.mode == "constant" and self.value == 0:
            border = replace(border, mode="zeros")  # which a plan leaves where there is no cell
        computed = list(owned.intervals)
        windows = list(owned.intervals)
        for dim in self.padded:
            before, behind = border.widths[dim]
            computed[dim] = balanced(owned.extents[dim] + before + behind, len(owned.intervals[dim]))
            windows[dim] = tuple((start - before, stop - before) for start, stop in computed[dim])
        needed = Layout.along(owned.partition, border.fetched(windows, owned.extents))
        plan = copy(owned, needed, me, border.repeats(owned.extents))
        fetch = site.operator(plan, x.dtype, x.derivatives, [x.local], keeps_format=True)
        filling = Filling.of(border, Layout.along(owned.partition, windows).box_of(me), owned.extents)

        def fill(cells: torch.Tensor) -> torch.Tensor:
            # not by ``local``: a block without cells may get cells of the value
            return no_view(filling.fill(cells, self.value))

        return Setup(Together(fetch), fill, same, (Layout.along(owned.partition, computed),))
