"""Padding of a tensor that is cut up over workers, and what convolutions share with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch.nn import functional

from distdl.agreement import Agreement
from distdl.agreement.header import Headers
from distdl.exchange.route import Route, move
from distdl.geometry.borders import PADDING_MODES, Border
from distdl.geometry.boxes import Box, Shape, balanced
from distdl.nn.module import Module, Option, no_view
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.plan.planners import copy
from distdl.tensors.memory import is_channels_last
from distdl.transport.label import Label


@dataclass(frozen=True, eq=False)
class Filling:
    """How a worker fills its window once it has fetched the cells that the window reads.

    Attributes:
        takes: for each dim that needs it, the cells to take, numbered from the first that was fetched.
        margins: cells of the constant value around them, as ``F.pad`` takes it.
    """

    takes: tuple[tuple[int, torch.Tensor], ...] = ()
    margins: Shape = ()

    @classmethod
    def of(cls, border: Border, window: Box, extents: Shape) -> Filling:
        """For a window of a tensor of the given extents."""
        takes = tuple((dim, torch.tensor(cells)) for dim, cells in border.steps(window, extents))
        return cls(takes, border.margins(window, extents))

    def fill(self, x: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """The window, from the cells that were fetched for it."""
        for dim, cells in self.takes:
            if dim > 1 and is_channels_last(x):
                x = x.movedim(1, -1).index_select(dim - 1, cells.to(x.device)).movedim(-1, 1)  # and it stays so
            else:
                x = x.index_select(dim, cells.to(x.device))
        return functional.pad(x, self.margins, value=value) if self.margins else x


class DistributedPad(Module):
    r"""Pad a tensor, or cut cells off it, as ``torch.nn.functional.pad`` does.

    Forward: :math:`y[c] = x[s(c)]`, s(c) being the cell of x that stands for the cell c of y; where there is none, y is
    ``value``. Each worker fetches the cells that its block of y reads, however many blocks of x that touches.
    Adjoint: :math:`\partial x[c] = \sum_{c'\,:\,s(c') = c} \partial y[c']`, on the worker that owns c.

    Args:
        P_x: partition of input and output; axis i splits dim i. Any of them may be split.
        padding: cells before and behind each dim, **the last dim first**: ``(before, behind, before, behind, ...)``.
            Negative numbers cut cells off.
        mode: ``constant``, ``reflect``, ``replicate`` or ``circular``.
        value: of the cells around x, in the mode ``constant``.
    Shapes: x local, as many dims as P_x has axes, in elements, any split that is a grid. y is split as evenly as
        possible, longer blocks first, in the dims that ``padding`` names, else as x is. Workers outside P_x return a
        clone of their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        another rank, for padding that is too large (reflect: the extent or more; circular: more than the extent that is
        left), or where nothing would be left.
    """

    P_x = Option[Partition]()
    padding = Option[Shape]()
    mode = Option[str]()
    value = Option[float]()

    def __init__(self, P_x: Partition, padding: Sequence[int], mode: str = "constant", value: float = 0.0) -> None:
        super().__init__()
        pairs = _pairs(padding, P_x.workers.ndim)
        if mode not in PADDING_MODES:
            raise ValueError(f"DistributedPad has the modes {', '.join(PADDING_MODES)}; got {mode!r}")
        if mode != "constant" and value:
            raise ValueError(f"DistributedPad has a value in the mode 'constant' only; got {value} and mode {mode!r}")
        self.P_x, self.padding = P_x, tuple(number for pair in pairs for number in pair)
        self.mode, self.value = mode, value
        widths = ((0, 0),) * (P_x.workers.ndim - len(pairs)) + tuple(reversed(pairs))
        self._first = P_x.workers.ndim - len(pairs)
        self._border = Border("zeros" if mode == "constant" and value == 0 else mode, widths)
        self._name = Label(f"DistributedPad (P_x: {P_x}; padding {self.padding}, {mode})")
        options = (widths, mode, value, P_x.workers.shape)
        self._agreement = Agreement.among(P_x, self._name, options, self._derive)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.P_x.comm.rank not in self.P_x:
            return x.clone()
        decision = self._agreement.reach((x,))
        route, dtype, filling = decision.outcome
        # (not by local: around no cells, there may be cells of the value)
        return no_view(filling.fill(move(route, x, dtype, (0,), decision.carried[0]), self.value))

    def _derive(self, headers: Headers) -> tuple[Route, torch.dtype, Filling]:
        P_x, me, border = self.P_x, self.P_x.comm.rank, self._border
        owned = Layout.tiled(P_x, headers.shapes(P_x, "DistributedPad", P_x.workers.ndim))
        border.check("DistributedPad", owned.extents)
        windows = list(owned.intervals)
        for dim in range(self._first, len(windows)):
            before, behind = border.widths[dim]
            outputs = balanced(owned.extents[dim] + before + behind, P_x.workers.shape[dim])
            windows[dim] = tuple((start - before, stop - before) for start, stop in outputs)
        needed = Layout.of(P_x, border.fetched(windows, owned.extents))
        plan = copy(owned, needed, me, border.repeats(owned.extents))
        filling = Filling.of(border, Layout.of(P_x, windows)[me], owned.extents)
        route = Route(plan, P_x.comm, headers.members, self._name, keeps_format=True)
        return route, headers.dtype(P_x, "DistributedPad"), filling


def _pairs(padding: Any, axes: int) -> list[tuple[int, int]]:
    """Cells before and behind each dim, the last dim first."""
    try:
        numbers = [index(number) for number in padding]
    except TypeError:
        numbers = [0]
    if len(numbers) % 2 or not 2 <= len(numbers) <= 2 * axes:
        raise ValueError(
            f"DistributedPad needs two whole numbers for each padded dim, the last dim first, of at most {axes} dims; "
            f"got {padding!r}"
        )
    return list(zip(numbers[::2], numbers[1::2], strict=True))
