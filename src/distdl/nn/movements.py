"""What the workers of a contraction move and compute, as it follows from their headers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch

from distdl.boxes import Shape
from distdl.exchange import Route, move_together
from distdl.header import Carried
from distdl.nn.module import stay
from distdl.nn.padding import Filling
from distdl.nn.weights import pack, unpack

Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Movements:
    """What follows from the headers: routes (None where nothing has to move), dtypes, and the shape of the local y.

    Attributes:
        align: x from its blocks to the windows that outputs need.
        spread: x along out.
        parameters: weight and bias, as one vector.
        add: y along in, to P_y.
        filling: how the window is filled from the cells that have come.
        dtypes: of x and of the parameters.
        blocks: shapes of the weight and the bias of which this worker's vector consists; None where it has none.
        operator: the local operator.
        result: shape of its result; None on workers outside the work partition.
    """

    align: Route | None
    spread: Route | None
    parameters: Route | None
    add: Route | None
    filling: Filling
    dtypes: tuple[torch.dtype, torch.dtype]
    blocks: tuple[Shape | None, Shape | None]
    operator: Operator
    result: Shape | None

    def move_in(
        self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, carried: tuple[Carried, ...], blank: Shape
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """This worker's part of x, and its weight and bias, which move at the same time.

        Args:
            carried: what x, weight and bias carry on any member.
            blank: shape of x on workers that get none.
        """
        routes = [route for route in (self.align, self.spread) if route is not None]
        loads = [route.load(self.dtypes[0], blank, carried[0]) for route in routes]
        first = [(load, x) for load in loads[:1]]
        if self.parameters is not None:
            first.append((self.parameters.load(self.dtypes[1], (0,), reduce(or_, carried[1:])), pack(w, b)))
        if first:
            moved = move_together(*zip(*first, strict=True))
            x = moved[0] if loads else x
            w, b = (w, b) if self.parameters is None else unpack(moved[-1], *self.blocks)
        if not any(load.recorded for load, _ in first):
            x = stay(x, reduce(or_, carried))
        for load in loads[1:]:
            (x,) = move_together((load,), (x,))
        return x, w, b
