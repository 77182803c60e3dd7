"""The transposed convolutions: one layer for all ways to split them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any

import torch

from distdl.agreement import Headers
from distdl.geometry.boxes import Intervals, balanced
from distdl.geometry.channels import Channels
from distdl.geometry.transposed import Transposed
from distdl.nn.conv.layer import ConvolutionLayer, Sizes
from distdl.nn.module import check_buffer_manager
from distdl.nn.weights import Weights, own_work, shared_work, stored_on
from distdl.ops import Op
from distdl.ops.transposed import TransposedConvolution
from distdl.partition import Layout, Partition
from distdl.partition.arguments import checks_arguments

_FARTHEST = 2**62  # what a header can hold
_COMMON = 3  # integers of the header that all linear layers and convolutions have


class _ConvTranspose(ConvolutionLayer):
    r"""A transposed convolution: each worker gets the inputs that add to its outputs, from as many blocks as needed.

    Forward: :math:`y_o = b_o + \sum_i w_{io} \star^T x_i`, the same as torch's on the whole tensor: input j along a dim
    adds to the outputs ``j * stride - padding + t * dilation`` for ``0 <= t < kernel``. Each worker computes whole
    outputs, so partial results of neighbours are never added up in space.
    Adjoint: the same movements transposed, in reverse order. (Without bias, this is the convolution with the same
    options.)

    Args:
        P_x, P_y: partitions of input and output, ``batch x p_in x space...`` and ``batch x p_out x space...``. Without
            P_y and P_w, P_x is the partition of both, ``batch x 1 x space...``; with groups, channels may be split.
        P_w: partition of the work, ``batch x p_out x p_in x space...`` (without batch if that is 1); its workers at
            index 0 in batch and space store the weights. With groups, only those at index 0 along p_in have work.
        in_channels, out_channels, kernel_size, stride, padding, output_padding, dilation, bias: as in torch.
        groups: as in torch; blocks of output channels have to be whole groups, or equal fractions of one.
        padding_mode: ``zeros``.
        buffer_manager: checked for its type; not used.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in channels and space, longer blocks first, and in the batch as x is; ``(batch, 0)`` outside P_y.
    Attributes:
        weight, bias: this worker's blocks, of torch's ``(in, out / groups, kernel...)`` and ``(out,)``; of zero volume
            where it stores none.
    Raises: ValueError, on every worker, if options or partitions do not fit; in forward, on every member, if the input
        does not: its rank, channels or dtype, or no output.
    Source: the adjoint of the convolution in Hewett & Grady, arXiv:2006.03108.
    """

    output_dim = 1  # of the weight, as torch counts it for spectral norms

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        P_y: Partition | None = None,
        P_w: Partition | None = None,
        *,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        padding_mode: str = "zeros",
        buffer_manager: Any = None,
    ) -> None:
        name = type(self).__name__
        check_buffer_manager(buffer_manager)
        if padding_mode != "zeros":
            raise ValueError(f"{name} has padding_mode 'zeros'; got {padding_mode!r}")
        geometry = Transposed.of(name, self.space, kernel_size, stride, padding, dilation, output_padding)
        if P_y is None and P_w is None:
            target, work = P_x, own_work(name, self.space, groups, P_x)
        elif P_y is None or P_w is None:
            raise ValueError(f"{name} needs both P_y and P_w, or neither; got P_y: {P_y} and P_w: {P_w}")
        else:
            target, work = P_y, shared_work(name, self.space, groups, P_x, P_y, P_w)
        op = TransposedConvolution(target, Channels(int(in_channels), int(out_channels), int(groups)), geometry)
        op.check(name)
        called = f"{name} (P_x: {P_x}; P_y: {target}; {in_channels} to {out_channels} channels)"
        super().__init__(
            P_x, target, work, op, _weights_on(called, stored_on(work, 1), op, bias), self._of_size, P_w=P_w,
            kernel_size=geometry.kernel, stride=geometry.stride, padding=geometry.padding, dilation=geometry.dilation,
            output_padding=geometry.output_padding, padding_mode=padding_mode,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: this worker's block of the input.
            output_size: global extents of the output in space (or in all dims), the same on every worker, to use
                instead of ``output_padding``; as in torch.
        """
        return self._convolve(x, *_asking(output_size, self.space))

    def _of_size(self, op: Any, headers: Headers) -> Op:
        """The operation for the output size that all members ask for, if they do."""
        configured: Any = self._configure(op, headers)
        workers, asked = self._everyone.workers, headers.extras(self._everyone)[:, _COMMON:]
        wrong = ((asked != asked[0]).any(axis=1) | (asked[:, 0] < 0)).nonzero()[0]
        kind, *sizes = asked[0].tolist()
        if wrong.size:
            theirs, *others = asked[wrong[0]].tolist()
            one, other = ([None, found, "something else"][code] for code, found in ((kind, sizes), (theirs, others)))
            raise ValueError(
                f"{self.label} needs output_size to be None or {self.space} (or {self.space + 2}) whole numbers, the "
                f"same on all workers; got {one} on worker {workers[0]} and {other} on worker {workers[wrong[0]]}"
            )
        asking: Op = replace(configured, asked=tuple(sizes) if kind else None)
        return asking


def _weights_on(name: str, stored: Partition, op: TransposedConvolution, bias: bool) -> Weights:
    """The blocks of torch's weight (in x out / groups x kernel) over out x in, and of the bias where in is 0."""
    out, inner = stored.workers.shape
    channels = op.channels
    outputs, kernel = balanced(channels.outputs, out), [((0, tap),) for tap in op.geometry.kernel]
    if channels.groups == 1:
        grid, columns = stored.T, outputs
        rows: Intervals = balanced(channels.inputs, inner)
    else:
        parts = _parts_of_groups(name, channels, outputs)
        grid, columns = stored.reshape(out // parts, parts), balanced(channels.produced, parts)
        rows = [channels.read_by(run) for run in outputs][::parts]
    weight = Layout.along(grid.reshape(*grid.workers.shape, *[1] * len(kernel)), [rows, columns, *kernel])
    return Weights(weight, Layout.along(stored[:, :1].reshape(out), [outputs]) if bias else None)


def _parts_of_groups(name: str, channels: Channels, blocks: Intervals) -> int:
    """Into how many blocks of output channels each group is split; 1 if all blocks are whole groups.

    Then the weight of a block is a block of the weight. For other blocks it is not, as torch's weight is in x out /
    groups.
    """
    groups, size = channels.groups, channels.produced
    parts = len(blocks) // groups
    if all(start % size == 0 == stop % size for start, stop in blocks):
        return 1
    if len(blocks) % groups or size % parts:
        raise ValueError(
            f"{name} needs blocks of output channels that are whole groups, or equal parts of one; got groups of "
            f"{size} and blocks of {', '.join(str(stop - start) for start, stop in blocks)} output channels"
        )
    return parts


def _asking(output_size: Any, space: int) -> tuple[int, ...]:
    """An ``output_size`` as integers for the header: 1 and the sizes, or 0 if there is none; -1 if it is not valid."""
    if output_size is None:
        return (0,) * (space + 1)
    try:
        sizes = [index(size) for size in output_size]
    except TypeError:
        sizes = []
    if len(sizes) not in (space, space + 2):
        return (-1,) * (space + 1)
    return (1, *(min(max(size, -_FARTHEST), _FARTHEST) for size in sizes[-space:]))


class DistributedConvTranspose1d(_ConvTranspose):
    __doc__ = _ConvTranspose.__doc__
    space = 1


class DistributedConvTranspose2d(_ConvTranspose):
    __doc__ = _ConvTranspose.__doc__
    space = 2


class DistributedConvTranspose3d(_ConvTranspose):
    __doc__ = _ConvTranspose.__doc__
    space = 3
