"""The distributed convolutions: one layer, and three shapes of the partition of its weights."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn import functional

from distdl.geometry.borders import CONVOLUTION_MODES, Border
from distdl.geometry.boxes import Interval, Shape, balanced
from distdl.geometry.windows import Intervals, Sliding, group_runs, grouped
from distdl.nn.contraction import Contraction
from distdl.nn.fixed import Fixed, takes_partitions
from distdl.nn.module import check_buffer_manager
from distdl.nn.weights import own_work, shared_work
from distdl.partition import Partition


class Kernels(Contraction):
    """What convolution and transposed convolution have in common: parameters of their own, and groups of channels."""

    space: ClassVar[int]
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    kernel_size, stride, padding, dilation, padding_mode = Fixed(), Fixed(), Fixed(), Fixed(), Fixed()
    _group: tuple[int, int]  # input and output channels of one group

    def register(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        self.weight = weight
        self.register_parameter("bias", bias)

    @property
    def holder(self) -> torch.nn.Module:
        return self

    def input_channels(self, outputs: Intervals) -> Intervals:
        return [grouped(run, *self._group) for run in outputs]

    def extra_repr(self) -> str:
        names = ("kernel_size", "stride", "padding", "output_padding", "dilation", "groups", "padding_mode")
        options = [f"{name}={getattr(self, name)!r}" for name in names if hasattr(self, name)]
        shown = ("P_x",) if getattr(self, "P_w", None) is None else ("P_x", "P_y", "P_w")
        partitions = [f"{name}: {getattr(self, name)}" for name in shown]
        channels = f"{self.in_channels}, {self.out_channels}"
        return f"{channels}, {', '.join(options)}, bias={self.bias is not None}, {'; '.join(partitions)}"


class Convolution(Kernels):
    r"""A convolution over input blocks that each worker first completes by the cells around them.

    Forward: :math:`y_o = b_o + \sum_i w_{oi} \star x_i`, sequentially the same as torch's. Each worker gets the window
    of inputs that its outputs read, however many blocks that touches; cells beyond the tensor are its padding. In
    groups, the channels that it gets are a window, too.
    Adjoint: the same movements transposed, last first; gradients of halo cells add up on the workers that own them.

    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in channels and space, longer blocks first, and in the batch as x is; ``(batch, 0)`` outside P_y.
    Attributes:
        weight, bias: this worker's blocks; of zero volume where it stores none.
    Raises: ValueError, on every worker, if options or partitions do not fit; in forward, on every member, if the input
        does not: its rank, channels, dtype, or too small a global extent for the kernel or the padding.
    Source: Hewett & Grady, arXiv:2006.03108.
    """

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        work: Partition,
        in_channels: int,
        out_channels: int,
        geometry: tuple[Any, Any, Any, Any],
        padding_mode: str,
        groups: int,
        bias: bool,
    ) -> None:
        name = type(self).__name__
        self._sliding = Sliding.of_convolution(name, self.space, *geometry)
        if padding_mode not in CONVOLUTION_MODES:
            raise ValueError(f"{name} has the padding modes {', '.join(CONVOLUTION_MODES)}; got {padding_mode!r}")
        if not 1 <= groups <= min(in_channels, out_channels) or in_channels % groups or out_channels % groups:
            raise ValueError(f"{name} needs channels that {groups} groups divide; got {in_channels} and {out_channels}")
        self.padding_mode = padding_mode
        self.kernel_size, self.stride, self.dilation = (
            self._sliding.kernel,
            self._sliding.stride,
            self._sliding.dilation,
        )
        self.padding = geometry[2] if isinstance(geometry[2], str) else self._sliding.padding
        self._group = (int(in_channels) // groups, int(out_channels) // groups)
        self._runs = _own_runs(work, int(out_channels), self._group[1])
        super().__init__(P_x, P_y, work, in_channels, out_channels, self._sliding.kernel, groups, bias)

    def options(self) -> tuple[object, ...]:
        return (self._sliding, self.padding_mode)

    @property
    def border(self) -> Border:
        return Border(self.padding_mode, ((0, 0), (0, 0), *self._sliding.widths))

    @property
    def least_space(self) -> Shape:
        return self._sliding.spans

    @property
    def least_channels(self) -> tuple[int, int, int]:
        if len(self._runs) < 2:
            return 1, 1, 1
        inputs, produced = self._group
        first, stop = grouped((self._runs[0][0], self._runs[-1][1]), inputs, produced)
        return stop - first, self._runs[-1][1] - self._runs[0][0], inputs

    def windows(self, extents: Shape) -> tuple[list[Intervals], list[Intervals]]:
        name = type(self).__name__
        self.border.check(name, (1, 1, *extents))
        return self._sliding.windows(name, extents, self._work.workers.shape[3:])

    def operate(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(self._runs) < 2:
            return self._convolve(x, weight, bias)
        first, parts = self._runs[0][0], []
        origin, _ = grouped(self._runs[0], *self._group)
        for run in self._runs:
            (channels, read), out = (grouped(run, *self._group), slice(run[0] - first, run[1] - first))
            part = x[:, channels - origin : read - origin]
            parts.append(self._convolve(part, weight[out], None if bias is None else bias[out]))
        return torch.cat(parts, 1)

    def _convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        convolve, groups = getattr(functional, f"conv{self.space}d"), x.shape[1] // weight.shape[1]
        y: torch.Tensor = convolve(x, weight, bias, self._sliding.stride, 0, self._sliding.dilation, groups)
        return y


def _own_runs(work: Partition, out_channels: int, produced: int) -> list[Interval]:
    """The output channels of this worker, in runs that torch convolves at once."""
    if work.comm.rank not in work:
        return []
    outputs = balanced(out_channels, work.workers.shape[1])[work.index_of(work.comm.rank)[1]]
    return group_runs(outputs, produced)


class FeatureConvolution(Convolution):
    """A convolution that is split over space and the batch. One worker stores the weights.

    Args:
        P_x: partition of input and output, ``batch x 1 x space...``. With groups, channels may be split, too; each
            place along them then has a part of the weights.
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in torch.
        buffer_manager: checked for its type; not used.
    """

    @takes_partitions
    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        padding_mode: str = "zeros",
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        buffer_manager: Any = None,
    ) -> None:
        check_buffer_manager(buffer_manager)
        work = own_work(type(self).__name__, self.space, groups, P_x)
        geometry = (kernel_size, stride, padding, dilation)
        super().__init__(P_x, P_x, work, in_channels, out_channels, geometry, padding_mode, groups, bias)


class GeneralConvolution(Convolution):
    """A convolution that is split over input and output channels, over space, and over the batch.

    Args:
        P_x, P_y: partitions of input and output, ``batch x p_in x space...`` and ``batch x p_out x space...``.
        P_w: partition of the work, ``batch x p_out x p_in x space...``, without its first axis where the batch is not
            split; its workers at place 0 in batch and space store the weights. With groups, only those at place 0
            along p_in have work (so p_in may be 1 in P_w, whatever it is in P_x).
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in torch.
        buffer_manager: checked for its type; not used.
    """

    P_w = Fixed()

    @takes_partitions
    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        P_w: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        padding_mode: str = "zeros",
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        buffer_manager: Any = None,
    ) -> None:
        check_buffer_manager(buffer_manager)
        work = shared_work(type(self).__name__, self.space, groups, P_x, P_y, P_w)
        geometry = (kernel_size, stride, padding, dilation)
        super().__init__(P_x, P_y, work, in_channels, out_channels, geometry, padding_mode, groups, bias)
        self.P_w = P_w

    @property
    def stores_bias(self) -> bool:
        """Whether a block of the bias, if there is one, lives on this worker."""
        return self.P_w.comm.rank in self._biases.partition


class ChannelConvolution(GeneralConvolution):
    """A convolution that is split over input and output channels (and the batch), not over space."""

    @property
    def conv_layer(self) -> ChannelConvolution:
        """Where the published interface has ``weight`` and ``bias``: here."""
        return self


class DistributedFeatureConv1d(FeatureConvolution):
    space = 1


class DistributedFeatureConv2d(FeatureConvolution):
    space = 2


class DistributedFeatureConv3d(FeatureConvolution):
    space = 3


class DistributedChannelConv1d(ChannelConvolution):
    space = 1


class DistributedChannelConv2d(ChannelConvolution):
    space = 2


class DistributedChannelConv3d(ChannelConvolution):
    space = 3


class DistributedGeneralConv1d(GeneralConvolution):
    space = 1


class DistributedGeneralConv2d(GeneralConvolution):
    space = 2


class DistributedGeneralConv3d(GeneralConvolution):
    space = 3


_KINDS: dict[str, tuple[type[Any], ...]] = {
    "feature": (DistributedFeatureConv1d, DistributedFeatureConv2d, DistributedFeatureConv3d),
    "channel": (DistributedChannelConv1d, DistributedChannelConv2d, DistributedChannelConv3d),
    "general": (DistributedGeneralConv1d, DistributedGeneralConv2d, DistributedGeneralConv3d),
}


def _choose(space: int, P_x: Partition, P_y: Partition | None, P_w: Partition | None, **options: Any) -> Any:
    if (P_y is None) != (P_w is None):
        raise ValueError(f"DistributedConv{space}d needs both P_y and P_w, or neither; got P_y: {P_y} and P_w: {P_w}")
    if P_y is None or P_w is None:
        return _KINDS["feature"][space - 1](P_x, **options)
    splits_space = any(extent > 1 for P in (P_x, P_y) for extent in P.workers.shape[2:])
    return _KINDS["general" if splits_space else "channel"][space - 1](P_x, P_y, P_w, **options)


@takes_partitions
def DistributedConv1d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    buffer_manager: Any = None,
    *,
    in_channels: int,
    out_channels: int,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    padding_mode: str = "zeros",
    dilation: Any = 1,
    groups: int = 1,
    bias: bool = True,
) -> Any:
    """The 1-d convolution that fits the partitions.

    It is Feature without P_y and P_w, else Channel, or General where space is split.

    Args:
        P_x, P_y, P_w: as in :class:`GeneralConvolution`, or P_x alone, as in :class:`FeatureConvolution`.
        in_channels, out_channels, kernel_size, stride, padding, padding_mode, dilation, groups, bias: as in torch.
        buffer_manager: checked for its type; not used.
    Raises: ValueError, on every worker, if only one of P_y and P_w is given; TypeError if one is no partition.
    """
    return _choose(1, **locals())


@takes_partitions
def DistributedConv2d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    buffer_manager: Any = None,
    *,
    in_channels: int,
    out_channels: int,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    padding_mode: str = "zeros",
    dilation: Any = 1,
    groups: int = 1,
    bias: bool = True,
) -> Any:
    """The 2-d convolution that fits the partitions; see :func:`DistributedConv1d`."""
    return _choose(2, **locals())


@takes_partitions
def DistributedConv3d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    buffer_manager: Any = None,
    *,
    in_channels: int,
    out_channels: int,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    padding_mode: str = "zeros",
    dilation: Any = 1,
    groups: int = 1,
    bias: bool = True,
) -> Any:
    """The 3-d convolution that fits the partitions; see :func:`DistributedConv1d`."""
    return _choose(3, **locals())
