"""What the workers of a contraction move and compute, as it follows from their headers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch

from distdl.agreement.header import Carried
from distdl.exchange import Operator, move_together
from distdl.exchange.route import Route, move
from distdl.geometry.boxes import Shape
from distdl.nn.module import stay
from distdl.ops.padding import Filling

LocalOperator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


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
        parts: shapes of this worker's weight and bias (if it has one), which move as one vector.
        operator: the local operator.
        result: shape of its result; None on workers outside the work partition.
    """

    align: Route | None
    spread: Route | None
    parameters: Route | None
    add: Route | None
    filling: Filling
    dtypes: tuple[torch.dtype, torch.dtype]
    parts: tuple[Shape, ...]
    operator: LocalOperator
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
        first: list[tuple[Operator, tuple[torch.Tensor, ...]]] = []
        for route in routes[:1]:
            y = route.plan.outputs.get(route.comm.rank, blank)
            first.append((route.operator(self.dtypes[0], carried[0], (tuple(x.shape),), (y,)), (x,)))
        if self.parameters is not None:
            given = (w,) if b is None else (w, b)
            shapes = [tuple(one.shape) for one in given]
            both = self.parameters.operator(self.dtypes[1], reduce(or_, carried[1:]), shapes, self.parts)
            first.append((both, given))
        if first:
            moved: list[Any] = move_together(*zip(*first, strict=True))
            x = moved[0] if routes else x
            if self.parameters is not None:
                w, b = moved[-1] if len(self.parts) == 2 else (moved[-1], None)
        if not any(one.recorded for one, _ in first):
            x = stay(x, reduce(or_, carried))
        for route in routes[1:]:
            x = move(route, x, self.dtypes[0], blank, carried[0])
        return x, w, b
