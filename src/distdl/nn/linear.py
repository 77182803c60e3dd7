"""The distributed linear layer."""

from __future__ import annotations

import torch
from torch.nn import functional

from distdl.geometry.boxes import Shape
from distdl.geometry.windows import Intervals
from distdl.nn.contraction import Contraction
from distdl.nn.fixed import Fixed, takes_partitions
from distdl.partition import Partition
from distdl.partition.groups import dims


class Blocks(torch.nn.Module):
    """This worker's weight and bias."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
        """Both, as they are after the hooks of this module, which pruning registers."""
        return self.weight, self.bias


class DistributedLinear(Contraction):
    r"""Apply an affine map whose features and weights are cut up over workers.

    Forward: :math:`y_o = \sum_i W_{oi} x_i + b_o` in blocks: x is copied to the workers of ``P_w`` that have its
    columns, each multiplies by its block of W, and the partial results add up along the rows.
    Adjoint: the same movements transposed, last first.

    Args:
        P_x, P_y: partitions of input and output, ``batch... x p_in`` and ``batch... x p_out``, with the same axes of
            the batch, at least one.
        P_w: partition of the work, ``batch... x p_out x p_in``, or ``p_out x p_in`` where the batch is not split; its
            workers at place 0 in the batch store the weights.
        in_features, out_features: global numbers of features.
        bias: whether to add a bias; the first column of P_w stores it.
    Shapes: x local ``(batch..., part of in_features)``, in elements, any split that is a grid. It has at least as many
        dims as P_x has axes; dims without an axis stand behind those of the batch and are not split.
        y ``(batch..., part of out_features)``, split as evenly as possible in the features, longer blocks first, else
        as x is; ``(batch, 0)`` on workers outside P_y.
    Attributes:
        sublinear.weight, sublinear.bias: this worker's blocks; of zero volume where it stores none.
    Raises: ValueError, on every worker, if the partitions do not fit; in forward, on every member, if the input does
        not.
    Source: Hewett & Grady, arXiv:2006.03108.
    """

    path = "sublinear."
    extends = True
    P_w, in_features, out_features = Fixed(), Fixed(), Fixed()

    @takes_partitions
    def __init__(
        self, P_x: Partition, P_y: Partition, P_w: Partition, in_features: int, out_features: int, bias: bool = True
    ) -> None:
        p_x, p_y, p_w = (P.workers.shape for P in (P_x, P_y, P_w))
        batch = p_x[:-1]
        short = len(p_w) == 2 and set(batch) == {1}
        fits = len(p_x) > 1 and len(p_w) > 1 and p_x == (*batch, p_w[-1]) and p_y == (*batch, p_w[-2])
        if not fits or not (short or p_w[:-2] == batch):
            raise ValueError(
                "DistributedLinear needs P_x: batch x p_in, P_y: batch x p_out and P_w: batch x p_out x p_in, with the "
                "same axes of the batch (without them in P_w if they are 1); "
                f"got P_x: {dims(p_x)}, P_y: {dims(p_y)}, P_w: {dims(p_w)}"
            )
        work = P_w.reshape(*batch, *p_w[-2:])
        super().__init__(P_x, P_y, work, in_features, out_features, bias=bias)
        self.P_w = P_w
        self.in_features, self.out_features = int(in_features), int(out_features)

    def register(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        self.sublinear = Blocks(weight, bias)

    @property
    def holder(self) -> torch.nn.Module:
        return self.sublinear

    def blocks(self) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
        both: tuple[torch.nn.Parameter, torch.nn.Parameter | None] = self.sublinear()
        return both

    def windows(self, extents: Shape) -> tuple[list[Intervals], list[Intervals]]:
        return [], []

    def operate(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is None or x.dim() < 3:
            return functional.linear(x, weight, bias)
        # torch returns a view of its rows here; what writes into a view in place records other nodes than elsewhere
        rows = functional.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        y: torch.Tensor = torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], rows.shape[-1]))
        return y

    def extra_repr(self) -> str:
        biased = self.sublinear.bias is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={biased}, "
            f"P_x: {self.P_x}; P_y: {self.P_y}; P_w: {self.P_w}"
        )
