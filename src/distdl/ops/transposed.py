"""Transposed convolution of a tensor that is split over workers. See ``distdl.ops.convolution`` for split channels.

Each worker computes whole outputs, and fetches the inputs that add to them; partial results of neighbours are never
added up in space. Here x has 4 cells on two workers, the kernel 3 taps, stride 2, padding 1, so y has 7 cells::

                worker 0          worker 1
    x         [ 0     1 ]       [ 2     3 ]
                             <--- 2                 fetch: input 2 adds to output 3 by its first tap
    window    [ 0     1      2 ]  [ 2     3 ]
    y         [ 0  1  2  3 ]      [ 4  5  6 ]       torch computes what the window reaches; the rest is cut off
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from distdl.geometry.boxes import Box, Shape, balanced, volume
from distdl.geometry.transposed import Crop, Transposed
from distdl.geometry.windows import grouped
from distdl.ops.contraction import Contraction, Local, check_channels, check_groups
from distdl.ops.setup import Setup, Site
from distdl.partition import Partition, Signature


@dataclass(frozen=True)
class TransposedConvolution:
    r"""A transposed convolution: :math:`y_o = b_o + \sum_i w_{io} \star^T x_i`, sequentially the same as torch's.

    Input j of a dim adds to the outputs ``j * stride - padding + t * dilation`` for ``0 <= t < kernel``. Its inputs are
    x ``(batch, channels, space...)``, w ``(in, out / groups, kernel...)`` and, if there is one, b ``(out,)``. The
    partition of the site has the axes batch, out, in, space...

    Attributes:
        target: the partition of y: batch, out, space...
        in_channels, out_channels: global numbers of channels.
        geometry: in space.
        groups: number of groups of channels; each block of output channels is whole groups, or a part of one.
        asked: global extents of y in space, where ``output_padding`` does not decide.
        autocast: the dtype in which torch computes, if its autocast is on.
    """

    target: Partition
    in_channels: int
    out_channels: int
    geometry: Transposed
    groups: int = 1
    asked: Shape | None = None
    autocast: torch.dtype | None = None

    def check(self, name: str) -> None:
        """Check the options.

        Raises: ValueError that names the layer.
        """
        check_groups(name, self.groups, self.in_channels, self.out_channels)

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        x, weight, *biases = signatures
        check_channels(site, x, 1, self.in_channels)
        _, out, inner, *space = site.partition.workers.shape
        read, computed = self.geometry.windows(site.label.kind, x.layout.extents[2:], tuple(space), self.asked)
        runs, stored = balanced(self.out_channels, out), weight.layout.partition
        group = self.in_channels // self.groups, self.out_channels // self.groups
        contraction = Contraction(
            site,
            work=site.partition,
            target=self.target,
            channel=1,
            stored=stored.reshape(inner, out).T if self.groups == 1 else stored.reshape(out, inner),
            x=x,
            weight=weight,
            bias=biases[0] if biases else None,
            reads=[
                x.layout.intervals[0],
                balanced(self.in_channels, inner) if self.groups == 1 else [grouped(run, *group) for run in runs],
                *read,
            ],
            computes=[x.layout.intervals[0], runs, *computed],
            groups=self.groups,
            autocast=self.autocast,
        )
        ones = (1,) * len(space)
        return contraction.setup(self._local, ((1, 1, *ones), (1, 1, *self.geometry.kernel), (1,)))

    def _local(self, window: Box, outputs: Box) -> Local:
        """torch's transposed convolution, from this worker's window to its outputs."""
        if not window or not volume(window) or not volume(outputs):
            return _Cropped(self.geometry, 1, (Crop(0, 0, 0, 0),) * len(self.geometry.kernel))  # of smallest operands
        first, stop = window[1]
        groups = (stop - first) * self.groups // self.in_channels if self.groups > 1 else 1
        runs = zip(window[2:], outputs[2:], strict=True)
        return _Cropped(self.geometry, groups, tuple(self.geometry.crop(dim, *run) for dim, run in enumerate(runs)))


@dataclass(frozen=True)
class _Cropped:
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
