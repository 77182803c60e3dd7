"""The distributed normalisations of channels that keep running statistics: batch and instance."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import torch

from distdl.geometry.boxes import Interval, shape
from distdl.nn.module import Option
from distdl.nn.moments import Along, Moments
from distdl.nn.normalisation import Arrangement, Normalisation
from distdl.partition import Partition
from distdl.partition.groups import dims
from distdl.partition.layout import Layout


class Tracking(Normalisation):
    """Base: channels, in dim 1, of each of which a running mean and variance is kept.

    Every worker keeps those of its balanced block of channels. Workers with the same block merge the same moments in
    the same order, so theirs are equal to the last bit and no message is needed for it.
    """

    shown = ("num_features", "eps", "momentum", "affine", "track_running_stats")
    num_features = Option[int]()
    affine = Option[bool]()
    track_running_stats = Option[bool]()
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float,
        momentum: float | None,
        affine: bool,
        track_running_stats: bool,
    ) -> None:
        super().__init__(P_x, float(eps), {1: int(num_features)}, 2 * bool(affine), (momentum, track_running_stats))
        self.num_features, self.momentum = int(num_features), momentum
        self.affine, self.track_running_stats = bool(affine), bool(track_running_stats)
        start, stop = self._kept
        for name, value in (("running_mean", torch.zeros(stop - start)), ("running_var", torch.ones(stop - start))):
            self.register_buffer(name, value if track_running_stats else None)
        self.register_buffer("num_batches_tracked", torch.tensor(0) if track_running_stats else None)
        self.register_load_state_dict_pre_hook(_read_own_channels)  # type: ignore[no-untyped-call]  # torch's

    @property
    def _kept(self) -> Interval:
        """The channels whose running statistics this worker keeps."""
        me = self.P_x.comm.rank
        return self._blocks[1][self.P_x.index_of(me)[1]] if me in self.P_x else (0, 0)

    @property
    def momentum(self) -> float | None:
        return self._momentum

    @momentum.setter
    def momentum(self, momentum: float | None) -> None:
        self._momentum: float | None = None if momentum is None else float(momentum)

    def numbers(self) -> dict[str, float | None]:
        return {**super().numbers(), "momentum": self._momentum}

    @property
    def factor(self) -> float:
        """The weight that a new batch, of those in training, gets in the running statistics."""
        return 0.0 if self._momentum is None else self._momentum

    def reset_running_stats(self) -> None:
        """Begin anew: mean 0, variance 1, no batch counted."""
        for value, running in enumerate(self.running()):
            running.fill_(value)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()

    def running(self) -> tuple[torch.Tensor, ...]:
        if self.running_mean is None or self.running_var is None:
            return ()
        return self.running_mean, self.running_var

    def track(self, moments: Moments, means: torch.Tensor) -> None:
        if not (self.running() and moments.count and means.shape[1]):
            return
        batch, _, *space = moments.gathered
        mean, squares = moments.of(means, (batch, self._kept, *space)).mean(1)
        self.approach(self.running(), (mean, squares / (moments.count - 1)))

    def approach(self, running: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        """Move the running mean and variance towards those of a batch."""
        for one, towards in zip(running, new, strict=True):
            one.mul_(1 - self.factor).add_(self.factor * towards.flatten())

    def by_running(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The operator where a mean and a variance are given for each channel."""
        mean, variance = running
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, self.step(x), torch.backends.cudnn.enabled)

    def _channels(self, owned: Layout, training: bool) -> Along:
        """A place needs the moments of its channels and, to track them, of those that it keeps."""
        own, kept = owned.intervals[1], self._blocks[1]
        if not (training and self.running()):
            return Along.kept(own)
        return Along.kept(own, [(min(i, k), max(j, m)) for (i, j), (k, m) in zip(own, kept, strict=True)])

    def _arranged(self, owned: Layout, along: list[Along]) -> Arrangement:
        cells = shape(owned[self.P_x.comm.rank])
        block = (1, cells[1], *[1] * (len(cells) - 2))
        return Arrangement(cells, block, Moments(self.P_x, tuple(along), centred=True) if along else None)


def _read_own_channels(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Of running statistics of all channels, take those of this worker."""
    for key in (prefix + "running_mean", prefix + "running_var"):
        if key in state and len(state[key]) == module.num_features:
            state[key] = state[key][slice(*module._kept)]


class Flat(torch.nn.Parameter):
    """A parameter in one dim: a view of it, to which one may also assign. Its gradient is the parameter's."""

    of_parameter: torch.nn.Parameter

    @classmethod
    def of(cls, parameter: torch.nn.Parameter) -> Flat:
        flat: Flat = parameter.view(-1).as_subclass(cls)
        flat.of_parameter = parameter
        return flat

    @property
    def data(self) -> torch.Tensor:
        return self.of_parameter.data.view(-1)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.of_parameter.data = value.reshape(self.of_parameter.shape)

    @property
    def grad(self) -> torch.Tensor | None:
        grad = self.of_parameter.grad
        return None if grad is None else grad.view(-1)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.of_parameter.grad = None if value is None else value.reshape(self.of_parameter.shape)


class DistributedBatchNorm(Tracking):
    r"""Normalise every channel over batch and space.

    Forward: :math:`y = (x - \mu_c) / \sqrt{v_c + \epsilon} \cdot \gamma_c + \beta_c`, with mean and variance of channel
    c over batch and space: in training mode those of this batch, for which workers with the same channels exchange
    (mean, M2) once; in evaluation mode the running ones, for which nothing moves. :math:`\gamma, \beta` are copied from
    the workers that store them, as one message. Running statistics move by ``momentum`` towards the batch's mean and
    unbiased variance.
    Adjoint: the same exchanges transposed around the local derivatives.

    Args:
        P_x: the partition of x and y, ``batch x channels x space...``; any axis may be split.
        num_features: global number of channels.
        eps: :math:`\epsilon`.
        momentum: the weight of a new batch in the running statistics; None for their average over all batches.
        affine: whether there are ``gamma`` and ``beta``.
        track_running_stats: whether running statistics are kept; if not, evaluation mode takes moments of its batch.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid; y likewise. ``gamma`` and
        ``beta`` are ``(1, local channels, 1...)``, split as evenly as possible, on workers whose index is 0 in all axes
        but the second; other workers have None. ``running_mean`` and ``running_var`` are ``(local channels,)`` on every
        worker. Workers outside P_x return a clone of their input.
        ``weight`` and ``bias`` are the same numbers as torch has them, ``(local channels,)``, and of zero volume on
        other workers: not parameters of their own, but ``gamma`` and ``beta`` to read and to fill.
    Raises: ValueError, on every worker, for a partition without batch and channels; in forward, on every member, for an
        input of another rank, number of channels or dtype, one value per channel where moments are taken, or workers in
        different modes.
    Source: Ioffe & Szegedy, arXiv:1502.03167.
    """

    names = ("gamma", "beta")
    sequential_names: ClassVar[dict[str, str]] = {"gamma": "weight", "beta": "bias"}
    published = True

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        if P_x.workers.ndim < 2:
            raise ValueError(f"DistributedBatchNorm needs P_x: batch x channels x space; got {P_x}")
        super().__init__(P_x, num_features, eps, momentum, affine, track_running_stats)

    @property
    def weight(self) -> torch.nn.Parameter | None:
        """``gamma`` in torch's shape."""
        return self._flat("gamma")

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """``beta`` in torch's shape."""
        return self._flat("beta")

    @property
    def sequential_layouts(self) -> dict[str, Layout]:
        """As ``parameter_layouts``, of ``weight`` and ``bias``."""
        return dict.fromkeys(self.sequential_names.values(), self._flat_layout) if self.affine else {}

    def _flat(self, name: str) -> torch.nn.Parameter | None:
        if not self.affine:
            return None
        parameter = getattr(self, name)
        return torch.nn.Parameter(torch.empty(0)) if parameter is None else Flat.of(parameter)

    @property
    def factor(self) -> float:
        if self._momentum is None and self.num_batches_tracked is not None:
            return 1.0 / float(self.num_batches_tracked)
        return super().factor

    def operate(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: Sequence[torch.Tensor],
        tracked: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        if running:
            return self.by_running(x, weight, bias, running)
        mean, variance = tracked or (None, None)
        factor = self.factor if tracked else 0.0
        return torch.batch_norm(
            x, weight, bias, mean, variance, True, factor, self.step(x), torch.backends.cudnn.enabled
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return super().forward(x)

    def arrange(self, owned: Layout, training: bool) -> Arrangement:
        if self.running() and not training:
            return self._arranged(owned, [])
        batch, _, *space = owned.extents
        if batch * prod(space) == 1:
            raise ValueError(
                f"{self.label} needs more than 1 value per channel when training; the global shape of the input is "
                f"{dims(owned.extents)}"
            )
        batches, _, *spaces = owned.intervals
        merged = [Along.merged(intervals) for intervals in (batches, *spaces)]
        return self._arranged(owned, [merged[0], self._channels(owned, training), *merged[1:]])


class DistributedInstanceNorm(Tracking):
    r"""Normalise every channel of every sample over space.

    Forward: :math:`y = (x - \mu_{nc}) / \sqrt{v_{nc} + \epsilon} \cdot w_c + b_c`, with mean and variance over space,
    for which workers with the same samples and channels exchange (mean, M2) once; in evaluation mode, if there are
    running ones, with those, for which nothing moves. Weight and bias are copied from the workers that store them, as
    one message. To track statistics, which are averages over the batch, the exchange goes along the batch, too.
    Adjoint: the same exchanges transposed around the local derivatives.

    Args:
        P_x: the partition of x and y, ``batch x channels x space...``; any axis may be split.
        num_features: global number of channels.
        eps: :math:`\epsilon`.
        momentum: the weight of a new batch in the running statistics; None for 0, as in torch.
        affine: whether there are ``weight`` and ``bias``.
        track_running_stats: whether running statistics are kept.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid; y likewise. ``weight`` and
        ``bias`` are ``(local channels,)``, split as evenly as possible, on workers whose index is 0 in all axes but the
        second; of zero volume elsewhere. Running statistics likewise, on every worker. Workers outside P_x return a
        clone of their input.
    Raises: ValueError, on every worker, for a partition without batch, channels and space; in forward, on every member,
        for an input of another rank, number of channels or dtype, one spatial element where moments are taken, or
        workers in different modes.
    Source: Ulyanov et al., arXiv:1607.08022.
    """

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
        super().__init__(P_x, num_features, eps, momentum, affine, track_running_stats)

    def operate(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: Sequence[torch.Tensor],
        tracked: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        if running:
            return self.by_running(x, weight, bias, running)
        if tracked:
            with torch.no_grad():
                variance, mean = torch.var_mean(x, list(range(2, x.dim())))
                self.approach(tracked, (mean.mean(0), variance.mean(0)))
        # groups of one channel: torch's instance_norm returns a view
        return torch.group_norm(x, x.shape[1], weight, bias, self.step(x), torch.backends.cudnn.enabled)

    def arrange(self, owned: Layout, training: bool) -> Arrangement:
        if self.running() and not training:
            return self._arranged(owned, [])
        samples, _, *space = owned.extents
        if prod(space) == 1:
            raise ValueError(
                f"{self.label} needs more than 1 spatial element when training; the global shape of the input is "
                f"{dims(owned.extents)}"
            )
        batches, _, *spaces = owned.intervals
        needed = [(0, samples)] * len(batches) if training and self.running() else batches
        channels = self._channels(owned, training)
        return self._arranged(owned, [Along.kept(batches, needed), channels, *map(Along.merged, spaces)])
