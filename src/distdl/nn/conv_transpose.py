"""The distributed transposed convolutions: one layer for every way to split it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar

import torch
from torch.nn import functional

from distdl.agreement.header import Headers
from distdl.geometry.boxes import Box, Shape, balanced, volume
from distdl.geometry.transposed import Crop, Transposed
from distdl.geometry.windows import Intervals
from distdl.nn.conv import Kernels
from distdl.nn.fixed import Fixed, takes_partitions
from distdl.nn.module import check_buffer_manager
from distdl.nn.movements import LocalOperator
from distdl.nn.weights import own_work, shared_work
from distdl.partition import Partition
from distdl.partition.layout import Layout

_FARTHEST = 2**62  # what a header can hold


class TransposedConvolution(Kernels):
    r"""A transposed convolution: each worker gets the inputs that add to its outputs, however many blocks that touches.

    Forward: :math:`y_o = b_o + \sum_i w_{io} \star^T x_i`, sequentially the same as torch's: input j of a dim adds to
    the outputs ``j * stride - padding + t * dilation`` for ``0 <= t < kernel``. Each worker computes whole outputs, so
    partial results of neighbours are never added up in space.
    Adjoint: the same movements transposed, last first. (Without bias, it is the convolution with the same options.)

    Args:
        P_x, P_y: partitions of input and output, ``batch x p_in x space...`` and ``batch x p_out x space...``. Without
            P_y and P_w, P_x is the partition of both, ``batch x 1 x space...``; with groups, channels may be split.
        P_w: partition of the work, ``batch x p_out x p_in x space...`` (without batch if that is 1); its workers at
            place 0 in batch and space store the weights. With groups, only those at place 0 along p_in work.
        in_channels, out_channels, kernel_size, stride, padding, output_padding, dilation, bias: as in torch.
        groups: as in torch; blocks of output channels have to be whole groups, or equal parts of one.
        padding_mode: ``zeros``.
        buffer_manager: checked for its type; not used.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in channels and space, longer blocks first, and in the batch as x is; ``(batch, 0)`` outside P_y.
    Attributes:
        weight, bias: this worker's blocks, of torch's ``(in, out / groups, kernel...)`` and ``(out,)``; of zero volume
            where it stores none.
    Raises: ValueError, on every worker, if options or partitions do not fit; in forward, on every member, if the input
        does not: its rank, channels, dtype, or no output.
    Source: the adjoint of the convolution in Hewett & Grady, arXiv:2006.03108.
    """

    P_w, output_padding = Fixed(), Fixed()
    output_dim: ClassVar[int] = 1  # of the weight, as torch counts it for spectral norms

    @takes_partitions
    def __init__(
        self,
        P_x: Partition,
        P_y: Partition | None = None,
        P_w: Partition | None = None,
        *,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        padding_mode: str = "zeros",
        buffer_manager: Any = None,
    ) -> None:
        name = type(self).__name__
        check_buffer_manager(buffer_manager)
        if padding_mode != "zeros":
            raise ValueError(f"{name} has padding_mode 'zeros'; got {padding_mode!r}")
        if groups < 1 or in_channels % groups or out_channels % groups or not (in_channels and out_channels):
            raise ValueError(f"{name} needs channels that {groups} groups divide; got {in_channels} and {out_channels}")
        self._geometry = Transposed.of(name, self.space, kernel_size, stride, padding, dilation, output_padding)
        self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding = (
            self._geometry.kernel,
            self._geometry.stride,
            self._geometry.padding,
            self._geometry.dilation,
            self._geometry.output_padding,
        )
        self.padding_mode = padding_mode
        self._group = (int(in_channels) // int(groups), int(out_channels) // int(groups))
        if P_y is None and P_w is None:
            P_out, work = P_x, own_work(name, self.space, groups, P_x)
        elif P_y is None or P_w is None:
            raise ValueError(f"{name} needs both P_y and P_w, or neither; got P_y: {P_y} and P_w: {P_w}")
        else:
            P_out, work = P_y, shared_work(name, self.space, groups, P_x, P_y, P_w)
        super().__init__(P_x, P_out, work, in_channels, out_channels, self._geometry.kernel, int(groups), bias)
        self.P_w = P_w

    def options(self) -> tuple[object, ...]:
        return (self._geometry,)

    def layouts(self, taps: Shape) -> tuple[Layout, Layout]:
        _, out, inner, *_ = self._work.workers.shape
        stored = self._stored.reshape(out, inner)
        outputs, kernel = balanced(self.out_channels, out), [((0, tap),) for tap in taps]
        rows: Intervals = balanced(self.in_channels, inner)
        if self.groups == 1:
            grid, columns = stored.T, outputs
        else:
            parts = _parts_of_groups(str(self.label), self.groups, self._group[1], outputs)
            grid, columns = stored.reshape(out // parts, parts), balanced(self._group[1], parts)
            rows = self.input_channels(outputs)[::parts]
        weights = Layout.of(grid.reshape(*grid.workers.shape, *[1] * len(taps)), [rows, columns, *kernel])
        return weights, Layout.of(stored[:, :1].reshape(out), [outputs])

    @property
    def least_space(self) -> Shape:
        return (1,) * self.space

    def forward(self, x: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: this worker's block of the input.
            output_size: global extents of the output in space (or of the output), the same on every worker, where
                ``output_padding`` shall not decide; as in torch.
        """
        return self.contract(x, _asking(output_size, self.space))

    def asked_windows(self, headers: Headers, extents: Shape) -> tuple[list[Intervals], list[Intervals]]:
        return self.windows(extents, self._asked(headers))

    def _asked(self, headers: Headers) -> Shape | None:
        """The extents of the output for which all members ask, if they do."""
        workers, asked = self._everyone.workers, headers.extras(self._everyone)[:, 3:]  # behind those of the base
        wrong = ((asked != asked[0]).any(axis=1) | (asked[:, 0] < 0)).nonzero()[0]
        kind, *sizes = asked[0].tolist()
        if wrong.size:
            theirs, *others = asked[wrong[0]].tolist()
            one, other = ([None, given, "something else"][told] for told, given in ((kind, sizes), (theirs, others)))
            raise ValueError(
                f"{self.label} needs output_size to be None or {self.space} (or {self.space + 2}) whole numbers, the "
                f"same on all workers; got {one} on worker {workers[0]} and {other} on worker {workers[wrong[0]]}"
            )
        return tuple(sizes) if kind else None

    def windows(self, extents: Shape, asked: Shape | None = None) -> tuple[list[Intervals], list[Intervals]]:
        return self._geometry.windows(type(self).__name__, extents, self._work.workers.shape[3:], asked)

    def operate(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # where there is nothing to compute: on the smallest operands, a channel for each group
        return Local(self._geometry, x.shape[1], (Crop(0, 0, 0, 0),) * self.space)(x, weight, bias)

    def operator(self, window: Box, outputs: Box) -> LocalOperator:
        if not volume(window) or not volume(outputs):
            return self.operate
        first, stop = window[1]
        groups = (stop - first) // self._group[0] if self.groups > 1 else 1
        runs = zip(window[2:], outputs[2:], strict=True)
        return Local(self._geometry, groups, tuple(self._geometry.crop(dim, *run) for dim, run in enumerate(runs)))


@dataclass(frozen=True)
class Local:
    """torch's operator on one worker, from its window to its outputs."""

    geometry: Transposed
    groups: int
    crops: tuple[Crop, ...]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        convolve = getattr(functional, f"conv_transpose{len(self.crops)}d")
        cut, more = [crop.padding for crop in self.crops], [crop.output_padding for crop in self.crops]
        margins = [width for crop in reversed(self.crops) for width in (crop.before, crop.behind)]
        later = bias is not None and max(margins) > 0  # the operator cannot add the bias to what it does not compute
        y: torch.Tensor = convolve(
            x, weight, None if later else bias, self.geometry.stride, cut, more, self.groups, self.geometry.dilation
        )
        if any(margins):
            y = functional.pad(y, margins)
        return y + bias.to(y.dtype).reshape(-1, *[1] * len(self.crops)) if later and bias is not None else y


def _parts_of_groups(name: str, groups: int, size: int, blocks: Intervals) -> int:
    """How many blocks of output channels each group makes up; 1 if all blocks are whole groups.

    The weight of a block is then a block of the weight. Of other blocks it is not: torch's weight is in x out / groups.
    """
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
    """An ``output_size`` as integers for the header: 0 for none or 1, and the sizes; or -1 for what is none."""
    if output_size is None:
        return (0,) * (space + 1)
    try:
        sizes = [index(size) for size in output_size]
    except TypeError:
        sizes = []
    if len(sizes) not in (space, space + 2):
        return (-1,) * (space + 1)
    return (1, *(min(max(size, -_FARTHEST), _FARTHEST) for size in sizes[-space:]))


class DistributedConvTranspose1d(TransposedConvolution):
    space = 1


class DistributedConvTranspose2d(TransposedConvolution):
    space = 2


class DistributedConvTranspose3d(TransposedConvolution):
    space = 3
