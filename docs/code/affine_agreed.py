"""Affine again: the members agree once on all tensors, the parameters move as one message, and an input that does not
fit raises the same error on all members.
"""

from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor
from torch.nn import Parameter

import distdl
from distdl.exchange import Together
from distdl.nn.layer import Application, Layer, given
from distdl.nn.module import Option
from distdl.nn.placement import uniform_parameter
from distdl.ops import Setup, Site
from distdl.ops.setup import same
from distdl.partition import Layout, Partition, Signature, dims
from distdl.plan.planners import broadcast


# [op]
@dataclass(frozen=True)
class Affine:
    """Scale and shift the slices of a tensor along one dim. The parameters are copied to all workers of x.

    Attributes:
        dim: the dim that is not 1 in the shapes of the parameters.
    """

    dim: int

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        x, *parameters = signatures
        owned, stored = x.layout, parameters[0].layout
        here, there = owned.intervals[self.dim], stored.intervals[self.dim]
        if here != there:
            raise ValueError(
                f"{site.label} needs the blocks of dim {self.dim} at {list(there)}, where those of its parameters are; "
                f"those of an input of shape {dims(owned.extents)} are at {list(here)}"
            )
        needed = tuple(n if dim == self.dim else 1 for dim, n in enumerate(x.local))
        packed = {worker: (len(parameters) * n, *rest) for worker, (n, *rest) in stored.shapes.items()}
        spread = site.operator(
            broadcast(stored.partition, owned.partition, packed, site.me),
            dtype=parameters[0].dtype,
            derivatives=reduce(or_, [parameter.derivatives for parameter in parameters]),
            inputs=[parameter.local for parameter in parameters],
            blanks=[needed for _ in parameters],
        )
        keep = site.identity(x.dtype, x.derivatives, x.local)
        return Setup(Together(keep, spread), scale_and_shift, same, (owned,))


def scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    return x * scale if shift is None else x * scale + shift


# [layer]
class DistributedAffine(Layer):
    """Scale and shift each channel.

    Raises: in forward, on every member, ValueError if the channels are not split as the parameters are.
    """

    P_x = Option[Partition]()
    channels = Option[int]()

    def __init__(self, P_x: Partition, channels: int, shift: bool = True) -> None:
        ones = [1] * (P_x.workers.ndim - 2)
        stored = Layout.balanced(P_x[(slice(0, 1), slice(None), *[slice(0, 1)] * len(ones))], (1, channels, *ones))
        places = (P_x, stored, stored) if shift else (P_x, stored)
        name = f"DistributedAffine (P_x: {P_x}; {channels} channels)"
        super().__init__(name, P_x, Application(Affine(dim=1), places, P_x), (shift,))
        self.P_x, self.channels = P_x, channels
        self.scale = uniform_parameter(stored, bound=1.0)
        self.shift: Parameter | None = uniform_parameter(stored, bound=1.0) if shift else None
        self.parameter_layouts = {"scale": stored, "shift": stored} if shift else {"scale": stored}

    def forward(self, x: Tensor) -> Tensor:
        tensors = given(x, self.scale, self.shift)
        setup = self.agree(*tensors)
        moved = setup.move_in(*tensors)
        return setup.move_out(setup.local(*moved))


# [use]
def main():
    P = distdl.world().reshape(1, 2)
    layer = DistributedAffine(P, channels=3)
    try:
        layer(torch.ones(5, 1 if P.rank == 0 else 2))
    except ValueError as error:
        P.print_sequential(str(error).partition("; those of ")[2])
    #: an input of shape 5x3 are at [(0, 1), (1, 3)]
    #: an input of shape 5x3 are at [(0, 1), (1, 3)]


if __name__ == "__main__":
    distdl.run_workers(main, workers=2)
