"""Contraction: what linear maps and convolutions have in common, and what is sent to whom.

Both compute ``y[o] = sum over i of f(x[i], w[o, i])`` for output channels o and input channels i, a convolution at
every point of space. The work is spread over a *work partition* with the axes batch..., out, in, space...:

    tensor  lives on                                               on its way to or from the work
    x       P_x, seen as                 batch...    1  x in x space    is copied along out
    w       the first of the work        (1...)    x out x in x (1...)  is copied along batch and space
            along batch and space
    b       the same, where in is 0      (1...)    x out x  1 x (1...)  is copied along batch and space
    y       P_y, seen as                 batch...  x out x  1 x space   adds up along in

Four operators do this, each an arrow; what would move nothing is an identity::

    x (P_x)  --fetch-->  windows  --spread-->  \
                                                 work: f(window, w, b)  --add-->  y (P_y)
    w, b (stored)  --parameters-------------->  /

``fetch`` brings each place the channels and cells that its outputs read: those around its block, and those of its
channels that are elsewhere. (A linear map often fetches nothing.) ``spread`` then copies them along out. ``parameters``
packs w and b as one message, which is under way at the same time as the first operator of x. ``add`` is the transpose
of a broadcast, that is a sum, and leaves y on the workers of P_y. Backward is the same picture with all arrows turned:
gradients of halos add up on the workers that own the cells, those of w and b where these are stored.

In groups of channels, a run of output channels reads a window of the input channels. Then in is 1 in the work
partition, and x, split in any way, comes to each worker as windows of cells do; nothing is copied along out. The same
is done without groups where x is split along channels and in is 1: each run of output channels reads all of x.

Where every worker has the whole of w and b (``Layout.everywhere``), each takes its parts and nothing is sent for them.
Their gradients are then each worker's terms of a sum over all workers, which is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from math import prod
from operator import or_
from typing import Any

import torch
from numpy import array_equal

from distdl.exchange import Chain, Operator, Together
from distdl.geometry.borders import Border
from distdl.geometry.boxes import Box, Interval, Intervals, Shape, shape
from distdl.ops.edges import InPlace, fits, stays
from distdl.ops.kernel import Kernel, Lines
from distdl.ops.padding import Filling
from distdl.ops.setup import Beside, Parts, Setup, Site, blank_shape, same
from distdl.ops.windowed import Windowed, are_full, is_small
from distdl.partition import Layout, Lookup, Partition, Signature, dims
from distdl.plan.planning import broadcast, copy
from distdl.tensors.connection import local, zeros_on

Local = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Contraction:
    """The movements of one contraction.

    Attributes:
        site: who takes part.
        work: the partition of the work: batch..., out, in, space...
        target: that of y: batch..., out, space...
        channel: the dim of the channels, behind those of the batch.
        stored: that of the weights, in the order out x in; not read where every worker has the whole of them.
        x, weight, bias: signatures.
        reads: for each dim of x, what each place of the work reads; of gathered channels, each place along out.
        computes: for each dim of y, what each place of the work computes.
        gathers: whether each place along out fetches all channels that it reads; then in is 1.
        parts: this worker's parts of w and b, where every worker has the whole of them.
        border: what stands around x.
        autocast: the dtype in which torch computes, if its autocast is on.
    """

    site: Site
    work: Partition
    target: Partition
    channel: int
    stored: Partition
    x: Signature
    weight: Signature
    bias: Signature | None
    reads: Sequence[Intervals]
    computes: Sequence[Intervals]
    gathers: bool
    parts: Sequence[Box]
    border: Border = field(default_factory=Border)
    autocast: torch.dtype | None = None

    def setup(self, choose: Callable[[Box, Box], Local], smallest: Sequence[Shape]) -> Setup:
        """The three steps of this worker.

        Args:
            choose: from this worker's window of x and its box of y to torch's function. Where it does not work, from
                two empty boxes.
            smallest: the smallest shapes of x, weight and bias that torch's function accepts.
        Raises: ValueError if dtypes differ.
        """
        dtype = self._result_dtype()
        out, inner = self.channel, self.channel + 1  # axes of the work
        window = self._own(self.reads, left_out=inner if self.gathers else out)
        outputs = self._own(self.computes, left_out=inner)
        works, result = bool(window), shape(outputs) if outputs else self._blank
        filling = Filling.of(self.border, window, self.x.layout.extents) if works else Filling()
        function, (least_x, least_w, least_b), channel = choose(window, outputs), smallest, self.channel

        def compute(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
            if b is not None and works and not b.numel():
                b = zeros_on(b, (result[channel],))  # of the workers along in, only the first adds the bias
            return local(function, result, (filling.fill(x), least_x), (w, least_w), (b, least_b))

        return Setup(self._move_in(*self._fetch_and_spread), compute, self._move_out(result, dtype), (self._computed,))

    def as_one(self, lines: Lines, groups: int, by_windows: Setup, kernel: Kernel | None = None) -> Setup:
        """The same as one autograd node, if blocks lie where they are computed: of blocks in place, or of windows.

        Small blocks are copied into windows: two more calls of torch's convolution take longer.

        Args:
            lines: the geometry, for each dim of space.
            kernel: torch's function of a window, if it is torch's convolution.
        """
        site, x, weight, (outputs,) = self.site, self.x, self.weight, by_windows.results
        if not stays(site, [one for one in (x, weight, self.bias) if one is not None], outputs):
            return by_windows
        windows = Layout.along(x.layout.partition, [*x.layout.intervals[:2], *self.reads[2:]])
        fetch, _ = self._fetch_and_spread
        everywhere = weight.layout.is_everywhere
        parameters = None if everywhere else self._parameters()
        moves = not fetch.still or not (parameters is None or parameters.still)
        everybody = len(site.members) == site.partition.size and are_full(x.layout, windows, outputs)
        copies = kernel is not None and moves and everybody
        if not (copies and is_small(windows, x.dtype.itemsize)) and fits(x, weight, lines, windows, outputs):

            def windowed(x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
                y: torch.Tensor = by_windows.local(fetch(x), *[one for one in others if one is not None])
                return y

            local = InPlace.of(lines, site, x, windows, outputs, groups, windowed)
            return Setup(Together() if everywhere else self._move_in(), local, same, by_windows.results)
        if kernel is None or not copies:
            return by_windows

        def by_steps(*tensors: torch.Tensor | None) -> torch.Tensor:
            given = [one for one in tensors if one is not None]
            y: torch.Tensor = by_windows.move_out(by_windows.local(*by_windows.move_in(*given)))
            return y

        brought = None if parameters is None or parameters.still else parameters
        return Setup(Together(), Windowed(kernel, fetch, brought, by_steps), same, by_windows.results)

    def _move_in(self, *operators: Operator) -> Together | Chain:
        """Those of x, one after the other, and w and b beside the first."""
        moving = [op for op in operators if not op.still]
        first = moving[0] if moving else self.site.identity(self.x.dtype, self.x.derivatives, self.x.local)
        everywhere = self.weight.layout.is_everywhere
        steps: list[Any] = [Together(first) if everywhere else Together(first, self._parameters())]
        steps += map(Together, moving[1:])
        if everywhere:
            given = [self.weight] if self.bias is None else [self.weight, self.bias]
            steps.append(Parts(self.parts[: len(given)], [one.layout.extents for one in given]))
        if 0 in self.x.local:  # such an x may be of any dtype, and on any device
            steps.insert(0, Beside(self.x.dtype))
        return steps[0] if len(steps) == 1 else Chain(*steps)

    @cached_property
    def _fetch_and_spread(self) -> tuple[Operator, Operator]:
        """x to the windows, and along out."""
        x, site, me, border, owned = self.x, self.site, self.site.me, self.border, self.x.layout
        batch, (out, inner), space = self._axes
        spreads = out > 1 and not self.gathers
        at = owned.partition if spreads else self.work.reshape(*batch, out * inner, *space)
        needed = Layout.along(at, border.fetched(self.reads, owned.extents))
        found = needed.shapes[me] if me in at else self._blank
        keeps_format = not spreads and self._in_place  # collectives would copy what is not contiguous
        if owned.intervals == needed.intervals and array_equal(owned.partition.workers, at.workers):
            fetch, found = site.identity(x.dtype, x.derivatives, x.local), x.local
        else:
            plan = copy(owned, needed, me, border.repeats(owned.extents))
            fetch = site.operator(plan, x.dtype, x.derivatives, [x.local], [self._blank], keeps_format, lends=True)
        if not spreads:
            return fetch, site.identity(x.dtype, x.derivatives, found)
        plan = broadcast(owned.partition.reshape(*batch, 1, -1, *space), self.work, needed.shapes, me)
        return fetch, site.operator(plan, x.dtype, x.derivatives, [found], [self._blank])

    def _parameters(self) -> Operator:
        """Weight and bias along batch and space, as one message."""
        weight, bias, site, me = self.weight, self.bias, self.site, self.site.me
        given = [weight] if bias is None else [weight, bias]
        derivatives = reduce(or_, (one.derivatives for one in given))
        inputs = [one.local for one in given]
        batch, (out, inner), space = self._axes
        blocks = self.stored.reshape(out, inner)
        stored = blocks.reshape(*[1] * len(batch), out, inner, *[1] * len(space))
        if stored == self.work:
            return site.identity(weight.dtype, derivatives, *inputs)
        biases = {} if bias is None else bias.layout

        def size(worker: int) -> Shape:
            return (prod(weight.layout.shapes[worker]) + (prod(shape(biases[worker])) if worker in biases else 0),)

        outputs: list[Shape] = [(0,)]
        if me in self.work:
            source = int(blocks.workers[self.work.index_of(me)[self.channel : self.channel + 2]])
            outputs = [shape(one[source]) for one in (weight.layout, biases) if source in one]
        plan = broadcast(stored, self.work, Lookup(tuple(weight.layout), size), me)
        return site.operator(plan, weight.dtype, derivatives, inputs, outputs=outputs)

    def _move_out(self, result: Shape, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """y along in, from the workers that compute to those of P_y."""
        if self._in_place:
            return same
        given = [one for one in (self.x, self.weight, self.bias) if one is not None]
        derivatives = reduce(or_, (one.derivatives for one in given))
        plan = broadcast(self._target_along_in, self.work, self._computed.shapes, self.site.me).T
        return self.site.operator(plan, dtype, derivatives, [result], [self._blank])

    @cached_property
    def _computed(self) -> Layout:
        return Layout.along(self.target, self.computes)

    @cached_property
    def _in_place(self) -> bool:
        """Whether y is where it is computed."""
        return bool(self._target_along_in == self.work)

    @cached_property
    def _target_along_in(self) -> Partition:
        batch, _, space = self._axes
        along: Partition = self.target.reshape(*batch, -1, 1, *space)
        return along

    @cached_property
    def _axes(self) -> tuple[Shape, Shape, Shape]:
        """Extents of the work partition: of the batch; out and in; of space."""
        axes, channel = self.work.workers.shape, self.channel
        return axes[:channel], axes[channel : channel + 2], axes[channel + 2 :]

    @cached_property
    def _blank(self) -> Shape:
        return blank_shape(self.x.local)

    def _own(self, intervals: Sequence[Intervals], left_out: int) -> Box:
        """This worker's intervals, which do not depend on its place along one axis; empty where it does not work."""
        if self.site.me not in self.work:
            return ()
        index = self.work.index_of(self.site.me)
        places = index[:left_out] + index[left_out + 1 :]
        return tuple(along[place] for along, place in zip(intervals, places, strict=True))

    def _result_dtype(self) -> torch.dtype:
        found = [one.dtype for one in (self.x, self.weight, self.bias) if one is not None]
        if len(set(found if self.autocast is None else found[1:])) > 1:
            listed = ", ".join(map(str, found))
            raise ValueError(f"{self.site.label} needs input, weight and bias of one dtype; got {listed}")
        keeps = self.autocast is None or not found[0].is_floating_point or found[0] is torch.float64
        return found[0] if keeps or self.autocast is None else self.autocast


def in_pieces(pieces: Sequence[tuple[Local, slice, slice | tuple[slice, ...], slice]]) -> Local:
    """A function of channels that cut through groups: piece by piece, beside each other.

    Args:
        pieces: of each, torch's function, the channels of x that it reads, its part of the weight, and its outputs.
    """

    def compute(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found = [
            function(x[:, read], weight[part], None if bias is None else bias[out])
            for function, read, part, out in pieces
        ]
        return torch.cat(found, 1)

    return compute


def gathers(x: Signature, channel: int, inner: int, groups: int = 1) -> bool:
    """Whether each run of output channels fetches all input channels that it reads.

    It does in groups, and where x is split along channels in another way than the work is along in.
    """
    return groups > 1 or x.layout.partition.workers.shape[channel] != inner


def own_channels(site: Site, channel: int, runs: Intervals, reads: Intervals) -> tuple[Interval, Interval, Interval]:
    """Of this worker: its run of output channels, what it reads along in, and the outputs to which it adds the bias.

    All are empty where it does not work, and only the first along in adds the bias.
    """
    if site.me not in site.partition:
        return ((0, 0),) * 3
    out, inner = site.partition.index_of(site.me)[channel : channel + 2]
    start, stop = runs[out]
    return (start, stop), reads[inner], (start, start if inner else stop)


def check_channels(site: Site, x: Signature, channel: int, channels: int) -> None:
    """Check the number of channels of x.

    Raises: ValueError that names the layer.
    """
    if x.layout.extents[channel] != channels:
        raise ValueError(
            f"{site.label} needs an input with {channels} channels in dim {channel}; "
            f"the global shape of the input is {dims(x.layout.extents)}"
        )
