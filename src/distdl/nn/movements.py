"""What the workers of a contraction move and compute, as it follows from their headers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch

from distdl.boxes import Shape
from distdl.exchange import move, move_together
from distdl.header import Carried
from distdl.nn.module import stay
from distdl.nn.padding import Filling
from distdl.route import Load, Route

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
        first: list[tuple[Load, Any]] = [(load, x) for load in loads[:1]]
        if self.parameters is not None:
            both = self.parameters.load(self.dtypes[1], (0,), reduce(or_, carried[1:]), self.parts)
            first.append((both, (w,) if b is None else (w, b)))
        if first:
            moved: list[Any] = move_together(*zip(*first, strict=True))
            x = moved[0] if loads else x
            if self.parameters is not None:
                w, b = (*moved[-1], None)[:2]
        if not any(load.recorded for load, _ in first):
            x = stay(x, reduce(or_, carried))
        for load in loads[1:]:
            x = move(load.route, x, load.dtype, load.blank, load.carried)
        return x, w, b
