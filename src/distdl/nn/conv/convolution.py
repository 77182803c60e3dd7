"""The convolutions: one operation, and three shapes of the partition of its work.

kind       splits                     P_x                     work                        weights are stored on
Feature    batch, space               batch x  1 x space      batch x   1 x  1 x space    index 0 in batch and space
Channel    batch, channels            batch x in x 1...       batch x out x in x 1...     index 0 in the batch
General    batch, channels, space     batch x in x space      batch x out x in x space    index 0 in batch and space

The partition of the work is P_x itself, with one more axis, for Feature, and P_w for the others. With groups, P_x may
split channels for Feature too, and the axis in of the work is 1: each index along out then has a block of the weights.
``distdl.ops.convolution`` and ``distdl.ops.contraction`` draw what is sent to whom.
"""

from __future__ import annotations

from typing import Any, Required, TypedDict, Unpack

import torch

from distdl.geometry.channels import Channels
from distdl.geometry.windows import Sliding
from distdl.nn.conv.layer import ConvolutionLayer, Sizes
from distdl.nn.module import check_buffer_manager
from distdl.nn.weights import own_work, shared_work, stored_on, weights_on
from distdl.ops.convolution import Convolution
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments


class _FeatureConv(ConvolutionLayer):
    r"""A convolution that is split over space and the batch. One worker stores the weights; with groups, see P_x.

    Forward: :math:`y_o = b_o + \sum_i w_{oi} \star x_i`, the same as torch's on the whole tensor. Each worker gets the
    window of inputs that its outputs read, from as many blocks as needed; cells beyond the tensor are the padding. With
    groups, the channels that it gets are a window too. See ``distdl.ops.convolution`` for what is sent to whom.
    Adjoint: the same movements transposed, in reverse order; gradients of cells that several workers read add up on
    the workers that own them.

    Args:
        P_x: partition of input and output, ``batch x 1 x space...``. With groups, channels may be split too; each block
            of channels then has its own block of the weights.
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in torch.
        buffer_manager: checked for its type; not used.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in channels and space, longer blocks first, and in the batch as x is; ``(batch, 0)`` outside P_x.
    Attributes:
        weight, bias: this worker's blocks; of zero volume where it stores none.
    Raises: ValueError, on every worker, if options or partitions do not fit; in forward, on every member, if the input
        does not: its rank, channels or dtype, or a global extent too small for the kernel or the padding.
    Source: Hewett & Grady, arXiv:2006.03108.
    """

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        padding_mode: str = "zeros",
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        buffer_manager: Any = None,
    ) -> None:
        check_buffer_manager(buffer_manager)
        name, geometry = type(self).__name__, (kernel_size, stride, padding, dilation)
        work, channels = own_work(name, self.space, groups, P_x), (in_channels, out_channels)
        arguments = _arguments(name, self.space, P_x, work, channels, geometry, padding_mode, groups, bias)
        super().__init__(P_x, P_x, work, **arguments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to this worker's block of the input."""
        return self._convolve(x)


class _GeneralConv(ConvolutionLayer):
    r"""A convolution that is split over input and output channels, over space, and over the batch.

    Forward: :math:`y_o = b_o + \sum_i w_{oi} \star x_i`, the same as torch's on the whole tensor. Each worker gets the
    window of inputs that its outputs read, from as many blocks as needed; cells beyond the tensor are the padding. With
    groups, the channels that it gets are a window too. ``distdl.ops.contraction`` draws what is sent to whom.
    Adjoint: the same movements transposed, in reverse order; gradients of cells that several workers read add up on
    the workers that own them.

    Args:
        P_x, P_y: partitions of input and output, ``batch x p_in x space...`` and ``batch x p_out x space...``.
        P_w: partition of the work, ``batch x p_out x p_in x space...``, or without its first axis if the batch is not
            split; its workers at index 0 in batch and space store the weights. With groups, only those at index 0 along
            p_in have work (so p_in may be 1 in P_w, whatever it is in P_x).
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in torch.
        buffer_manager: checked for its type; not used.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in channels and space, longer blocks first, and in the batch as x is; ``(batch, 0)`` outside P_y.
    Attributes:
        weight, bias: this worker's blocks; of zero volume where it stores none.
    Raises: ValueError, on every worker, if options or partitions do not fit; in forward, on every member, if the input
        does not: its rank, channels or dtype, or a global extent too small for the kernel or the padding.
    Source: Hewett & Grady, arXiv:2006.03108.
    """

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        P_w: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        padding_mode: str = "zeros",
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        buffer_manager: Any = None,
    ) -> None:
        check_buffer_manager(buffer_manager)
        name, geometry = type(self).__name__, (kernel_size, stride, padding, dilation)
        work, channels = shared_work(name, self.space, groups, P_x, P_y, P_w), (in_channels, out_channels)
        arguments = _arguments(name, self.space, P_y, work, channels, geometry, padding_mode, groups, bias)
        super().__init__(P_x, P_y, work, **arguments, P_w=P_w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to this worker's block of the input."""
        return self._convolve(x)

    @property
    def stores_bias(self) -> bool:
        """Whether this worker is one of those that store the bias, if there is one. (A published name.)"""
        return self.P_x.comm.rank in stored_on(self._work, 1)[:, :1]


def _arguments(
    name: str,
    space: int,
    P_y: Partition,
    work: Partition,
    channels: tuple[int, int],
    geometry: tuple[Sizes, Sizes, Sizes, Sizes],
    padding_mode: str,
    groups: int,
    bias: bool,
) -> dict[str, Any]:
    """The arguments of :class:`ConvolutionLayer` that follow from a convolution's options, as torch takes them.

    Raises: ValueError that names the layer.
    """
    sliding = Sliding.of_convolution(name, space, *geometry)
    op = Convolution(P_y, Channels(int(channels[0]), int(channels[1]), int(groups)), sliding, padding_mode)
    op.check(name)
    return {
        "op": op,
        "weights": weights_on(stored_on(work, 1), op.channels.read, op.channels.outputs, sliding.kernel, bias),
        "kernel_size": sliding.kernel,
        "stride": sliding.stride,
        "padding": geometry[2] if isinstance(geometry[2], str) else sliding.padding,
        "dilation": sliding.dilation,
        "padding_mode": padding_mode,
    }


_itself = property(
    lambda layer: layer, doc="The layer itself: in the published interface it has ``weight`` and ``bias``."
)


class DistributedFeatureConv1d(_FeatureConv):
    __doc__ = _FeatureConv.__doc__
    space = 1


class DistributedFeatureConv2d(_FeatureConv):
    __doc__ = _FeatureConv.__doc__
    space = 2


class DistributedFeatureConv3d(_FeatureConv):
    __doc__ = _FeatureConv.__doc__
    space = 3


class DistributedChannelConv1d(_GeneralConv):
    __doc__ = _GeneralConv.__doc__
    space = 1
    conv_layer = _itself


class DistributedChannelConv2d(_GeneralConv):
    __doc__ = _GeneralConv.__doc__
    space = 2
    conv_layer = _itself


class DistributedChannelConv3d(_GeneralConv):
    __doc__ = _GeneralConv.__doc__
    space = 3
    conv_layer = _itself


class DistributedGeneralConv1d(_GeneralConv):
    __doc__ = _GeneralConv.__doc__
    space = 1


class DistributedGeneralConv2d(_GeneralConv):
    __doc__ = _GeneralConv.__doc__
    space = 2


class DistributedGeneralConv3d(_GeneralConv):
    __doc__ = _GeneralConv.__doc__
    space = 3


_Kinds = tuple[type[Any], ...]
_FEATURE: _Kinds = (DistributedFeatureConv1d, DistributedFeatureConv2d, DistributedFeatureConv3d)
_CHANNEL: _Kinds = (DistributedChannelConv1d, DistributedChannelConv2d, DistributedChannelConv3d)
_GENERAL: _Kinds = (DistributedGeneralConv1d, DistributedGeneralConv2d, DistributedGeneralConv3d)


class ConvolutionOptions(TypedDict, total=False):
    """The options of a convolution, as in torch."""

    in_channels: Required[int]
    out_channels: Required[int]
    kernel_size: Required[Sizes]
    stride: Sizes
    padding: Sizes
    padding_mode: str
    dilation: Sizes
    groups: int
    bias: bool


def _choose(
    space: int,
    P_x: Partition,
    P_y: Partition | None,
    P_w: Partition | None,
    buffer_manager: Any,
    options: ConvolutionOptions,
) -> Any:
    if (P_y is None) != (P_w is None):
        raise ValueError(f"DistributedConv{space}d needs both P_y and P_w, or neither; got P_y: {P_y} and P_w: {P_w}")
    if P_y is None or P_w is None:
        return _FEATURE[space - 1](P_x, buffer_manager=buffer_manager, **options)
    splits_space = any(extent > 1 for P in (P_x, P_y) for extent in P.workers.shape[2:])
    kinds = _GENERAL if splits_space else _CHANNEL
    return kinds[space - 1](P_x, P_y, P_w, buffer_manager=buffer_manager, **options)


@checks_arguments
def DistributedConv1d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    buffer_manager: Any = None,
    **options: Unpack[ConvolutionOptions],
) -> Any:
    """The 1-d convolution that fits the partitions.

    It is a Feature convolution without P_y and P_w. With them it is a General convolution if space is split, else a
    Channel convolution.

    Args:
        P_x, P_y, P_w: as in :class:`DistributedGeneralConv1d`, or P_x alone, as in :class:`DistributedFeatureConv1d`.
        buffer_manager: checked for its type; not used.
        options: ``in_channels``, ``out_channels`` and ``kernel_size``, and torch's options that have defaults.
    Raises: ValueError, on every worker, if only one of P_y and P_w is given; TypeError if one of them is not a
        partition.
    """
    return _choose(1, P_x, P_y, P_w, buffer_manager, options)


@checks_arguments
def DistributedConv2d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    buffer_manager: Any = None,
    **options: Unpack[ConvolutionOptions],
) -> Any:
    """The 2-d convolution that fits the partitions; see :func:`DistributedConv1d`."""
    return _choose(2, P_x, P_y, P_w, buffer_manager, options)


@checks_arguments
def DistributedConv3d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    buffer_manager: Any = None,
    **options: Unpack[ConvolutionOptions],
) -> Any:
    """The 3-d convolution that fits the partitions; see :func:`DistributedConv1d`."""
    return _choose(3, P_x, P_y, P_w, buffer_manager, options)
