"""The distributed normalisations without running statistics: layer, RMS and group."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import numpy as np
import torch

from distdl.geometry.boxes import shape
from distdl.nn.module import Option
from distdl.nn.moments import Along, Moments, subgroup
from distdl.nn.normalisation import Arrangement, Normalisation
from distdl.partition import Partition
from distdl.partition.groups import dims
from distdl.partition.layout import Layout


class Trailing(Normalisation):
    """Base: the last dims of x are normalised, each place of the others for itself."""

    shown: ClassVar[tuple[str, ...]] = ("normalized_shape", "eps", "elementwise_affine")
    normalized_shape = Option[tuple[int, ...]]()
    elementwise_affine = Option[bool]()

    def __init__(
        self, P_x: Partition, normalized_shape: int | Sequence[int], eps: float | None, parameters: int
    ) -> None:
        extents = [normalized_shape] if isinstance(normalized_shape, (int, np.integer)) else list(normalized_shape)
        first = P_x.workers.ndim - len(extents)
        if not extents or first < 0:
            raise ValueError(
                f"{type(self).__name__} needs a normalized_shape of at least one dim, and P_x to have an axis for each "
                f"dim; got {P_x} and normalized_shape {extents}"
            )
        super().__init__(P_x, eps, {first + dim: int(extent) for dim, extent in enumerate(extents)}, parameters)
        self.normalized_shape = tuple(map(int, extents))
        self.elementwise_affine = parameters > 0

    def trailing(
        self, x: torch.Tensor, *rows: torch.Tensor | None
    ) -> tuple[list[int], torch.Tensor | None, torch.Tensor | None]:
        """The extents of the last dims, and weight and bias in this shape."""
        extents = list(x.shape[-len(self.normalized_shape) :])
        weight, bias = (None if row is None else row.reshape(extents) for row in rows)
        return extents, weight, bias

    def arrange(self, owned: Layout, training: bool) -> Arrangement:
        cells = shape(owned[self.P_x.comm.rank])
        along = [
            Along.merged(intervals) if dim in self._extents else Along.kept(intervals)
            for dim, intervals in enumerate(owned.intervals)
        ]
        block = tuple(n if dim in self._extents else 1 for dim, n in enumerate(cells))
        return Arrangement(cells, block, Moments(self.P_x, tuple(along), self.centred))


class DistributedLayerNorm(Trailing):
    r"""Normalise over the last dims.

    Forward: :math:`y = (x - \mu) / \sqrt{v + \epsilon} \cdot w + b`, with mean and variance over the dims of
    ``normalized_shape``, for which workers at one place of the other axes exchange (mean, M2) once; nothing moves where
    these dims are not split. Weight and bias are copied along the other axes, as one message.
    Adjoint: the same exchanges transposed around the local derivatives.

    Args:
        P_x: the partition of x and y, one axis for each dim; any axis may be split.
        normalized_shape: global extents of the last dims.
        eps: :math:`\epsilon`.
        elementwise_affine, bias: whether there is a ``weight``, and whether there is a ``bias`` with it.
    Shapes: x local, in elements, any split that is a grid; y likewise. Weight and bias are the local part of
        ``normalized_shape``, split as evenly as possible, on workers at place 0 of the other axes; of zero volume
        elsewhere. Workers outside P_x return a clone of their input.
    Raises: ValueError, on every worker, if P_x has fewer axes than ``normalized_shape``; in forward, on every member,
        for an input of another rank or dtype, or other extents in the last dims.
    Source: Ba et al., arXiv:1607.06450.
    """

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-05,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__(P_x, normalized_shape, float(eps), (1 + bool(bias)) * bool(elementwise_affine))

    def operate(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: Sequence[torch.Tensor],
        tracked: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        return torch.layer_norm(x, *self.trailing(x, weight, bias), self.step(x))


class DistributedRMSNorm(Trailing):
    r"""Divide by the root of the mean square over the last dims.

    Forward: :math:`y = x / \sqrt{r + \epsilon} \cdot w`, r being the mean of :math:`x^2` over the dims of
    ``normalized_shape``, which workers at one place of the other axes exchange once; nothing moves where these dims are
    not split. The weight is copied along the other axes.
    Adjoint: the same exchanges transposed around the local derivatives.

    Args:
        P_x: the partition of x and y, one axis for each dim; any axis may be split.
        normalized_shape: global extents of the last dims.
        eps: :math:`\epsilon`; None for the distance from 1 to the next larger number of x's dtype (float32 for less).
        elementwise_affine: whether there is a ``weight``.
    Shapes: as in :class:`DistributedLayerNorm`.
    Raises: ValueError as there.
    Source: Zhang & Sennrich, arXiv:1910.07467.
    """

    centred = False

    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__(P_x, normalized_shape, eps, int(bool(elementwise_affine)))

    def operate(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: Sequence[torch.Tensor],
        tracked: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        extents, weight, _ = self.trailing(x, weight, bias)
        return torch.rms_norm(x, extents, weight, self.step(x))


class DistributedGroupNorm(Normalisation):
    r"""Normalise groups of consecutive channels of every sample, over the channels of the group and space.

    Forward: :math:`y = (x - \mu_{ng}) / \sqrt{v_{ng} + \epsilon} \cdot w_c + b_c`, with mean and variance over group
    and space, for which workers that have cells of a group exchange (mean, M2) once. Blocks need not respect the
    groups: a worker measures the largest runs of channels of which all groups and blocks are made, and gathers those of
    the groups in which it has a part. Weight and bias are copied along batch and space, as one message.
    Adjoint: the same exchanges transposed around the local derivatives.

    Args:
        P_x: the partition of x and y, ``batch x channels x space...``; any axis may be split.
        num_groups, num_channels: global numbers.
        eps: :math:`\epsilon`.
        affine: whether there are ``weight`` and ``bias``.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid; y likewise. Weight and bias
        are ``(local channels,)``, split as evenly as possible, on workers whose index is 0 in all axes but the second;
        of zero volume elsewhere. Workers outside P_x return a clone of their input.
    Raises: ValueError, on every worker, if the groups do not divide the channels, or for a partition without batch and
        channels; in forward, on every member, for an input of another rank, number of channels or dtype, or if there is
        no more than one value in all groups of one number together.
    Source: Wu & He, arXiv:1803.08494.
    """

    shown = ("num_groups", "num_channels", "eps", "affine")
    num_groups = Option[int]()
    num_channels = Option[int]()
    affine = Option[bool]()

    def __init__(
        self, P_x: Partition, num_groups: int, num_channels: int, eps: float = 1e-05, affine: bool = True
    ) -> None:
        if P_x.workers.ndim < 2:
            raise ValueError(f"DistributedGroupNorm needs P_x: batch x channels x space; got {P_x}")
        if not 1 <= num_groups <= num_channels or num_channels % num_groups:
            raise ValueError(f"DistributedGroupNorm needs groups that divide {num_channels} channels; got {num_groups}")
        super().__init__(P_x, float(eps), {1: int(num_channels)}, 2 * bool(affine), int(num_groups))
        self.num_groups, self.num_channels, self.affine = int(num_groups), int(num_channels), bool(affine)

    def operate(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: Sequence[torch.Tensor],
        tracked: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        groups = max(x.shape[1] * self.num_groups // self.num_channels, 1)  # (of the one channel for an empty block, 1)
        return torch.group_norm(x, groups, weight, bias, self.step(x), torch.backends.cudnn.enabled)

    def arrange(self, owned: Layout, training: bool) -> Arrangement:
        samples, _, *space = owned.extents
        size = self.num_channels // self.num_groups
        if samples * size * prod(space) == 1:
            raise ValueError(
                f"{self.label} needs more than 1 value per channel when training; the global shape of the input is "
                f"{dims(owned.extents)} in {self.num_groups} groups"
            )
        batches, blocks, *spaces = owned.intervals
        together = subgroup(blocks, size)
        along = [
            Along.kept(batches),
            Along.grouped([(i // together, j // together) for i, j in blocks], size // together),
            Along.merged([(0, together)]),
            *map(Along.merged, spaces),
        ]
        batch, own, *rest = shape(owned[self.P_x.comm.rank])
        cells = (batch, own // together, together, *rest)
        places = self.P_x.workers.shape
        partition = self.P_x.reshape(*places[:2], 1, *places[2:])
        return Arrangement(cells, (1, *cells[1:3], *[1] * len(rest)), Moments(partition, tuple(along), True))
