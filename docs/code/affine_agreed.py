"""Affine once more: the members agree once for both parameters, and an input that does not fit is one error on all."""

import torch

import distdl
from distdl.agreement import Agreement
from distdl.agreement.header import Headers
from distdl.exchange.route import Route, move
from distdl.nn import Module
from distdl.nn.placement import uniform_parameter
from distdl.partition import Partition
from distdl.partition.groups import dims
from distdl.partition.layout import Layout
from distdl.plan.planners import broadcast
from distdl.tensors.connection import outside
from distdl.transport.label import Label


# [layer]
class DistributedAffine(Module):
    """Scale and shift each channel. Raises, in forward, on every member: ValueError for channels split otherwise."""

    def __init__(self, P_x: Partition, channels: int) -> None:
        super().__init__()
        self.P_x = P_x
        ones = [1] * (P_x.workers.ndim - 2)
        self._stored = P_x[(slice(0, 1), slice(None), *[slice(0, 1)] * len(ones))]
        self._layout = Layout.balanced(self._stored, (1, channels, *ones))
        self.scale = uniform_parameter(self._layout, bound=1.0)
        self.shift = uniform_parameter(self._layout, bound=1.0)
        self.label = Label(f"DistributedAffine (P_x: {P_x}; {channels} channels)")
        self._agreement = Agreement.among(P_x, self.label, (P_x.workers.shape, channels), self._derive)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        return {"scale": self._layout, "shift": self._layout}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = (self.scale, self.shift)
        if self.P_x.comm.rank not in self.P_x:
            return outside(x, *parameters)
        decision = self._agreement.reach((x, *parameters))
        route, dtype = decision.outcome
        scale, shift = (
            move(route, parameter, dtype, (0,), carried)
            for parameter, carried in zip(parameters, decision.carried[1:], strict=True)
        )
        return x * scale + shift

    def _derive(self, headers: Headers) -> tuple[Route, torch.dtype]:
        owned = Layout.tiled(self.P_x, headers.shapes(self.P_x, "DistributedAffine", self.P_x.workers.ndim))
        if owned.intervals[1] != self._layout.intervals[1]:
            raise ValueError(
                f"{self.label} needs the channels at {list(self._layout.intervals[1])}; "
                f"the blocks of an input of shape {dims(owned.extents)} are at {list(owned.intervals[1])}"
            )
        plan = broadcast(self._stored, self.P_x, self._layout.shapes, self.P_x.comm.rank)
        dtype = headers.dtype(self._stored, "DistributedAffine", tensor=1)
        return Route(plan, self.P_x.comm, headers.members, self.label), dtype


# [use]
def main():
    P = distdl.world().reshape(1, 2)
    layer = DistributedAffine(P, channels=3)
    try:
        layer(torch.ones(5, 1 if P.rank == 0 else 2))
    except ValueError as error:
        P.print_sequential(str(error).partition("; the ")[2])
    #: blocks of an input of shape 5x3 are at [(0, 1), (1, 3)]
    #: blocks of an input of shape 5x3 are at [(0, 1), (1, 3)]


if __name__ == "__main__":
    distdl.run_workers(main, workers=2)
