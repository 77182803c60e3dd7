"""Convolution of a tensor that is split over workers, and what is sent to whom.

Split in space: each worker computes whole outputs, and fetches the cells that these read. Here x has 8 cells, on two
workers, and the kernel 3 taps with padding 1 (a dot is a cell of padding)::

                     worker 0                        worker 1
    x           [ 0  1  2  3 ]                  [ 4  5  6  7 ]
                           3 ------------------> 3                    fetch: what windows read of other blocks
                              4 <--------------- 4
    window   [ .  0  1  2  3  4 ]            [ 3  4  5  6  7  . ]
    w, b     stored here -------------------->  a copy                parameters: to all that use them
    y           [ 0  1  2  3 ]                  [ 4  5  6  7 ]        computed where it belongs

That is three messages, all under way at the same time: cell 3, cell 4, and w and b packed as one. However far a window
reaches, over several blocks, all its cells come in one exchange, from the workers that own them. What lies beyond the
tensor is no message: zeros are filled in, and for ``reflect`` and ``replicate`` each worker repeats cells that it has.
Only ``circular`` padding fetches cells, from the other end of the tensor, in the same exchange.

The backward is the same picture with all arrows turned, three messages again: the gradient of cell 3 from worker 1 to
worker 0 and that of cell 4 from worker 0 to worker 1, which add them to their own, and the gradient of w and b from
worker 1 to worker 0.

Where torch's padding fits the blocks, and these are large, nobody makes a window: torch convolves the block where it
lies, and what cells 3 and 4 add comes when they have arrived (``distdl.ops.edges``). They are fetched when w and b are
there.

Split over channels, each worker has the block w[o, i] of the weights, for some output and some input channels. Here
P_w is 2 x 2 (out x in) on workers 0..3, x lies on workers 0 and 1, y on workers 0 and 2::

    x[0] on worker 0    x[1] on worker 1
          |                   |               spread: along out, worker 0 to 2 and worker 1 to 3
    w[0,0] x[0]   <---  w[0,1] x[1]           add: along in, worker 1 to 0, which has y[0]
    w[1,0] x[0]   <---  w[1,1] x[1]           and worker 3 to 2, which has y[1]

Both at once: first the windows are fetched, then copied along out, and the partial results add up along in. What a
partition does not split, nobody sends. All four movements are made in ``distdl.ops.contraction``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from distdl.geometry.borders import CONVOLUTION_MODES, Border
from distdl.geometry.boxes import Interval, Shape, balanced, whole
from distdl.geometry.channels import Channels
from distdl.geometry.edges import Crop, Line
from distdl.geometry.windows import Sliding
from distdl.ops.contraction import Contraction, Local, check_channels, gathers, in_pieces, own_channels
from distdl.ops.kernel import Kernel
from distdl.ops.setup import Setup, Site
from distdl.partition import Partition, Signature


@dataclass(frozen=True)
class Convolution:
    r"""A convolution: :math:`y_o = b_o + \sum_i w_{oi} \star x_i`, sequentially the same as torch's.

    Its inputs are x ``(batch, channels, space...)``, w ``(out, in / groups, kernel...)`` and, if there is one, b
    ``(out,)``. The partition of the site has the axes batch, out, in, space...

    Attributes:
        target: the partition of y: batch, out, space...
        channels: of x and y.
        sliding: the geometry of the windows.
        padding_mode: what stands around x.
        autocast: the dtype in which torch computes, if its autocast is on.
    """

    target: Partition
    channels: Channels
    sliding: Sliding
    padding_mode: str = "zeros"
    autocast: torch.dtype | None = None

    def check(self, name: str) -> None:
        """Check the options.

        Raises: ValueError that names the layer.
        """
        if self.padding_mode not in CONVOLUTION_MODES:
            raise ValueError(f"{name} has the padding modes {', '.join(CONVOLUTION_MODES)}; got {self.padding_mode!r}")
        self.channels.check(name)

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        (x, weight, *biases), channels = signatures, self.channels
        check_channels(site, x, 1, channels.inputs)
        border = Border(self.padding_mode, ((0, 0), (0, 0), *self.sliding.widths))
        border.check(site.label.kind, (1, 1, *x.layout.extents[2:]))  # with 1 for the batch, which may be empty
        _, out, inner, *space = site.partition.workers.shape
        read, computed = self.sliding.windows(site.label.kind, x.layout.extents[2:], tuple(space))
        padded = self._padded_by_torch(x.layout.extents[2:], space)
        read = [
            [(0, extent)] if cells else along
            for along, extent, cells in zip(read, x.layout.extents[2:], padded, strict=True)
        ]
        runs = balanced(channels.outputs, out)
        gathered = gathers(x, 1, inner, channels.groups)
        own, inputs, biased = own_channels(site, 1, runs, balanced(channels.read, inner))
        contraction = Contraction(
            site,
            work=site.partition,
            target=self.target,
            channel=1,
            stored=weight.layout.partition,
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
            parts=((own, inputs, *whole(self.sliding.kernel)), (biased,)),
            border=border,
            autocast=self.autocast,
        )
        pieces = channels.pieces(own)
        by_windows = contraction.setup(lambda *boxes: self._local(pieces, padded), self._smallest(pieces))
        if self.padding_mode != "zeros" or self.autocast is not None:
            return by_windows
        sliding = self.sliding
        options = zip(sliding.kernel, sliding.stride, sliding.padding, sliding.dilation, strict=True)
        lines = [Line(*numbers) for numbers in options]
        kernel = Kernel.of(lines, channels.groups, [Crop(zeros) for zeros in padded])
        return contraction.as_one(lines, channels.groups, by_windows, kernel)

    def _padded_by_torch(self, extents: Shape, space: Sequence[int]) -> Shape:
        """Zeros that torch's convolution puts on both sides itself: where a dim is not split. None are copied then."""
        return tuple(
            before if places == 1 and before == behind and extent and self.padding_mode == "zeros" else 0
            for extent, places, (before, behind) in zip(extents, space, self.sliding.widths, strict=True)
        )

    def _smallest(self, pieces: list[Interval]) -> tuple[Shape, Shape, Shape]:
        """The smallest x, weight and bias that the local function accepts.

        It runs on these where a block is empty, so that every worker records the same operators.
        """
        inputs, outputs, read = 1, 1, 1
        if len(pieces) > 1:
            first, stop = self.channels.read_by((pieces[0][0], pieces[-1][1]))
            inputs, outputs, read = stop - first, pieces[-1][1] - pieces[0][0], self.channels.read
        return (1, inputs, *self.sliding.spans), (outputs, read, *self.sliding.kernel), (outputs,)

    def _local(self, pieces: list[Interval], padded: Shape) -> Local:
        """torch's convolution of a window.

        Args:
            pieces: its output channels, in parts that torch convolves at once: whole groups, or parts of one.
            padded: zeros that torch puts on both sides.
        """
        casts = self.autocast is not None

        @cache
        def kernel(groups: int) -> Kernel:
            return Kernel(self.sliding.stride, self.sliding.dilation, groups, False, padded, (0,) * len(padded))

        def at_once(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return kernel(x.shape[1] // weight.shape[1]).recorded(x, weight, bias, casts)

        if len(pieces) < 2:
            return at_once
        origin, first = self.channels.read_by(pieces[0])[0], pieces[0][0]
        cuts = []
        for run in pieces:
            start, stop = self.channels.read_by(run)
            out = slice(run[0] - first, run[1] - first)
            cuts.append((at_once, slice(start - origin, stop - origin), out, out))
        return in_pieces(cuts)
