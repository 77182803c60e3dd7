"""Embedding: rows of a table that is split over workers, by rows, by columns, or both.

Here 6 rows lie on two workers (P_w: 2 x 1, for indices on one worker, P_x: 1)::

    worker 0: rows 0 1 2            worker 1: rows 3 4 5
    x = [5 0 3]   ---------------->  [5 0 3]                spread: the indices, along rows and columns
    [ 0   W_0   0 ]              [ W_5   0   W_3 ]          each looks up its own rows, and has zeros for the others
    y = [ W_5   W_0   W_3 ]  <-----------                   add: along the rows, onto P_y

In every sum all terms but one are 0, so y is exact. Where the indices are split, the table is copied along their axes,
and the gradients of the copies add up where it is stored. Indices have no gradient. A table that every worker has whole
is not split by rows, and nothing is sent for it: its gradient on a worker is that of the worker's own indices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from distdl.exchange import Chain, Together
from distdl.geometry.boxes import Interval, shape
from distdl.ops.setup import Beside, Setup, Site, blank_shape, same
from distdl.partition import Layout, Partition, Signature
from distdl.plan.planning import broadcast
from distdl.tensors.connection import local, zeros_on
from distdl.tensors.derivatives import NONE


@dataclass(frozen=True)
class Embedding:
    r"""Look up rows: :math:`y_{n,:} = W_{x_n,:}`.

    Its inputs are the indices x, in int32 or int64, and the table W ``(rows, columns)``. The partition of the site has
    the axes of x, then rows x columns.

    Attributes:
        target: the partition of y: the axes of x, then columns.
        padding_idx: a row that gets no gradient.
    """

    target: Partition
    padding_idx: int | None = None

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        x, table = signatures
        dtype = torch.int64 if 0 in x.layout.extents else x.dtype
        if dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{site.label} needs indices in int32 or int64; got {dtype}")
        work, me, blank = site.partition, site.me, blank_shape(x.local)
        axes, (rows, columns) = x.layout.partition.workers.shape, table.layout.intervals
        if table.layout.is_everywhere:
            rows, stored = rows[:1], work
        else:
            stored = table.layout.partition.reshape(*[1] * len(axes), len(rows), len(columns))
        along_both = x.layout.partition.reshape(*axes, 1, 1)
        along_rows = self.target.reshape(*axes, 1, len(columns))
        computed = Layout.along(self.target, [*x.layout.intervals, columns])
        result, mine = blank, (0, 0)
        if me in work:
            *places, row, column = work.index_of(me)
            result, mine = shape(computed.at((*places, column))), rows[row]

        spread, copied = site.identity(dtype, NONE, x.local), site.identity(table.dtype, table.derivatives, table.local)
        if along_both != work:
            plan = broadcast(along_both, work, x.layout.shapes, me)
            spread = site.operator(plan, dtype, NONE, [x.local])
        if stored != work:
            plan = broadcast(stored, work, table.layout.shapes, me)
            copied = site.operator(plan, table.dtype, table.derivatives, [table.local])
        add: Any = same
        if along_rows != work:
            plan = broadcast(along_rows, work, computed.shapes, me).T
            add = site.operator(plan, table.dtype, table.derivatives, [result], [blank])
        look_up, least = self._look_up(mine, table.layout.extents[0]), (1,) * len(axes)

        def compute(x: torch.Tensor, weight: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
            y = local(look_up, result, (x, least), (weight, (1, 1)))
            return y if given is None else y + zeros_on(given, ()).to(y.dtype)

        together = Together(spread, copied)
        move_in = Chain(_Indices(dtype), together) if 0 in x.local else together
        return Setup(move_in, compute, add, (computed,))

    def _look_up(self, rows: Interval, number: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """torch's function, in a block of the rows."""
        start, stop = rows
        padding = self.padding_idx - start if self.padding_idx is not None else -1

        def whole(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return functional.embedding(x, weight, padding if 0 <= padding < weight.shape[0] else None)

        def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            elsewhere = (x < start) | (x >= stop)
            y = whole((x - start).masked_fill(elsewhere, 0), weight)
            return y.masked_fill(elsewhere.unsqueeze(-1), 0)

        return whole if stop - start == number else block


class _Indices(Beside):
    """The same for indices of zero volume, which may be of any dtype: one that requires a gradient goes along, too."""

    def __call__(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moved = super().__call__(x.detach(), *others)
        return (*moved, x) if x.requires_grad else moved
