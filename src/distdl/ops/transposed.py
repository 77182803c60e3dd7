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
from distdl.geometry.channels import Channels
from distdl.geometry.edges import Crop
from distdl.geometry.transposed import Transposed
from distdl.ops.contraction import Contraction, Local, check_channels, gathers, in_pieces, own_channels
from distdl.ops.kernel import Kernel
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
        channels: of x and y; each block of output channels is whole groups, or a part of one, unless every worker has
            the whole of w and b.
        geometry: in space.
        asked: global extents of y in space, where ``output_padding`` does not decide.
        autocast: the dtype in which torch computes, if its autocast is on.
    """

    target: Partition
    channels: Channels
    geometry: Transposed
    asked: Shape | None = None
    autocast: torch.dtype | None = None

    def check(self, name: str) -> None:
        """Check the options.

        Raises: ValueError that names the layer.
        """
        self.channels.check(name)

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        (x, weight, *biases), channels = signatures, self.channels
        check_channels(site, x, 1, channels.inputs)
        _, out, inner, *space = site.partition.workers.shape
        read, computed = self.geometry.windows(site.label.kind, x.layout.extents[2:], tuple(space), self.asked)
        runs, stored = balanced(channels.outputs, out), weight.layout.partition
        gathered = gathers(x, 1, inner, channels.groups)
        own, inputs, biased = own_channels(site, 1, runs, balanced(channels.inputs, inner))
        pieces = channels.pieces(own)
        if channels.groups == 1:
            part = inputs, own
        else:
            part = channels.read_by(own), (0, channels.produced) if len(pieces) > 1 else self._produced(own)
        contraction = Contraction(
            site,
            work=site.partition,
            target=self.target,
            channel=1,
            stored=stored.reshape(inner, out).T if channels.groups == 1 and not weight.layout.is_everywhere else stored,
            x=x,
            weight=weight,
            bias=biases[0] if biases else None,
            reads=[
                x.layout.intervals[0],
                [channels.read_by(run) for run in runs] if gathered else balanced(channels.inputs, inner),
                *read,
            ],
            computes=[x.layout.intervals[0], runs, *computed],
            gathers=gathered,
            parts=((*part, *whole(self.geometry.kernel)), (biased,)),
            autocast=self.autocast,
        )
        lines = [self.geometry.line(dim) for dim in range(len(self.geometry.kernel))]
        later = any(
            max(line.crop(cells, outputs).plain()[2:]) > 0
            for line, *along in zip(lines, read, computed, strict=True)
            for cells, outputs in zip(*along, strict=True)
            if cells[0] < cells[1] and outputs[0] < outputs[1]
        )
        by_windows = contraction.setup(partial(self._local, pieces, later), self._smallest(pieces))
        if self.autocast is not None:
            return by_windows
        return contraction.as_one(lines, channels.groups, by_windows)

    def _smallest(self, pieces: list[Interval]) -> tuple[Shape, Shape, Shape]:
        """The smallest x, weight and bias that the local function accepts; see ``Convolution``."""
        inputs, produced, outputs = 1, 1, 1
        if len(pieces) > 1:
            first, stop = self.channels.read_by((pieces[0][0], pieces[-1][1]))
            inputs, produced, outputs = stop - first, self.channels.produced, pieces[-1][1] - pieces[0][0]
        kernel = self.geometry.kernel
        return (1, inputs, *[1] * len(kernel)), (inputs, produced, *kernel), (outputs,)

    def _local(self, pieces: list[Interval], later: bool, window: Box, outputs: Box) -> Local:
        """torch's transposed convolution, from this worker's window to its outputs.

        Args:
            pieces: its output channels, in parts that torch computes at once: whole groups, or parts of one.
            later: whether a worker has outputs that torch's operator does not compute without output padding, with
                which it has no third derivatives. Then the bias is added behind it, on every worker, so that
                derivatives depend on the same tensors everywhere.
        """
        channels = self.channels
        computes = bool(window) and volume(window) > 0 and volume(outputs) > 0
        crops = (Crop(0),) * len(self.geometry.kernel)  # of smallest operands
        if computes:
            runs = zip(window[2:], outputs[2:], strict=True)
            crops = tuple(self.geometry.line(dim).crop(*run) for dim, run in enumerate(runs))
        if len(pieces) < 2:
            groups = (window[1][1] - window[1][0]) // channels.read if computes and channels.groups > 1 else 1
            return self._cropped(groups, crops, later)
        origin, first = channels.read_by(pieces[0])[0], pieces[0][0]
        cuts = []
        for run in pieces:
            start, stop = channels.read_by(run)
            one = self._cropped((stop - start) // channels.read, crops, later)
            read, out = slice(start - origin, stop - origin), slice(run[0] - first, run[1] - first)
            cuts.append((one, read, (read, slice(*self._produced(run))), out))
        return in_pieces(cuts)

    def _cropped(self, groups: int, crops: tuple[Crop, ...], later: bool) -> _Cropped:
        lines = [self.geometry.line(dim) for dim in range(len(crops))]
        margins = tuple(width for crop in reversed(crops) for width in (crop.before, crop.behind))
        return _Cropped(Kernel.of(lines, groups, crops), margins, later, self.autocast is not None)

    def _produced(self, run: Interval) -> Interval:
        """The outputs of a group that a run of outputs has: a part of those of one group, or all those of several."""
        produced = self.channels.produced
        start = run[0] // produced * produced
        return (run[0] - start, run[1] - start) if run[1] <= start + produced else (0, produced)


@dataclass(frozen=True)
class _Cropped:
    """torch's operator on one worker, from its window to its outputs.

    Attributes:
        margins: zeros around what it computes, as ``F.pad`` takes them; negative numbers cut off.
        later: whether the bias is added behind it.
        casts: whether torch's autocast is on.
    """

    kernel: Kernel
    margins: Shape
    later: bool
    casts: bool

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = self.kernel.recorded(x, weight, None if self.later else bias, self.casts)
        if any(self.margins):
            y = functional.pad(y, self.margins)
        return y + bias.to(y.dtype).reshape(-1, *[1] * (y.dim() - 2)) if self.later and bias is not None else y
