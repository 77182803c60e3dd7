"""Routes: what families that are not yet operations use to make operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distdl.exchange.operator import Operator
from distdl.geometry.boxes import Shape
from distdl.plan import Plan
from distdl.tensors.derivatives import Derivatives
from distdl.transport.communicator import Communicator, Group
from distdl.transport.label import Label


@dataclass(frozen=True, eq=False)
class Route:
    """A plan together with those who execute it; it makes operators for tensors of some shapes."""

    plan: Plan
    comm: Communicator
    members: Group
    where: Label
    keeps_format: bool = False
    _operators: dict[Any, Operator] = field(default_factory=dict, init=False, repr=False)

    def operator(
        self, dtype: torch.dtype, derivatives: Derivatives, inputs: Sequence[Shape], outputs: Sequence[Shape]
    ) -> Operator:
        """The operator for tensors of these shapes."""
        key = (dtype, derivatives, tuple(inputs), tuple(outputs))
        found = self._operators.get(key)
        if found is None:
            found = self._operators[key] = Operator(
                self.plan, self.comm, self.members, self.where, dtype, derivatives, inputs, outputs, self.keeps_format
            )
        return found


def move(
    route: Route, x: torch.Tensor, dtype: torch.dtype, blank: tuple[int, ...], derivatives: Derivatives
) -> torch.Tensor:
    """Execute a plan on this worker's tensor, and record it for differentiation if the members agreed to."""
    outputs = route.plan.outputs.get(route.comm.rank, blank)
    y: torch.Tensor = route.operator(dtype, derivatives, (tuple(x.shape),), (outputs,))(x)
    return y
