"""The distributed instance norm."""

from __future__ import annotations

import torch

from distdl.nn.normalisation.state import TrackingLayer
from distdl.ops.normalisation import InstanceNorm
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments


class DistributedInstanceNorm(TrackingLayer):
    r"""Normalise every channel of every sample over space.

    Forward: :math:`y = (x - \mu_{nc}) / \sqrt{v_{nc} + \epsilon} \cdot w_c + b_c`, with mean and variance over space,
    for which workers with the same samples and channels exchange theirs once. In evaluation mode the running mean
    and variance are used, if there are any; they need no exchange. Weight and bias are copied from the workers that
    store them, as one message. Tracked statistics are averages over the batch, so for these the exchange also goes
    along the batch.
    Adjoint: the same exchanges transposed around the local derivatives.

    Args:
        P_x: the partition of x and y, ``batch x channels x space...``; any axis may be split.
        num_features: global number of channels.
        eps: :math:`\epsilon`.
        momentum: the weight of a new batch in the running statistics; None for 0, as in torch.
        affine: whether there are ``weight`` and ``bias``.
        track_running_stats: whether running statistics are kept.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid; y likewise. ``weight`` and
        ``bias`` are ``(local channels,)``, split as evenly as possible, on workers whose index is 0 in all axes except
        the second; of zero volume elsewhere. Running statistics likewise, on every worker. Workers outside P_x return a
        clone of their input.
    Raises: ValueError, on every worker, for a partition without batch, channels and space; in forward, on every member,
        for an input of the wrong rank, number of channels or dtype, for only one spatial element where moments are
        taken, or for workers in different modes.
    Source: Ulyanov et al., arXiv:1607.08022.
    """

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
    ) -> None:
        if P_x.workers.ndim < 3:
            raise ValueError(f"DistributedInstanceNorm needs P_x: batch x channels x space; got {P_x}")
        super().__init__(P_x, InstanceNorm(int(num_features), eps, momentum, bool(track_running_stats)), affine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._normalise(x, self._running(), self.momentum)
