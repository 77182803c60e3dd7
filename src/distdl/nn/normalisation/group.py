"""The distributed group norm."""

from __future__ import annotations

from distdl.nn.module import Option
from distdl.nn.normalisation.state import Agreed, NormalisationLayer, Weights
from distdl.ops.normalisation import GroupNorm
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments


class DistributedGroupNorm(NormalisationLayer):
    r"""Normalise groups of consecutive channels of every sample, over the channels of the group and space.

    Forward: :math:`y = (x - \mu_{ng}) / \sqrt{v_{ng} + \epsilon} \cdot w_c + b_c`, with mean and variance over group
    and space, for which workers that have cells of a group exchange theirs once. Blocks need not be aligned with
    the groups: a worker measures the largest units of consecutive channels of which all groups and all blocks consist,
    and gathers the units of those groups of which it has channels. Weight and bias are copied along batch and space, as
    one message.
    Adjoint: the same exchanges transposed around the local derivatives.

    Args:
        P_x: the partition of x and y, ``batch x channels x space...``; any axis may be split.
        num_groups, num_channels: global numbers.
        eps: :math:`\epsilon`.
        affine: whether there are ``weight`` and ``bias``.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid; y likewise. Weight and bias
        are ``(local channels,)``, split as evenly as possible, on workers whose index is 0 in all axes except the
        second; of zero volume elsewhere. Workers outside P_x return a clone of their input.
    Raises: ValueError, on every worker, if the groups do not divide the channels, or for a partition without batch and
        channels; in forward, on every member, for an input of the wrong rank, number of channels or dtype, or if a
        group has only one value in the whole batch.
    Source: Wu & He, arXiv:1803.08494.
    """

    num_groups = Option[int]()
    num_channels = Option[int]()
    affine = Option[bool]()

    @checks_arguments
    def __init__(
        self, P_x: Partition, num_groups: int, num_channels: int, eps: float = 1e-05, affine: bool = True
    ) -> None:
        if P_x.workers.ndim < 2:
            raise ValueError(f"DistributedGroupNorm needs P_x: batch x channels x space; got {P_x}")
        op = GroupNorm(int(num_groups), int(num_channels), eps)
        op.check("DistributedGroupNorm")
        weights = Weights(P_x, op.extents, ("weight", "bias") if affine else ())
        super().__init__(f"DistributedGroupNorm (P_x: {P_x}; {num_channels})", Agreed(op, weights))
        self.P_x, self.num_groups, self.num_channels = P_x, int(num_groups), int(num_channels)
        self.eps, self.affine = eps, bool(affine)
