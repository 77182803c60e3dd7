"""Segments of a dim, each of which is reduced to one cell: the local part of adaptive pooling."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.nn import functional

from distdl.geometry.boxes import Intervals
from distdl.ops.pooling import largest_cells
from distdl.tensors.constants import Constant


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of cells along a dim of a block, each of which is reduced to one cell.

    Attributes:
        dim: which dim.
        count, width: how many segments, and the length of the longest.
        cells: the numbers of ``count * width`` cells, the last of a shorter segment repeated; None where segments of
            one width are the block, end to end.
        repeated: where they are repeated, as ``count x width``; None where nowhere.
    """

    dim: int
    count: int
    width: int
    cells: Constant | None = None
    repeated: Constant | None = None

    @classmethod
    def of(cls, dim: int, intervals: Intervals, extent: int) -> Segments:
        """From intervals of a block's cells along a dim, none of them empty."""
        count, width = len(intervals), max((stop - start for start, stop in intervals), default=1)
        if list(intervals) == [(i * width, i * width + width) for i in range(count)] and extent == count * width:
            return cls(dim, count, width)
        starts, stops = torch.tensor(intervals, device="cpu").reshape(-1, 2).T[..., None]
        cells = starts + torch.arange(width, device="cpu")
        repeated = cells >= stops
        numbers = Constant(torch.minimum(cells, stops - 1).reshape(-1))
        return cls(dim, count, width, numbers, Constant(repeated) if repeated.any() else None)

    @property
    def trivial(self) -> bool:
        """Whether every segment is one cell, and they are the block."""
        return self.cells is None and self.width == 1

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """x with two dims, segments and their cells, in place of one."""
        if self.cells is not None:
            x = x.index_select(self.dim, self.cells.on(x.device))
        parts: torch.Tensor = x.unflatten(self.dim, (self.count, self.width))
        return parts

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of each segment."""
        if self.trivial:
            return x
        parts = self.spread(x)
        if self.repeated is not None:
            repeated = self.repeated.on(x.device)
            parts = parts.masked_fill(repeated.reshape(*repeated.shape, *[1] * (x.dim() - self.dim - 1)), 0)
        return parts.sum(dim=self.dim + 1)

    def largest(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest cell of each segment, chosen as torch's pooling does, and its number along the dim."""
        if self.trivial:
            return x, along(self.dim, torch.arange(self.count, device=x.device), x).expand(x.shape)
        parts = self.spread(x)
        before, behind = parts.shape[: self.dim], parts.shape[self.dim + 2 :]
        lines = parts.reshape(prod(before), self.count * self.width, prod(behind))
        window = (self.width, 1)
        y, chosen = largest_cells(
            lines, lambda lines: functional.max_pool2d(lines, window, window, return_indices=True), 2
        )
        chosen = chosen // lines.shape[2]
        if self.cells is not None:
            chosen = self.cells.on(x.device)[chosen]
        whole = (*before, self.count, *behind)
        return y.reshape(whole), chosen.reshape(whole)


def along(dim: int, numbers: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Numbers for the places of one dim of x, in a shape that spreads over the others."""
    return numbers.reshape(-1, *[1] * (x.dim() - dim - 1))
