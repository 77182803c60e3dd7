"""Contraction: what linear and convolution layers have in common.

Both compute ``y[o] = sum over i of f(x[i], w[o, i])`` for output channels o and input channels i, a convolution at
every point of space. The work is spread over a *work partition* with the axes batch..., out, in, space...:

    x   lives on P_x:              batch... x  1  x in x space...   and is copied along out
    w   lives on the first of      batch... x out x in x space...   and is copied along batch and space
    b   likewise, where in is 0:   batch... x out x  1 x space...
    y   adds up along in, on P_y:  batch... x out x  1 x space...

A layer is then three lines: move in, local operator, move out. Movements that change nothing are left out.

In groups of channels, a run of output channels reads a *window* of the input channels. Then in is 1 in the work
partition, and x, split in any way, comes to each worker as windows of cells do; nothing is copied along out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce
from math import prod, sqrt
from operator import or_
from typing import Any, ClassVar

import torch

from distdl.agreement import Agreement
from distdl.agreement.header import Headers
from distdl.exchange.route import Route, move
from distdl.geometry.borders import Border
from distdl.geometry.boxes import Box, Shape, balanced, shape
from distdl.geometry.windows import Intervals
from distdl.nn.fixed import Fixed
from distdl.nn.module import Module, blank_shape, local, zeros_on
from distdl.nn.movements import LocalOperator, Movements
from distdl.nn.parametrised import check_unfit, trained, unfit
from distdl.nn.placement import keep_sequential_keys, uniform_parameter
from distdl.nn.weights import stored_on, weight_layouts
from distdl.ops.padding import Filling
from distdl.partition import Partition
from distdl.partition.groups import dims
from distdl.partition.layout import Layout, Lookup
from distdl.plan import Plan
from distdl.plan.planners import broadcast, copy
from distdl.tensors.connection import outside
from distdl.tensors.dtypes import dtype_code
from distdl.transport.label import Label


class Contraction(Module):
    """Base of the linear and convolution layers.

    Args:
        P_x, P_y, work: partitions with the axes batch..., in, space...; batch..., out, space...; batch..., out, in,
            space... With groups, in is 1 in ``work`` and any number in P_x.
        in_channels, out_channels: global numbers of input and output channels (features).
        taps: extents of one weight w[o, i], in elements: the kernel of a convolution, none of a linear layer.
        groups: number of groups of channels; w has ``in_channels / groups`` inputs.
        bias: whether to add one.
    """

    path: ClassVar[str] = ""  # of the module that has the parameters, in front of their names
    P_x, P_y, in_channels, out_channels, groups = Fixed(), Fixed(), Fixed(), Fixed(), Fixed()
    extends: ClassVar[bool] = False  # whether x may have more dims than P_x has axes: between batch and channels

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        work: Partition,
        in_channels: int,
        out_channels: int,
        taps: Shape = (),
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.P_x, self.P_y, self._work = P_x, P_y, work
        self.in_channels, self.out_channels, self.groups = int(in_channels), int(out_channels), int(groups)
        self._everyone = P_x | P_y | work
        self._lead = work.workers.ndim - 2 - len(taps)
        self._stored = stored_on(work, self._lead)
        options = (self.in_channels, self.out_channels, taps, groups, bias, work.workers.shape)
        self.label = Label(f"{type(self).__name__} (P_x: {P_x}; P_y: {P_y}; {in_channels} to {out_channels} channels)")
        self._weights, self._biases = self.layouts(taps)
        said = (*options, *self.options())
        parts = (P_x, self._stored, self._biases.partition)
        self._agreement = Agreement.among(self._everyone, self.label, said, self._derive, (work,), parts)
        bound = 1 / sqrt(max(prod(self._weights.extents[1:]), 1))
        weight = uniform_parameter(self._weights, bound)
        self.register(weight, uniform_parameter(self._biases, bound) if bias else None)
        keep_sequential_keys(self)

    @abstractmethod
    def register(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        """Give the parameters their names in this module."""

    @property
    @abstractmethod
    def holder(self) -> torch.nn.Module:
        """The module that has this worker's weight and bias."""

    def blocks(self) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
        """This worker's weight and bias."""
        holder: Any = self.holder
        return holder.weight, holder.bias

    @property
    def _adds_bias(self) -> bool:
        holder: Any = self.holder
        return holder.bias is not None

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Where the blocks of each parameter live, and which part of the sequential layer's parameter they are."""
        layouts = {"weight": self._weights, "bias": self._biases}
        return trained(self, {self.path + name: layout for name, layout in layouts.items()})

    def options(self) -> tuple[object, ...]:
        """What else tells one layer of this class from another."""
        return ()

    def layouts(self, taps: Shape) -> tuple[Layout, Layout]:
        """Which blocks of the sequential layer's weight and bias are stored where."""
        out = self._work.workers.shape[self._lead]
        return weight_layouts(self._stored, out, self.in_channels // self.groups, self.out_channels, taps)

    @abstractmethod
    def windows(self, extents: Shape) -> tuple[list[Intervals], list[Intervals]]:
        """Along each dim of space of a global input: the inputs that each place needs, and the outputs it computes.

        Raises: ValueError, a function of the extents only, if there is no output.
        """

    @abstractmethod
    def operate(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The torch operator, on local blocks."""

    def operator(self, window: Box, outputs: Box) -> LocalOperator:
        """The operator of this worker, from its window of x to its block of the partial y."""
        return self.operate

    def asked_windows(self, headers: Headers, extents: Shape) -> tuple[list[Intervals], list[Intervals]]:
        """``windows``, where the members also ask for something in their headers (see ``contract``)."""
        return self.windows(extents)

    def input_channels(self, outputs: Intervals) -> Intervals:
        """With groups: for each run of output channels, the input channels that it reads."""
        return [(0, self.in_channels)] * len(outputs)

    @property
    def border(self) -> Border:
        """What stands around the input. It may be left to be zeros without a width."""
        return Border()

    @property
    def least_space(self) -> Shape:
        """The smallest extents in space that the operator accepts."""
        return ()

    @property
    def least_channels(self) -> tuple[int, int, int]:
        """The fewest channels that the operator accepts: of x, of y, and of x for one channel of y."""
        return 1, 1, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(x)

    def contract(self, x: torch.Tensor, asked: tuple[int, ...] = ()) -> torch.Tensor:
        """The forward. ``asked`` are integers for this worker's header, equally many on each member."""
        weight, bias = self.blocks()
        parameters = (weight,) if bias is None else (weight, bias)
        if self._work.comm.rank not in self._everyone:
            return outside(x, *parameters)
        kind = weight.device.type
        autocast = 1 + dtype_code(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else 0
        holder = self.holder
        norms = unfit(holder, "weight", self._weights), unfit(holder, "bias", self._biases)
        decision = self._agreement.reach((x, *parameters), (autocast, *norms, *asked))
        go, carried = decision.outcome, decision.carried
        blank = blank_shape(x, preserve_batch=True)
        if not x.numel():
            x = x.to(weight.device, go.dtypes[0])  # where this worker's result has to be, and what it has to be
        x, w, b = go.move_in(x, weight, bias, carried, blank)
        y = self._local(go.operator, go.filling.fill(x), w, b, blank if go.result is None else go.result)
        return y if go.add is None else move(go.add, y, y.dtype, blank, reduce(or_, carried))

    def _local(
        self, operator: LocalOperator, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, result: Shape
    ) -> torch.Tensor:
        channel = len(result) - 1 - len(self.least_space)
        if b is not None and not b.numel() and channel > 0:
            b = zeros_on(b, (result[channel],))  # of the workers along in, only the first adds the bias
        inputs, outputs, read = self.least_channels
        least_x = (*[1] * self._lead, inputs, *self.least_space)
        least_w = (outputs, read, *self._weights.extents[2:])
        return local(operator, result, (x, least_x), (w, least_w), (b, (outputs,)))

    def _derive(self, headers: Headers) -> Movements:
        kind, me = type(self).__name__, self._work.comm.rank
        of_weight, of_bias = headers.extras(self._everyone)[:, 1:3].max(axis=0).tolist()
        check_unfit(str(self.label), "weight", of_weight, self._weights)
        check_unfit(str(self.label), "bias", of_bias, self._biases)
        shapes = headers.shapes(self.P_x, kind, None if self.extends else self.P_x.workers.ndim)
        P_x, P_y, work = (self._extended(P, shapes.shape[-1]) for P in (self.P_x, self.P_y, self._work))
        owned = Layout.tiled(P_x, shapes.reshape(*P_x.workers.shape, -1))
        channel = work.workers.ndim - 2 - len(self.least_space)
        if owned.extents[channel] != self.in_channels:
            raise ValueError(
                f"{self.label} needs an input with {self.in_channels} channels in dim {channel}; "
                f"the global shape of the input is {dims(owned.extents)}"
            )
        inputs, outputs = self.asked_windows(headers, owned.extents[channel + 1 :])
        out, inner = work.workers.shape[channel : channel + 2]
        batch, runs = owned.intervals[:channel], balanced(self.out_channels, out)
        read = balanced(self.in_channels, inner) if self.groups == 1 else self.input_channels(runs)
        windows = (*batch, read, *inputs)
        computed = Layout.of(P_y, (*batch, runs, *outputs))
        window = _own_box(work, channel + (self.groups > 1), windows)
        result = _own_box(work, channel + 1, computed.intervals)
        return Movements(
            **self._routes(headers, work, owned, windows, computed),
            filling=Filling() if window is None else Filling.of(self.border, window, owned.extents),
            dtypes=self._dtypes(headers),
            parts=self._parts(me) if me in work else ((0,),),
            operator=self.operate if window is None or result is None else self.operator(window, result),
            result=None if result is None else shape(result),
        )

    def _routes(
        self, headers: Headers, work: Partition, owned: Layout, windows: Sequence[Intervals], computed: Layout
    ) -> dict[str, Route | None]:
        P_x, P_y, me, border = owned.partition, computed.partition, work.comm.rank, self.border
        channel = work.workers.ndim - 2 - len(self.least_space)
        batch, (out, inner), space = (work.workers.shape[cut] for cut in _around(channel))
        spreads = out > 1 and self.groups == 1
        P_along_out, P_along_in = P_x.reshape(*batch, 1, -1, *space), P_y.reshape(*batch, -1, 1, *space)
        at = P_x if spreads else work.reshape(*batch, out * inner, *space)
        needed = Layout.of(at, border.fetched(windows, owned.extents))
        still = _same(owned, needed)
        plans: dict[str, Plan | None] = {
            "align": None if still else copy(owned, needed, me, border.repeats(owned.extents)),
            "spread": broadcast(P_along_out, work, needed.shapes, me) if spreads else None,
            "parameters": self._parameter_plan(me),
            "add": None if P_along_in == work else broadcast(P_along_in, work, computed.shapes, me).T,
        }
        last = plans["spread"] is None and plans["add"] is None  # collectives would copy what is not contiguous
        return {
            name: None
            if plan is None
            else Route(plan, work.comm, headers.members, self.label, last and name == "align")
            for name, plan in plans.items()
        }

    def _extended(self, P: Partition, rank: int) -> Partition:
        """The partition of the tensor's dims: dims without an axis stand behind those of the batch."""
        more = rank - self.P_x.workers.ndim
        if more < 0:
            raise ValueError(
                f"{self.label} needs an input with at least {self.P_x.workers.ndim} dims, one for each axis of P_x; "
                f"got one with {rank}"
            )
        axes = P.workers.shape
        extended: Partition = P.reshape(*axes[: self._lead], *[1] * more, *axes[self._lead :])
        return extended

    def _parameter_plan(self, me: int) -> Plan | None:
        biases = self._biases if self._adds_bias else {}

        def size(worker: int) -> Shape:
            return (prod(self._weights.shapes[worker]) + (prod(shape(biases[worker])) if worker in biases else 0),)

        if self._stored == self._work:
            return None
        return broadcast(self._stored, self._work, Lookup(tuple(self._weights), size), me)

    def _parts(self, me: int) -> tuple[Shape, ...]:
        out, inner = self._work.index_of(me)[self._lead : self._lead + 2]
        adds = inner == 0 and self._adds_bias
        stored = self._stored.workers.reshape(self._work.workers.shape[self._lead], -1)[out, inner]
        weight = shape(self._weights[int(stored)])
        return (weight, shape(self._biases.at((out,)))) if adds else (weight,)

    def _dtypes(self, headers: Headers) -> tuple[torch.dtype, torch.dtype]:
        kind = type(self).__name__
        found = [headers.dtype(self.P_x, kind), headers.dtype(self._stored, kind, tensor=1)]
        headers.check_blocks(self._weights, f"{self.label}: weight", tensor=1)
        if self._adds_bias:
            headers.check_blocks(self._biases, f"{self.label}: bias", tensor=2)
            found.append(headers.dtype(self._biases.partition, kind, tensor=2))
        autocast = headers.extras(self._everyone)[..., 0]
        if (autocast != autocast.flat[0]).any():
            raise ValueError(f"{self.label} needs autocast to be on or off, and of one dtype, on all workers alike")
        if len(set(found[1:] if autocast.any() else found)) > 1:
            listed = ", ".join(map(str, found))
            raise ValueError(f"{self.label} needs input, weight and bias of one dtype; got {listed}")
        return found[0], found[1]


def _around(channel: int) -> tuple[slice, slice, slice]:
    """Where the axes batch, out and in, and space of a work partition are."""
    return slice(channel), slice(channel, channel + 2), slice(channel + 2, None)


def _own_box(work: Partition, axis: int, intervals: Sequence[Intervals]) -> Box | None:
    """This worker's intervals, which do not depend on its place along an axis; None outside the work partition."""
    if work.comm.rank not in work:
        return None
    index = work.index_of(work.comm.rank)
    return tuple(along[place] for along, place in zip(intervals, index[:axis] + index[axis + 1 :], strict=True))


def _same(owned: Layout, needed: Layout) -> bool:
    return owned.intervals == needed.intervals and bool((owned.partition.workers == needed.partition.workers).all())
