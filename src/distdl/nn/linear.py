"""The distributed linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distdl.agreement import Headers
from distdl.nn.layer import Layer, given
from distdl.nn.module import Option
from distdl.nn.placement import keep_sequential_keys
from distdl.nn.weights import Parameters, stored_on, weights_on
from distdl.ops import Op
from distdl.ops.linear import Linear
from distdl.partition import Layout, Partition, Signature, dims
from distdl.partition.arguments import checks_arguments


class Blocks(torch.nn.Module):
    """This worker's weight and bias."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self) -> Parameters:
        """Weight and bias, after the forward pre-hooks of this module, which pruning registers."""
        return self.weight, self.bias


class DistributedLinear(Layer):
    r"""Apply an affine map whose features and weights are split over workers.

    Forward: :math:`y_o = \sum_i W_{oi} x_i + b_o` in blocks: x is repartitioned if it is not split as the columns of W
    are, and copied along the axis out of ``P_w``; each worker multiplies by its block of W; and the partial results add
    up along the axis in.
    Adjoint: the same movements transposed, in reverse order.

    Args:
        P_x, P_y: partitions of input and output, ``batch... x p_in`` and ``batch... x p_out``, with the same axes for
            the batch, at least one.
        P_w: partition of the work, ``batch... x p_out x p_in``, or ``p_out x p_in`` if the batch is not split; its
            workers at index 0 in the batch store the weights.
        in_features, out_features: global numbers of features.
        bias: whether to add a bias; the first column of P_w stores it.
    Shapes: x local ``(batch..., part of in_features)``, in elements, any split that is a grid. It has at least as many
        dims as P_x has axes; dims without an axis come after those of the batch and are not split. y
        ``(batch..., part of out_features)``, split as evenly as possible in the features, longer blocks first, and in
        the other dims as x is; ``(batch, 0)`` on workers outside P_y.
    Attributes:
        sublinear.weight, sublinear.bias: this worker's blocks; of zero volume where it stores none.
    Raises: ValueError, on every worker, if the partitions do not fit; in forward, on every member, if the input does
        not.
    Source: Hewett & Grady, arXiv:2006.03108.
    """

    P_x = Option[Partition]()
    P_y = Option[Partition]()
    P_w = Option[Partition]()
    in_features = Option[int]()
    out_features = Option[int]()

    @checks_arguments
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
        op = Linear(P_y, int(in_features), int(out_features))
        weights = weights_on(stored_on(work, len(batch)), op.in_features, op.out_features, (), bias, "sublinear.")
        name = f"DistributedLinear (P_x: {P_x}; P_y: {P_y}; {in_features} to {out_features} channels)"
        everyone = P_x | P_y | work
        super().__init__(name, everyone, weights.application(op, _Rows(P_x), work, self._configure), bias, (work,))
        self.P_x, self.P_y, self.P_w = P_x, P_y, P_w
        self.in_features, self.out_features = op.in_features, op.out_features
        self._weights, self._everyone = weights, everyone
        self.sublinear = Blocks(*weights.parameters())
        keep_sequential_keys(self)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Where each parameter lives: which block of the sequential layer's parameter is on which worker."""
        return self._weights.layouts(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.sublinear()
        tensors = (x, *given(weight, bias))
        setup = self.agree(*tensors, extra=self._weights.extra(self.sublinear, weight))
        moved = setup.move_in(*tensors)
        y: torch.Tensor = setup.move_out(setup.local(*moved))
        return y

    def _configure(self, op: Any, headers: Headers) -> Op:
        rank, axes = headers.shapes(self.P_x, self.label.kind).shape[-1], self.P_x.workers.ndim
        if rank < axes:
            raise ValueError(
                f"{self.label} needs an input with at least {axes} dims, one for each axis of P_x; got one with {rank}"
            )
        return self._weights.configure(op, headers, self._everyone, self.label)

    def extra_repr(self) -> str:
        biased = self.sublinear.bias is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={biased}, "
            f"P_x: {self.P_x}; P_y: {self.P_y}; P_w: {self.P_w}"
        )


@dataclass(frozen=True)
class _Rows:
    """Where an x lives that may have more dims than P_x has axes, in front of the features."""

    partition: Partition

    def __call__(self, headers: Headers, number: int) -> Signature:
        shapes = headers.shapes(self.partition, "DistributedLinear", None, number)
        *batch, inner = self.partition.workers.shape
        extended = self.partition.reshape(*batch, *[1] * (shapes.shape[-1] - len(batch) - 1), inner)
        layout = Layout.tiled(extended, shapes.reshape(*extended.workers.shape, -1))
        dtype = headers.dtype(self.partition, "DistributedLinear", number)
        return Signature(layout, dtype, headers.derivatives[number], headers.own[number])
