r"""Normalisation: batch, instance, group, layer and RMS. Each is ``y = (x - mean) / sqrt(variance + eps) * w + b``.

They differ in the cells that have one mean, and in the dims along which weight and bias vary. What happens to a tensor:

.. code-block:: text

    x ------------- measure --> entries ==gather==> entries of all workers with the same means -- merge --> moments
      \                                                                                                        |
       `------------------------------------------------------------------------------------------> standardise --> y
                                                                                                               |
    w, b ==========================spread==========================> the rows that belong to the block of x ---'

Double lines are messages. All but the spread is one node of autograd (see ``ops.fused_normalisation``). Where no mean
is shared by two workers, torch's own operator stands for it. y is split as x is, so nothing moves out.

Running statistics are the mean and variance that each worker keeps of its balanced block of channels. Workers with the
same block merge the same entries in the same order, so theirs are equal to the last bit without a message. Where they
stand for the moments of x, they travel with the rows if x is not split evenly.

Where every worker has the whole of w and b, each takes the rows that it needs and there is no spread. Statistics may
be kept whole likewise: then every member, also one without a block, gathers all entries when they take note of x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from distdl.geometry.boxes import Interval, Shape, balanced, shape
from distdl.ops.moments import Along, Moments, subgroup
from distdl.ops.setup import Site
from distdl.ops.standardisation import Arrangement, Normalisation, Running, step
from distdl.partition import CartesianPartition, Layout
from distdl.partition.groups import dims


@dataclass(frozen=True)
class BatchNorm(Normalisation):
    """Mean and variance of each channel, over batch and space.

    Attributes:
        num_features: global number of channels.
        momentum: the weight of a new batch in the running statistics; None for their average over all batches.
        running: whether there are running statistics.
        training: whether they take note of x; if not, they stand for its moments.
        everywhere: whether every member keeps those of all channels; else of its balanced block of channels.
    """

    num_features: int
    eps: float = 1e-05
    momentum: float | None = 0.1
    running: bool = True
    training: bool = True
    everywhere: bool = False

    @property
    def extents(self) -> Mapping[int, int]:
        return {1: self.num_features}

    def arrange(self, owned: Layout, site: Site) -> Arrangement:
        batch, _, *space = owned.extents
        values = (batch * prod(space), "value per channel")
        return _by_channels(self, owned, site, values, Along.merged(owned.intervals[0]), self.momentum)

    def compute(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running: Running | None
    ) -> torch.Tensor:
        if running is None:
            return torch.batch_norm(x, weight, bias, None, None, True, 0.0, self.eps, _fast())
        return _by_running(x, weight, bias, running, self.eps)


@dataclass(frozen=True)
class InstanceNorm(Normalisation):
    """Mean and variance of each channel of each sample, over space.

    Attributes:
        num_features: global number of channels.
        momentum: the weight of a new batch in the running statistics, which are averages over it; None for 0.
        running, training, everywhere: see :class:`BatchNorm`.
    """

    num_features: int
    eps: float = 1e-05
    momentum: float | None = 0.1
    running: bool = False
    training: bool = True
    everywhere: bool = False

    @property
    def extents(self) -> Mapping[int, int]:
        return {1: self.num_features}

    def arrange(self, owned: Layout, site: Site) -> Arrangement:
        samples, _, *space = owned.extents
        batches = owned.intervals[0]
        # running statistics are averages over the batch, so a worker that keeps some needs the moments of all samples
        needed = [(0, samples)] * len(batches) if self.running else batches
        values = (prod(space), "spatial element")
        return _by_channels(self, owned, site, values, Along.kept(batches, needed), self.momentum or 0.0)

    def compute(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running: Running | None
    ) -> torch.Tensor:
        if running is not None and running.factor is None:
            return _by_running(x, weight, bias, running, self.eps)
        if running is not None:
            with torch.no_grad():
                variance, mean = torch.var_mean(x, list(range(2, x.dim())))
                running.approach(mean.mean(0), variance.mean(0))
        # groups of one channel: torch's instance_norm returns a view. Contiguous, as there: in channels_last, the
        # kernel of groups subtracts squares of means, and of a mean of 1000 no digit is left in float32
        return torch.group_norm(x.contiguous(), x.shape[1], weight, bias, self.eps, _fast())


@dataclass(frozen=True)
class GroupNorm(Normalisation):
    """Mean and variance of each group of consecutive channels of each sample, over these channels and space.

    Blocks need not respect the groups: a worker measures the largest runs of channels of which all groups and blocks
    are made, and gathers those of the groups in which it has a part.

    Attributes:
        num_groups, num_channels: global numbers.
    """

    num_groups: int
    num_channels: int
    eps: float = 1e-05

    @property
    def extents(self) -> Mapping[int, int]:
        return {1: self.num_channels}

    def check(self, name: str) -> None:
        """Check the options.

        Raises: ValueError that names the layer.
        """
        groups, channels = self.num_groups, self.num_channels
        if not 1 <= groups <= channels or channels % groups:
            raise ValueError(f"{name} needs groups that divide {channels} channels; got {groups}")

    def arrange(self, owned: Layout, site: Site) -> Arrangement:
        samples, _, *space = owned.extents
        size = self.num_channels // self.num_groups
        if samples * size * prod(space) == 1:
            raise ValueError(
                f"{site.label} needs more than 1 value per channel when training; the global shape of the input is "
                f"{dims(owned.extents)} in {self.num_groups} groups"
            )
        P_x = owned.partition
        batches, blocks, *spaces = owned.intervals
        together = subgroup(blocks, size)
        along = [
            Along.kept(batches),
            Along.grouped([(i // together, j // together) for i, j in blocks], size // together),
            Along.merged([(0, together)]),
            *map(Along.merged, spaces),
        ]
        batch, own, *rest = shape(owned.box_of(P_x.comm.rank))
        cells = (batch, own // together, together, *rest)
        places = P_x.workers.shape
        moments = Moments(P_x.reshape(*places[:2], 1, *places[2:]), tuple(along), centred=True)
        return Arrangement(cells, (1, *cells[1:3], *[1] * len(rest)), moments)

    def compute(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running: Running | None
    ) -> torch.Tensor:
        # a block without channels passes as one with one channel, and one group
        groups = max(x.shape[1] * self.num_groups // self.num_channels, 1)
        return torch.group_norm(x, groups, weight, bias, self.eps, _fast())


@dataclass(frozen=True)
class LayerNorm(Normalisation):
    """Mean and variance over the last dims, at each place of the others.

    Attributes:
        normalized: the last dims, and their global extents.
    """

    normalized: tuple[tuple[int, int], ...]
    eps: float = 1e-05

    @property
    def extents(self) -> Mapping[int, int]:
        return dict(self.normalized)

    def arrange(self, owned: Layout, site: Site) -> Arrangement:
        return _by_last_dims(owned, self.extents, centred=True)

    def compute(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running: Running | None
    ) -> torch.Tensor:
        last = x.shape[-len(self.normalized) :]
        return torch.layer_norm(x, last, _shaped(weight, last), _shaped(bias, last), self.eps)


@dataclass(frozen=True)
class RMSNorm(Normalisation):
    """The mean of the squares over the last dims, at each place of the others. No mean is subtracted.

    Attributes:
        normalized: the last dims, and their global extents.
    """

    normalized: tuple[tuple[int, int], ...]
    eps: float | None = None

    @property
    def extents(self) -> Mapping[int, int]:
        return dict(self.normalized)

    def arrange(self, owned: Layout, site: Site) -> Arrangement:
        return _by_last_dims(owned, self.extents, centred=False)

    def compute(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running: Running | None
    ) -> torch.Tensor:
        last = x.shape[-len(self.normalized) :]
        return torch.rms_norm(x, last, _shaped(weight, last), step(self, x))


def _by_channels(
    op: BatchNorm | InstanceNorm,
    owned: Layout,
    site: Site,
    values: tuple[int, str],
    batch: Along,
    momentum: float | None,
) -> Arrangement:
    """The arrangement of a normalisation of channels over space, and perhaps over the batch.

    Args:
        values: how many values have one mean, and what such a value is called in the error if there is only one.
        batch: what happens along the batch: moments are merged, or kept for each sample.
        momentum: the weight of a new batch in running statistics.
    """
    cells, everywhere = shape(owned.box_of(site.me)), op.running and op.everywhere
    row = (1, cells[1], *[1] * (len(cells) - 2))
    if op.running and not op.training:
        return Arrangement(cells, row, None, everywhere=everywhere)
    if values[0] == 1:
        raise ValueError(
            f"{site.label} needs more than 1 {values[1]} when training; the global shape of the input is "
            f"{dims(owned.extents)}"
        )
    kept = _kept(owned, op)
    along = (batch, _channels(owned, kept), *map(Along.merged, owned.intervals[2:]))
    members = CartesianPartition(site.comm, list(site.members)) if everywhere else None
    moments = Moments(owned.partition, along, centred=True, everywhere=members)
    return Arrangement(cells, row, moments, kept, momentum, everywhere)


def _by_last_dims(owned: Layout, last: Mapping[int, int], centred: bool) -> Arrangement:
    cells = shape(owned.box_of(owned.partition.comm.rank))
    along = [
        Along.merged(intervals) if dim in last else Along.kept(intervals)
        for dim, intervals in enumerate(owned.intervals)
    ]
    row = tuple(n if dim in last else 1 for dim, n in enumerate(cells))
    return Arrangement(cells, row, Moments(owned.partition, tuple(along), centred))


def _kept(owned: Layout, op: BatchNorm | InstanceNorm) -> Interval | None:
    """The channels of which this worker keeps running statistics."""
    if not op.running:
        return None
    P_x = owned.partition
    if op.everywhere:
        return (0, op.num_features)
    return balanced(op.num_features, P_x.workers.shape[1])[P_x.index_of(P_x.comm.rank)[1]]


def _channels(owned: Layout, kept: Interval | None) -> Along:
    """A place needs the moments of its channels and, if it keeps running statistics, of those channels."""
    own = owned.intervals[1]
    if kept is None:
        return Along.kept(own)
    everywhere = balanced(owned.extents[1], len(own))
    return Along.kept(own, [(min(i, k), max(j, m)) for (i, j), (k, m) in zip(own, everywhere, strict=True)])


def _by_running(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running: Running, eps: float
) -> torch.Tensor:
    """torch's operator with running statistics, which take note of x or stand for its moments."""
    mean, variance, factor = running
    return torch.batch_norm(x, weight, bias, mean, variance, factor is not None, factor or 0.0, eps, _fast())


def _shaped(row: torch.Tensor | None, shape: Shape) -> torch.Tensor | None:
    return row if row is None or row.shape == shape else row.reshape(shape)


def _fast() -> bool:
    return bool(torch.backends.cudnn.enabled)
