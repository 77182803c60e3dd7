"""Contraction: what linear and convolution layers have in common.

Both compute ``y[o] = sum over i of f(x[i], w[o, i])`` for output channels o and input channels i, a convolution at
every point of space. The work is spread over a *work partition* with the axes batch, out, in, space...:

    x   lives on P_x:              batch x  1  x in x space...   and is copied along out
    w   lives on the first of      batch x out x in x space...   and is copied along batch and space
    b   likewise, where in is 0:   batch x out x  1 x space...
    y   adds up along in, on P_y:  batch x out x  1 x space...

A layer is then three lines: move in, local operator, move out. Movements that change nothing are left out.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import reduce
from math import prod, sqrt
from operator import or_

import torch

from distdl.agreement import Agreement
from distdl.boxes import Shape, balanced, shape
from distdl.exchange import Load, Route, move, move_together
from distdl.groups import dims
from distdl.header import Carried, Headers
from distdl.layout import Layout, Lookup
from distdl.nn.module import Module, blank_shape, local, zeros_on
from distdl.nn.placement import uniform_parameter
from distdl.partition import Partition
from distdl.plan import Plan
from distdl.planning import broadcast, copy
from distdl.windows import Intervals


@dataclass(frozen=True)
class Movements:
    """What follows from the headers: routes (None where nothing has to move), dtypes, and the shape of the local y.

    Attributes:
        align: x from its blocks to the windows that outputs need.
        spread: x along out.
        parameters: weight and bias, as one vector.
        add: y along in, to P_y.
        dtypes: of x and of the parameters.
        blocks: shapes of the weight and the bias of which this worker's vector consists; None where it has none.
        result: shape of the local operator's result; None on workers outside the work partition.
    """

    align: Route | None
    spread: Route | None
    parameters: Route | None
    add: Route | None
    dtypes: tuple[torch.dtype, torch.dtype]
    blocks: tuple[Shape | None, Shape | None]
    result: Shape | None


class Contraction(Module):
    """Base of the linear and convolution layers.

    Args:
        P_x, P_y, work: partitions with the axes batch, in, space...; batch, out, space...; batch, out, in, space...
        in_channels, out_channels: global numbers of input and output channels (features).
        taps: extents of one weight w[o, i], in elements: the kernel of a convolution, none of a linear layer.
        groups: number of groups of channels; w has ``in_channels / groups`` inputs.
        bias: whether to add one.
    """

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
        options = (self.in_channels, self.out_channels, taps, groups, bias, work.workers.shape)
        self._name = f"{type(self).__name__} (P_x: {P_x}; P_y: {P_y}; {in_channels} to {out_channels} channels)"
        stored = _first_along_batch_and_space(work)
        parts = (P_x, stored, stored[:, :, :1])
        said = (*options, *self.options())
        self._agreement = Agreement.among(self._everyone, self._name, said, self._derive, (work,), parts)
        self._weights, self._biases = _parameter_layouts(work, self.in_channels // groups, self.out_channels, taps)
        bound = 1 / sqrt(max(self.in_channels // groups * prod(taps), 1))
        weight = uniform_parameter(self._weights, bound)
        self.register(weight, uniform_parameter(self._biases, bound) if bias else None)

    @abstractmethod
    def register(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        """Give the parameters their names in this module."""

    @abstractmethod
    def blocks(self) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
        """This worker's weight and bias."""

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Where the blocks of each parameter live, and which part of the sequential layer's parameter they are."""
        named = dict(self.named_parameters())
        return dict(zip(named, (self._weights, self._biases), strict=False))

    def options(self) -> tuple[object, ...]:
        """What else tells one layer of this class from another."""
        return ()

    @abstractmethod
    def windows(self, extents: Shape) -> tuple[list[Intervals], list[Intervals]]:
        """Along each dim of space of a global input: the inputs that each place needs, and the outputs it computes.

        Raises: ValueError, a function of the extents only, if there is no output.
        """

    @abstractmethod
    def operate(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The torch operator, on local blocks."""

    @property
    def least_space(self) -> Shape:
        """The smallest extents in space that the operator accepts."""
        return ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.blocks()
        parameters = (weight,) if bias is None else (weight, bias)
        if self._work.comm.rank not in self._everyone:
            return sum((zeros_on(parameter, ()) for parameter in parameters), x.clone())
        autocast = torch.is_autocast_enabled(weight.device.type)
        decision = self._agreement.reach((x, *parameters), (int(autocast),))
        go, carried = decision.outcome, decision.carried
        blank = blank_shape(x, preserve_batch=True)
        if not x.numel():
            x = x.to(weight.device, go.dtypes[0])  # where this worker's result has to be, and what it has to be
        x, w, b = self._move_in(go, x, weight, bias, carried)
        y = self._local(x, w, b, blank if go.result is None else go.result)
        return y if go.add is None else move(go.add, y, y.dtype, blank, reduce(or_, carried))

    def _move_in(
        self, go: Movements, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, carried: tuple[Carried, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """This worker's part of x, and its weight and bias, which move at the same time."""
        blank = blank_shape(x, preserve_batch=True)
        loads = [Load(route, go.dtypes[0], blank, carried[0]) for route in (go.align, go.spread) if route is not None]
        first = [(load, x) for load in loads[:1]]
        if go.parameters is not None:
            first.append((Load(go.parameters, go.dtypes[1], (0,), reduce(or_, carried[1:])), _pack(w, b)))
        if first:
            moved = move_together(*zip(*first, strict=True))
            x = moved[0] if loads else x
            w, b = (w, b) if go.parameters is None else _unpack(moved[-1], *go.blocks)
        for load in loads[1:]:
            (x,) = move_together((load,), (x,))
        return x, w, b

    def _local(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, result: Shape) -> torch.Tensor:
        if b is not None and not b.numel() and len(result) > 1:
            b = zeros_on(b, result[1:2])  # of the workers along in, only the first adds the bias
        least_x, least_w = (1, self.groups, *self.least_space), (self.groups, 1, *self._weights.extents[2:])
        return local(self.operate, result, (x, least_x), (w, least_w), (b, (self.groups,)))

    def _derive(self, headers: Headers) -> Movements:
        work, me = self._work, self._work.comm.rank
        owned = Layout.tiled(self.P_x, headers.shapes(self.P_x, type(self).__name__, self.P_x.workers.ndim))
        if owned.extents[1] != self.in_channels:
            raise ValueError(
                f"{self._name} needs an input with {self.in_channels} channels in dim 1; "
                f"the global shape of the input is {dims(owned.extents)}"
            )
        inputs, outputs = self.windows(owned.extents[2:])
        batch, out, inner, *space = work.workers.shape
        at = self.P_x if out > 1 else work.reshape(batch, inner, *space)
        needed = Layout.of(at, [owned.intervals[0], balanced(self.in_channels, inner), *inputs])
        computed = Layout.of(self.P_y, [owned.intervals[0], balanced(self.out_channels, out), *outputs])
        P_along_out = self.P_x.reshape(batch, 1, inner, *space)
        P_along_in = self.P_y.reshape(batch, out, 1, *space)
        moves: dict[str, Plan | None] = {
            "align": None if _same(owned, needed) else copy(owned, needed, me),
            "spread": None if out == 1 else broadcast(P_along_out, work, needed.shapes, me),
            "parameters": self._parameter_plan(me),
            "add": None if P_along_in == work else broadcast(P_along_in, work, computed.shapes, me).T,
        }
        return Movements(
            **{name: self._route(headers, plan) for name, plan in moves.items()},
            dtypes=self._dtypes(headers),
            blocks=self._blocks(me) if me in work else (None, None),
            result=_result_shape(work, computed) if me in work else None,
        )

    def _route(self, headers: Headers, plan: Plan | None) -> Route | None:
        return None if plan is None else Route(plan, self._work.comm, headers.members, self._name)

    def _parameter_plan(self, me: int) -> Plan | None:
        stored = _first_along_batch_and_space(self._work)
        biases = self._biases if self.blocks()[1] is not None else {}

        def size(worker: int) -> Shape:
            return (prod(self._weights.shapes[worker]) + (prod(shape(biases[worker])) if worker in biases else 0),)

        return None if stored == self._work else broadcast(stored, self._work, Lookup(tuple(self._weights), size), me)

    def _blocks(self, me: int) -> tuple[Shape, Shape | None]:
        _, out, inner, *space = self._work.index_of(me)
        adds = inner == 0 and self.blocks()[1] is not None
        weight = shape(self._weights.at((out, inner, *[0] * len(space))))
        return weight, shape(self._biases.at((out,))) if adds else None

    def _dtypes(self, headers: Headers) -> tuple[torch.dtype, torch.dtype]:
        kind = type(self).__name__
        stored = _first_along_batch_and_space(self._work)
        found = [headers.dtype(self.P_x, kind), headers.dtype(stored, kind, tensor=1)]
        if self.blocks()[1] is not None:
            found.append(headers.dtype(stored[:, :, :1], kind, tensor=2))
        autocast = headers.extras(self._everyone)
        if autocast.any() != autocast.all():
            raise ValueError(f"{self._name} needs autocast to be on or off on all workers alike")
        if len(set(found[1:] if autocast.any() else found)) > 1:
            listed = ", ".join(map(str, found))
            raise ValueError(f"{self._name} needs input, weight and bias of one dtype; got {listed}")
        return found[0], found[1]


def _pack(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What this worker stores of the parameters, as one vector."""
    if bias is None:
        return weight.reshape(-1)
    if bias.numel():
        return torch.cat([weight.reshape(-1), bias])
    return weight.reshape(-1) + bias.sum()


def _unpack(vector: torch.Tensor, weight: Shape | None, bias: Shape | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    if weight is None:
        return vector, None
    if bias is None:
        return vector.view(weight), None
    w, b = vector.split([prod(weight), prod(bias)])
    return w.view(weight), b


def _first_along_batch_and_space(work: Partition) -> Partition:
    first: Partition = work[(slice(0, 1), slice(None), slice(None), *[slice(0, 1)] * (work.workers.ndim - 3))]
    return first


def _parameter_layouts(work: Partition, inputs: int, outputs: int, taps: Shape) -> tuple[Layout, Layout]:
    stored = _first_along_batch_and_space(work)
    out, inner = work.workers.shape[1:3]
    kernel = [[(0, tap)] for tap in taps]
    weights = Layout.of(
        stored.reshape(out, inner, *[1] * len(taps)), [balanced(outputs, out), balanced(inputs, inner), *kernel]
    )
    return weights, Layout.of(stored[:, :, :1].reshape(out), [balanced(outputs, out)])


def _same(owned: Layout, needed: Layout) -> bool:
    return owned.intervals == needed.intervals and bool((owned.partition.workers == needed.partition.workers).all())


def _result_shape(work: Partition, computed: Layout) -> Shape:
    batch, out, _, *space = work.index_of(work.comm.rank)
    return shape(computed.at((batch, out, *space)))
