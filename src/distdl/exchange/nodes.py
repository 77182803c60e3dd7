"""The autograd nodes that operators record, and what they do in backward.

Every member of an operator records the same node, so that each also takes part in its backward: a worker whose own
tensor needs no gradient is tied in through an *anchor*, a tensor of zero volume that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import islice
from operator import or_
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch.autograd import forward_ad
from torch.profiler import record_function

from distdl.exchange.packing import Tensors
from distdl.geometry.boxes import Shape
from distdl.plan import Plan
from distdl.plan.plan import Pattern
from distdl.tensors.derivatives import MADE_BY, Derivatives, has_tangent, is_differentiated_forward
from distdl.tensors.function import Function
from distdl.tensors.modes import unobserved
from distdl.transport.calls import Calls
from distdl.transport.communicator import Communicator, Pending
from distdl.transport.label import Label

_NOTHING = torch.empty(0, device="cpu")
_new = tuple.__new__  # the constructor of a NamedTuple takes twice as long


class Movable(Protocol):
    """What a node uses of the operator that records it; :class:`~distdl.exchange.operator.Operator` describes each."""

    plan: Plan
    comm: Communicator
    calls: Calls
    label: Label
    derivatives: Derivatives
    recorded: bool
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    @property
    def T(self) -> Self: ...
    @property
    def unrecorded_adjoint(self) -> Self: ...
    def deriving(self, derivatives: Derivatives) -> Self: ...

    def move(self, x: torch.Tensor) -> torch.Tensor: ...
    def move_packed(self, xs: Tensors) -> Tensors: ...
    def execute(self, x: torch.Tensor) -> torch.Tensor: ...
    def begin(self, x: torch.Tensor) -> tuple[torch.Tensor, Pending]: ...
    def packed(self, xs: Tensors) -> torch.Tensor: ...
    def unpacked(self, y: torch.Tensor) -> Tensors: ...
    def filled(self, xs: Sequence[torch.Tensor | None], device: torch.device) -> Tensors: ...


def move_all(operators: Sequence[Movable], arguments: Sequence[Tensors]) -> list[Tensors]:
    """Call several operators at once, none of which is still. Returns the tensors of each."""
    flat = [x for xs in arguments for x in xs]
    noted = [op.derivatives for op in operators if op.recorded]
    if not noted:
        ys: Tensors = _execute(operators, [x.detach() for x in flat])
    else:
        derivatives = reduce(or_, noted)
        anchor = anchor_beside(flat[0], derivatives) if are_bare(flat, derivatives) else None
        ys = _ApplyTogether.apply(operators, anchor, *flat)
    return _grouped(ys, [len(op.outputs) for op in operators])


def are_bare(xs: Sequence[torch.Tensor], derivatives: Derivatives) -> bool:
    """Whether this worker's tensors have no gradient, or no tangent, though tensors of other members have."""
    return (derivatives.gradient and not any(x.requires_grad for x in xs)) or (
        derivatives.tangent and not any(map(has_tangent, xs))
    )


def anchor_beside(beside: torch.Tensor, derivatives: Derivatives) -> torch.Tensor:
    """A tensor of zero volume that has the derivatives that tensors of other members have."""
    anchor = torch.empty(0, device=beside.device, requires_grad=derivatives.gradient)
    # Inside a backward, the anchor is marked as made by it. In a forward, it stands for the tensors of other members.
    if torch._C._current_graph_task_id() != -1:
        anchor.__dict__[MADE_BY] = None
    return forward_ad.make_dual(anchor, torch.empty(0, device=beside.device)) if derivatives.tangent else anchor


class Apply(Function):
    """``y = op(x)``. Its backward is ``op.T``, its tangent map the operator itself."""

    @staticmethod
    def forward(ctx: Any, op: Movable, anchor: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        ctx.op, ctx.source = op, _new(_Source, (x.shape, x.dtype, x.device, op.calls.history))
        ctx.save_for_backward(_NOTHING)  # so that checkpointing recomputes this node, on every member alike
        ctx.set_materialize_grads(False)
        return op.execute(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # before any message: this is where a checkpoint recomputes its forward
        op, source, dx = ctx.op, ctx.source, None
        if op.derivatives.gradient:
            adjoint = _adjoint(op)
            calls, began = op.calls, source.began
            # as ``calls.derive`` does, without a call
            calls.log.append(began)
            calls.history ^= began
            dx = source.like(adjoint.move(adjoint.filled((dy,), source.device)[0] if dy is None else dy))
        return None, _anchored(ctx.needs_input_grad[1], source.device), dx

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        op: Movable = ctx.op
        op.calls.derive(ctx.source.began)
        return _tangent_map(op).move(ctx.source.tangent(tangents[2]))


class ApplyPacked(Function):
    """``ys = op(*xs)`` for several tensors, which move as one."""

    @staticmethod
    def forward(ctx: Any, op: Movable, anchor: torch.Tensor | None, *xs: torch.Tensor) -> Tensors:
        began = op.calls.history
        ctx.op, ctx.sources = op, [_new(_Source, (x.shape, x.dtype, x.device, began)) for x in xs]
        ctx.save_for_backward(_NOTHING)
        ctx.set_materialize_grads(False)
        return op.unpacked(op.execute(op.packed(xs)))

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        op, sources = ctx.op, ctx.sources
        if not op.derivatives.gradient:
            return None, None, *(None for _ in sources)
        device, adjoint = sources[0].device, _adjoint(op)
        op.calls.derive(sources[0].began)
        dxs = adjoint.move_packed(adjoint.filled(dys, device))
        return None, _anchored(ctx.needs_input_grad[1], device), *map(_Source.like, sources, dxs)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Tensors:
        ctx.op.calls.derive(ctx.sources[0].began)
        return _tangent_map(ctx.op).move_packed(tuple(map(_Source.tangent, ctx.sources, tangents[2:])))


class _ApplyTogether(Function):
    """Several operators in one node. Operators that are not recorded move in it, too."""

    @staticmethod
    def forward(ctx: Any, ops: Sequence[Movable], anchor: torch.Tensor | None, *xs: torch.Tensor) -> Tensors:
        ctx.ops, ctx.began = ops, {op.calls: op.calls.history for op in ops}
        moved = zip(ops, _grouped(xs, [len(op.inputs) for op in ops]), strict=True)
        ctx.sources = [
            _new(_Source, (x.shape, x.dtype, x.device, ctx.began[op.calls])) for op, own in moved for x in own
        ]
        ctx.save_for_backward(_NOTHING)
        ctx.set_materialize_grads(False)
        ys = _execute(ops, xs)
        if not all(op.recorded for op in ops):
            grouped = zip(ops, _grouped(ys, [len(op.outputs) for op in ops]), strict=True)
            ctx.mark_non_differentiable(*(y for op, own in grouped if not op.recorded for y in own))
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        device = ctx.sources[0].device
        adjoints, cotangents = [], []
        for op, own in zip(ctx.ops, _grouped(dys, [len(op.outputs) for op in ctx.ops]), strict=True):
            if op.recorded and op.derivatives.gradient:
                adjoint = _adjoint(op)
                adjoints.append(adjoint)
                cotangents.append(adjoint.filled(own, device))
        _derive(ctx.began, adjoints)
        found = iter(move_all(adjoints, cotangents))
        dxs: list[torch.Tensor | None] = []
        sources: Iterator[_Source] = iter(ctx.sources)
        for op in ctx.ops:
            if op.recorded and op.derivatives.gradient:
                dxs += [next(sources).like(dx) for dx in next(found)]
            else:
                dxs += [None for _ in islice(sources, len(op.inputs))]
        return None, _anchored(ctx.needs_input_grad[1], device), *dxs

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [source.tangent(tangent) for tangent, source in zip(tangents[2:], ctx.sources, strict=True)]
        grouped = zip(ctx.ops, _grouped(given, [len(op.inputs) for op in ctx.ops]), strict=True)
        ops, xs = zip(*[(_tangent_map(op), own) for op, own in grouped if op.recorded], strict=True)
        _derive(ctx.began, ops)
        found = iter(move_all(ops, xs))
        ys: list[torch.Tensor | None] = []
        for op in ctx.ops:
            ys += next(found) if op.recorded else [None] * len(op.outputs)
        return tuple(ys)


class Stay(Function):
    """The identity, which saves a tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(anchor)
        alias: torch.Tensor = torch.ops.aten.alias(x)  # view_as would change the strides of dims of extent 1
        return alias

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (anchor,) = ctx.saved_tensors
        return dy, torch.zeros_like(anchor)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, anchor: torch.Tensor | None) -> torch.Tensor:
        return tangent


class _Source(NamedTuple):
    """What derivatives need to know of a tensor that has moved.

    Attributes:
        began: the history of the group when the exchange began. A derivative of the exchange names it by that.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    began: int

    def like(self, dx: torch.Tensor) -> torch.Tensor:
        """A gradient in the dtype of its source."""
        return dx if dx.dtype is self.dtype else dx.to(self.dtype)

    def tangent(self, given: torch.Tensor | None) -> torch.Tensor:
        """The tangent of the source; zeros if it has none."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device) if given is None else given


def _adds_parts(op: Movable) -> bool:
    # a single worker has the whole sum, and its whole gradient
    return op.plan.pattern is not Pattern.SUM and op.comm.size > 1


def _derive(began: dict[Calls, int], operators: Sequence[Movable]) -> None:
    """Note that the next exchanges are derivatives, once in each group of workers."""
    for calls in {op.calls: None for op in operators}:
        calls.derive(began[calls])


def _adjoint(op: Movable) -> Movable:
    """The operator that moves a gradient back. It is recorded if this backward is itself differentiated."""
    mode, forward_mode = torch.is_grad_enabled(), is_differentiated_forward()
    if mode or forward_mode:
        return op.T.deriving(Derivatives(mode, forward_mode, mode and forward_mode))
    return op.unrecorded_adjoint


def _tangent_map(op: Movable) -> Movable:
    return op.deriving(Derivatives(op.derivatives.tangent_gradient))


def _anchored(needed: bool, device: torch.device) -> torch.Tensor | None:
    """The gradient of the anchor."""
    return torch.zeros(0, device=device) if needed else None


def _grouped(flat: Sequence[Any], counts: Sequence[int]) -> list[Tensors]:
    """A flat sequence as tuples of these lengths."""
    if len(counts) == 1:
        return [tuple(flat)]
    rest = iter(flat)
    return [tuple(islice(rest, count)) for count in counts]


def _execute(operators: Sequence[Movable], flat: Sequence[torch.Tensor]) -> Tensors:
    arguments = _grouped(flat, [len(op.inputs) for op in operators])
    ys = execute_together(operators, [op.packed(xs) for op, xs in zip(operators, arguments, strict=True)])
    return tuple([part for op, y in zip(operators, ys, strict=True) for part in op.unpacked(y)])


def execute_together(operators: Sequence[Movable], xs: Sequence[torch.Tensor]) -> Tensors:
    """Do this worker's part of several plans at once, without recording it."""
    if torch._C._autograd._profiler_enabled():
        with record_function(str(operators[0].label)):
            return _execute_together(operators, xs)
    return _execute_together(operators, xs)


def _execute_together(operators: Sequence[Movable], xs: Sequence[torch.Tensor]) -> Tensors:
    with unobserved():
        begun = [op.begin(x) for op, x in zip(operators, xs, strict=True)]
        for _, pending in begun:
            pending.wait()
    return tuple([y for y, _ in begun])
