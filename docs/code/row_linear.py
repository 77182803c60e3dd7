"""RowLinear: a matrix that is split along its inputs, and a layer that needs ``local``.

 P_x: 1x3           each worker multiplies its part         P_y: 1x1
[ x0 | x1 | x2 ]    x0 W0^T,  x1 W1^T,  x2 W2^T      --->   worker 1: their sum
"""

import torch
from torch.nn import functional

import distdl
from distdl.nn import Module, SumReduce, local
from distdl.nn.layer import blank_shape
from distdl.nn.placement import uniform_parameter
from distdl.partition import Layout, Partition


# [layer]
class DistributedRowLinear(Module):
    r"""Multiply by a matrix whose columns are split over workers, and add up the partial products on one of them.

    Forward: :math:`y = \sum_i x_i W_i^T`.   Adjoint: :math:`\partial x_i = \partial y \, W_i`, after a broadcast of
    :math:`\partial y`.

    Args:
        P_x: partition of the input, ``1 x p``.
        P_y: partition of the output, ``1 x 1``.
        in_features, out_features: global numbers of features.
    Shapes: x local ``(batch, part of in_features)``, in elements, as even a split as possible, longer blocks first. y
        ``(batch, out_features)`` on the worker of P_y, ``(batch, 0)`` elsewhere.
    Attributes:
        weight: this worker's columns, ``(out_features, part of in_features)``; of zero volume outside P_x.
    """

    def __init__(self, P_x: Partition, P_y: Partition, in_features: int, out_features: int) -> None:
        super().__init__()
        self.P_x, self.P_y, self.out_features = P_x, P_y, out_features
        self._layout = Layout.balanced(P_x, (out_features, in_features))
        self._add = SumReduce(P_x, P_y)
        self.weight = uniform_parameter(self._layout, bound=in_features**-0.5)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        return {"weight": self._layout}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        member = self.P_x.comm.rank in self.P_x
        shape = (x.shape[0], self.out_features) if member else blank_shape(x.shape)
        y = local(functional.linear, shape, (x, (1, 1)), (self.weight, (1, 1)))
        return self._add(y)


# [use]
def main():
    P = distdl.world()
    layer = DistributedRowLinear(P[1:].reshape(1, 3), P[1:2].reshape(1, 1), in_features=2, out_features=4)
    x = torch.ones(5, 0 if P.rank in (0, 3) else 1, requires_grad=True)  # of two features, worker 3 has none
    y = layer(x)
    y.sum().backward()
    P.print_sequential(f"worker {P.rank}: weight {list(layer.weight.shape)}, y {list(y.shape)}, {x.grad.shape}")
    #: worker 0: weight [0], y [5, 0], torch.Size([5, 0])
    #: worker 1: weight [4, 1], y [5, 4], torch.Size([5, 1])
    #: worker 2: weight [4, 1], y [5, 0], torch.Size([5, 1])
    #: worker 3: weight [4, 0], y [5, 0], torch.Size([5, 0])


if __name__ == "__main__":
    distdl.run_workers(main)
