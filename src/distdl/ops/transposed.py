"""Transposed convolution of a tensor that is split over workers. See ``distdl.ops.convolution`` for split channels.

Each worker computes whole outputs, and fetches the inputs that add to them; partial results of neighbours are never
added up in space. Here x has 4 cells on two workers, the kernel 3 taps, stride 2, padding 1, so y has 7 cells::

                worker 0          worker 1
    x         [ 0     1 ]       [ 2     3 ]
                             <--- 2                 fetch: input 2 adds to output 3 by its first tap
    window    [ 0     1      2 ]  [ 2     3 ]
    y         [ 0  1  2  3 ]      [ 4  5  6 ]       torch computes what the window reaches; the rest is cut off

Large blocks stay where they lie, and what input 2 adds to output 3 comes when it has arrived (``distdl.ops.edges``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from distdl.geometry.boxes import Box, Interval, Shape, balanced, volume, whole
from distdl.geometry.edges import Crop
from distdl.geometry.transposed import Transposed
from distdl.geometry.windows import group_runs, grouped
from distdl.ops.contraction import Contraction, Local, check_channels, check_groups, gathers, in_pieces, own_channels
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
        groups: number of groups of channels; each block of output channels is whole groups, or a part of one, unless
            every worker has the whole of w and b.
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
        group, gathered = self._group, gathers(x, 1, inner, self.groups)
        own, inputs, biased = own_channels(site, 1, runs, balanced(self.in_channels, inner))
        pieces = group_runs(own, group[1])
        if self.groups == 1:
            part = inputs, own
        else:
            part = grouped(own, *group), (0, group[1]) if len(pieces) > 1 else self._produced(own)
        contraction = Contraction(
            site,
            work=site.partition,
            target=self.target,
            channel=1,
            stored=stored.reshape(inner, out).T if self.groups == 1 and not weight.layout.is_everywhere else stored,
            x=x,
            weight=weight,
            bias=biases[0] if biases else None,
            reads=[
                x.layout.intervals[0],
                [grouped(run, *group) for run in runs] if gathered else balanced(self.in_channels, inner),
                *read,
            ],
            computes=[x.layout.intervals[0], runs, *computed],
            gathers=gathered,
            parts=((*part, *whole(self.geometry.kernel)), (biased,)),
            autocast=self.autocast,
        )
        lines = [self.geometry.line(dim) for dim in range(len(self.geometry.kernel))]
        later = any(
            max(line.crop(cells, outputs)[2:]) > 0
            for line, *along in zip(lines, read, computed, strict=True)
            for cells, outputs in zip(*along, strict=True)
            if cells[0] < cells[1] and outputs[0] < outputs[1]
        )
        by_windows = contraction.setup(partial(self._local, pieces, later), self._smallest(pieces))
        if self.autocast is not None:
            return by_windows
        return contraction.as_one(lines, self.groups, by_windows)

    @property
    def _group(self) -> tuple[int, int]:
        """Input and output channels of one group."""
        return self.in_channels // self.groups, self.out_channels // self.groups

    def _smallest(self, pieces: list[Interval]) -> tuple[Shape, Shape, Shape]:
        """The smallest x, weight and bias that the local function accepts; see ``Convolution``."""
        inputs, produced, outputs = 1, 1, 1
        if len(pieces) > 1:
            first, stop = grouped((pieces[0][0], pieces[-1][1]), *self._group)
            inputs, produced, outputs = stop - first, self._group[1], pieces[-1][1] - pieces[0][0]
        kernel = self.geometry.kernel
        return (1, inputs, *[1] * len(kernel)), (inputs, produced, *kernel), (outputs,)

    def _local(self, pieces: list[Interval], later: bool, window: Box, outputs: Box) -> Local:
        """torch's transposed convolution, from this worker's window to its outputs.

        Args:
            pieces: its output channels, in parts that torch computes at once: whole groups, or parts of one.
            later: whether a worker has outputs that torch's operator does not compute. Then the bias is added behind
                it, on every worker, so that second derivatives depend on the same tensors everywhere.
        """
        computes = bool(window) and volume(window) > 0 and volume(outputs) > 0
        crops = (Crop(0),) * len(self.geometry.kernel)  # of smallest operands
        if computes:
            runs = zip(window[2:], outputs[2:], strict=True)
            crops = tuple(self.geometry.line(dim).crop(*run) for dim, run in enumerate(runs))
        if len(pieces) < 2:
            groups = (window[1][1] - window[1][0]) // self._group[0] if computes and self.groups > 1 else 1
            return _Cropped(self.geometry, groups, crops, later)
        origin, first = grouped(pieces[0], *self._group)[0], pieces[0][0]
        cuts = []
        for run in pieces:
            start, stop = grouped(run, *self._group)
            one = _Cropped(self.geometry, (stop - start) // self._group[0], crops, later)
            read, out = slice(start - origin, stop - origin), slice(run[0] - first, run[1] - first)
            cuts.append((one, read, (read, slice(*self._produced(run))), out))
        return in_pieces(cuts)

    def _produced(self, run: Interval) -> Interval:
        """The outputs of a group that a run of outputs has: a part of those of one group, or all those of several."""
        produced = self._group[1]
        start = run[0] // produced * produced
        return (run[0] - start, run[1] - start) if run[1] <= start + produced else (0, produced)


@dataclass(frozen=True)
class _Cropped:
    """torch's operator on one worker, from its window to its outputs."""

    geometry: Transposed
    groups: int
    crops: tuple[Crop, ...]
    later: bool

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        convolve = getattr(functional, f"conv_transpose{len(self.crops)}d")
        cut, more = [crop.padding for crop in self.crops], [crop.output_padding for crop in self.crops]
        margins = [width for crop in reversed(self.crops) for width in (crop.before, crop.behind)]
        later = bias is not None and self.later
        y: torch.Tensor = convolve(
            x, weight, None if later else bias, self.geometry.stride, cut, more, self.groups, self.geometry.dilation
        )
        if any(margins):
            y = functional.pad(y, margins)
        return y + bias.to(y.dtype).reshape(-1, *[1] * len(self.crops)) if later and bias is not None else y
