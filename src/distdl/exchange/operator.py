"""Operator: a plan together with the workers that execute it. ``y = op(x)``, and ``op.T`` is the adjoint.

Every member of an operator records the same autograd node, so that each also takes part in its backward: a worker whose
own tensor needs no gradient is tied in through an *anchor*, a tensor of zero volume that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, reduce
from itertools import islice
from math import prod
from operator import or_
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.profiler import record_function

from distdl.exchange import watching
from distdl.exchange.packing import Packing, Tensors
from distdl.exchange.program import Program
from distdl.geometry.boxes import Shape, whole
from distdl.plan import Move, Plan
from distdl.tensors.derivatives import NONE, Derivatives, has_tangent, is_checkpointed, is_differentiated_forward
from distdl.tensors.dtypes import carries_gradients
from distdl.tensors.function import Function
from distdl.tensors.memory import is_channels_last, readable
from distdl.transport.calls import LARGEST, LAST_TAG, Begun, Calls
from distdl.transport.communicator import Communicator, Group, Pending
from distdl.transport.label import Label

_PROGRAMS_KEPT = 8
_new = tuple.__new__  # (that of a NamedTuple takes twice as long)


class Operator:
    """A plan that can be called.

    ``y = op(x)`` does this worker's part; every member calls it. Neither x nor anything that shares its memory is
    written or returned, except by an identity operator, which returns x itself.

    Where ``inputs`` or ``outputs`` have several shapes, ``op(x, w)`` takes or returns several tensors: they move packed
    as one vector, which has the shape that the plan gives this worker.

    Args:
        plan: what moves.
        comm, members: who executes the plan: every one of the members.
        label: the layer that moves, for people; its mark tells its messages from those of another layer.
        dtype: the dtype that moves, as agreed.
        derivatives: what the tensors carry on any member.
        inputs, outputs: shapes of this worker's tensors, in elements. Where the plan has none for this worker, they are
            those of the tensors of zero volume that stand in.
        keeps_format: y is channels_last where x is. Otherwise it is contiguous.
        still: nothing moves. Then the operator is the identity.
        lends: one function of torch's sees y, and nobody else; so the gradient of y is memory that nobody else reads,
            and the adjoint may make that of x in it.
        reuses: whether the result may lie in the memory of x: the adjoint of what lends.
    Attributes:
        recorded: whether the movement is recorded for differentiation, on every member.
    """

    def __init__(
        self,
        plan: Plan,
        comm: Communicator,
        members: Group,
        label: Label,
        dtype: torch.dtype,
        derivatives: Derivatives,
        inputs: Sequence[Shape],
        outputs: Sequence[Shape],
        keeps_format: bool = False,
        still: bool = False,
        lends: bool = False,
        reuses: bool = False,
    ) -> None:
        self.plan, self.comm, self.members, self.label = plan, comm, members, label
        self.dtype, self.derivatives = dtype, derivatives
        self.inputs, self.outputs = tuple(map(tuple, inputs)), tuple(map(tuple, outputs))
        self.keeps_format, self.still = keeps_format, still
        self.lends, self.reuses = lends, reuses
        self.recorded = (derivatives.gradient or derivatives.tangent) and carries_gradients(dtype)
        watching.begin(comm)
        self._calls, self._mark = comm.calls(members), label.mark
        self._here = Begun(members, self._calls, label)
        self._taken = Packing(self.inputs, plan.inputs.get(comm.rank))
        self._made = Packing(self.outputs, plan.outputs.get(comm.rank))
        self._plain = self._taken.plain and self._made.plain
        self._programs: dict[Any, Program] = {}
        self._others: dict[Derivatives, Operator] = {derivatives: self}

    @classmethod
    def identity(
        cls,
        comm: Communicator,
        members: Group,
        label: Label,
        dtype: torch.dtype,
        derivatives: Derivatives,
        shapes: Sequence[Shape],
    ) -> Operator:
        """The operator where nothing moves. It returns its tensors as they are."""
        vector = shapes[0] if len(shapes) == 1 else (sum(map(prod, shapes)),)
        own = {comm.rank: vector}
        plan = Plan(own, own, (Move(comm.rank, whole(vector), comm.rank, whole(vector)),))
        return cls(plan, comm, members, label, dtype, derivatives, shapes, shapes, still=True)

    @cached_property
    def T(self) -> Operator:
        """The adjoint."""
        transposed = Operator(
            self.plan.T, self.comm, self.members, self.label, self.dtype, self.derivatives, self.outputs, self.inputs,
            self.keeps_format, self.still, self.reuses, self.lends,
        )  # fmt: skip
        transposed.__dict__["T"] = self
        return transposed

    @cached_property
    def unrecorded_adjoint(self) -> Operator:
        """The adjoint, of which nothing is recorded."""
        return self.T.deriving(NONE)

    def deriving(self, derivatives: Derivatives) -> Operator:
        """The same operator for tensors that carry other derivatives."""
        other = self._others.get(derivatives)
        if other is None:
            other = self._others[derivatives] = self._like(derivatives)
            other._others = self._others
        return other

    def _like(self, derivatives: Derivatives) -> Operator:
        other = Operator(
            self.plan, self.comm, self.members, self.label, self.dtype, derivatives, self.inputs, self.outputs,
            self.keeps_format, self.still, self.lends, self.reuses,
        )  # fmt: skip
        if not self.reuses or other.recorded == self.recorded:
            other._programs = self._programs
        return other

    def __call__(self, *xs: torch.Tensor) -> Any:
        """This worker's result: a tensor, or a tuple of as many as there are ``outputs``."""
        if self.still:
            return self._stay(xs)
        if self._plain:
            return self._move(xs[0])
        ys = self._move_packed(xs)
        return ys[0] if len(ys) == 1 else ys

    def _move(self, x: torch.Tensor) -> torch.Tensor:
        if not self.recorded:
            return self.execute(x.detach())
        derivatives = self.derivatives
        bare = (derivatives.gradient and not x.requires_grad) or (derivatives.tangent and not has_tangent(x))
        anchor = _anchor(x, derivatives) if bare else None
        y: torch.Tensor = _Apply.apply(self, anchor, x)
        return y

    def _move_packed(self, xs: Tensors) -> Tensors:
        if not self.recorded:
            return self._made.unpack(self.execute(self._taken.pack(xs).detach()))
        derivatives = self.derivatives
        anchor = _anchor(xs[0], derivatives) if _are_bare(xs, derivatives) else None
        ys: Tensors = _ApplyPacked.apply(self, anchor, *xs)
        return ys

    def _stay(self, xs: Tensors) -> Any:
        """The tensors as they are. Inside an activation checkpoint that is recorded all the same, on every member.

        A checkpoint recomputes its forward only up to the last saved tensor. So every member saves something behind the
        layer's agreement, or some would agree again and wait for others that do not.
        """
        if is_checkpointed() and self.derivatives.gradient and carries_gradients(self.dtype):
            anchor = torch.empty(0, device=xs[0].device, requires_grad=True)
            # (without elements, a tensor may be of any dtype)
            x = xs[0] if carries_gradients(xs[0].dtype) else xs[0].to(self.dtype)
            xs = (_Stay.apply(x, anchor), *xs[1:])
        return xs[0] if len(xs) == 1 else xs

    def execute(self, x: torch.Tensor) -> torch.Tensor:
        """Do this worker's part of the plan, without recording it."""
        if torch._C._autograd._profiler_enabled():
            return execute_together((self,), (x,))[0]
        y, pending = self.begin(x)
        pending.wait()
        return y

    def begin(self, x: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Begin to execute the plan. The result is there after the wait."""
        if type(x) is not torch.Tensor or x.is_conj() or x.is_neg() or x._is_zerotensor():
            x = readable(x)  # transports read memory
        layout = x.shape, x.stride(), x.is_cpu
        program = self._programs.get(layout) or self._program(layout, x)
        comm = self.comm
        comm.where = self._here
        if comm.watch is not None:
            comm.watch(self.label, self.members, self.dtype)
        calls = self._calls  # (all of this at once: a method would cost each call as much again)
        calls.number += 1
        calls.log.append(self.label)
        calls.history = history = (calls.history ^ self._mark) * 5 & LARGEST
        return program.begin(x, history & LAST_TAG)

    def packed(self, xs: Tensors) -> torch.Tensor:
        """Several tensors as the one that :meth:`begin` takes."""
        return self._taken.pack(xs)

    def unpacked(self, y: torch.Tensor) -> Tensors:
        """The results of which the one from :meth:`begin` is made, once it is there: views of it."""
        return self._made.unpack(y)

    @property
    def history(self) -> int:
        """What the group has exchanged so far, as a number (see :class:`distdl.transport.calls.Calls`)."""
        return self._calls.history

    def pass_by(self) -> int:
        """Count a node in whose backward alone this operator moves something. Returns what its :meth:`derive` takes."""
        return self._calls.pass_by()

    def derive(self, began: int) -> None:
        """Note that the next exchange is a derivative of the one that began at this history."""
        self._calls.derive(began)

    def _program(self, layout: Any, x: torch.Tensor) -> Program:
        shape = self.plan.outputs.get(self.comm.rank)
        channels_last = self.keeps_format and shape is not None and len(shape) == x.dim() and is_channels_last(x)
        if len(self._programs) == _PROGRAMS_KEPT:
            self._programs.clear()
        program = self._programs[layout] = Program(
            self.comm, self.plan.pattern, self.plan.schedule(self.comm.rank), x, self._made.shape, shape is None,
            self.dtype, channels_last, self.reuses and not self.recorded,
        )  # fmt: skip
        return program

    def filled(self, xs: Sequence[torch.Tensor | None], device: torch.device) -> Tensors:
        """The tensors to pass: zeros where this worker has none to give."""
        pairs = zip(xs, self.inputs, strict=True)
        return tuple([torch.zeros(shape, dtype=self.dtype, device=device) if x is None else x for x, shape in pairs])

    def __repr__(self) -> str:
        return f"{self.label}: {self.plan!r}"


def move_together(operators: Sequence[Operator], arguments: Sequence[Tensors]) -> list[Any]:
    """Call several operators at once: their messages are under way at the same time, in one autograd node.

    Every member passes the same operators in the same order. They may differ in their members.

    Args:
        arguments: the tensors of each operator.
    Returns: the result of each.
    """
    moving = [place for place, op in enumerate(operators) if not op.still]
    if len(moving) < 2:
        return [op(*xs) for op, xs in zip(operators, arguments, strict=True)]
    moved = _move_all(tuple(operators[place] for place in moving), [arguments[place] for place in moving])
    found = dict(zip(moving, moved, strict=True))
    results = []
    for place, (op, xs) in enumerate(zip(operators, arguments, strict=True)):
        if op.still:
            results.append(op(*xs))
        else:
            results.append(found[place][0] if len(op.outputs) == 1 else found[place])
    return results


def _move_all(operators: Sequence[Operator], arguments: Sequence[Tensors]) -> list[Tensors]:
    flat = [x for xs in arguments for x in xs]
    noted = [op.derivatives for op in operators if op.recorded]
    if not noted:
        ys: Tensors = _execute(operators, [x.detach() for x in flat])
    else:
        derivatives = reduce(or_, noted)
        anchor = _anchor(flat[0], derivatives) if _are_bare(flat, derivatives) else None
        ys = _ApplyTogether.apply(operators, anchor, *flat)
    return _grouped(ys, [len(op.outputs) for op in operators])


def _are_bare(xs: Sequence[torch.Tensor], derivatives: Derivatives) -> bool:
    """Whether none of the tensors carries what any member's do."""
    return (derivatives.gradient and not any(x.requires_grad for x in xs)) or (
        derivatives.tangent and not any(map(has_tangent, xs))
    )


def _anchor(beside: torch.Tensor, derivatives: Derivatives) -> torch.Tensor:
    anchor = torch.empty(0, device=beside.device, requires_grad=derivatives.gradient)
    return forward_ad.make_dual(anchor, torch.empty(0, device=beside.device)) if derivatives.tangent else anchor


class _Apply(Function):
    """``y = op(x)``. Its backward is ``op.T``, its tangent map the operator itself."""

    @staticmethod
    def forward(ctx: Any, op: Operator, anchor: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        ctx.op, ctx.source = op, _new(_Source, (x.shape, x.dtype, x.device, op._calls.history))
        ctx.save_for_backward(_NOTHING)  # so that checkpointing recomputes this node, on every member alike
        ctx.set_materialize_grads(False)
        return op.execute(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # before any message: this is where a checkpoint recomputes its forward
        op, source, dx = ctx.op, ctx.source, None
        if op.derivatives.gradient:
            adjoint = _adjoint(op)
            calls, began = op._calls, source.began
            calls.log.append(began)  # (``calls.derive``, at once)
            calls.history ^= began
            dx = source.like(adjoint._move(adjoint.filled((dy,), source.device)[0] if dy is None else dy))
        return None, _anchored(ctx.needs_input_grad[1], source.device), dx

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        op: Operator = ctx.op
        op._calls.derive(ctx.source.began)
        return _tangent_map(op)._move(ctx.source.tangent(tangents[2]))


class _ApplyPacked(Function):
    """The same for several tensors, which move as one."""

    @staticmethod
    def forward(ctx: Any, op: Operator, anchor: torch.Tensor | None, *xs: torch.Tensor) -> Tensors:
        began = op._calls.history
        ctx.op, ctx.sources = op, [_Source(x.shape, x.dtype, x.device, began) for x in xs]
        ctx.save_for_backward(_NOTHING)
        ctx.set_materialize_grads(False)
        return op._made.unpack(op.execute(op._taken.pack(xs)))

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        op, sources = ctx.op, ctx.sources
        if not op.derivatives.gradient:
            return None, None, *(None for _ in sources)
        device, adjoint = sources[0].device, _adjoint(op)
        op._calls.derive(sources[0].began)
        dxs = adjoint._move_packed(adjoint.filled(dys, device))
        return None, _anchored(ctx.needs_input_grad[1], device), *map(_Source.like, sources, dxs)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Tensors:
        ctx.op._calls.derive(ctx.sources[0].began)
        return _tangent_map(ctx.op)._move_packed(tuple(map(_Source.tangent, ctx.sources, tangents[2:])))


class _ApplyTogether(Function):
    """The same for several operators. Those of which nothing is recorded move, too."""

    @staticmethod
    def forward(ctx: Any, ops: Sequence[Operator], anchor: torch.Tensor | None, *xs: torch.Tensor) -> Tensors:
        ctx.ops, ctx.began = ops, {op._calls: op._calls.history for op in ops}
        moved = zip(ops, _grouped(xs, [len(op.inputs) for op in ops]), strict=True)
        ctx.sources = [_Source(x.shape, x.dtype, x.device, ctx.began[op._calls]) for op, own in moved for x in own]
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
        found = iter(_move_all(adjoints, cotangents))
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
        found = iter(_move_all(ops, xs))
        ys: list[torch.Tensor | None] = []
        for op in ctx.ops:
            ys += next(found) if op.recorded else [None] * len(op.outputs)
        return tuple(ys)


class _Stay(Function):
    """The identity, which saves a tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(anchor)
        alias: torch.Tensor = torch.ops.aten.alias(x)  # (view_as changes the strides of dims of extent 1)
        return alias

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (anchor,) = ctx.saved_tensors
        return dy, torch.zeros_like(anchor)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, anchor: torch.Tensor | None) -> torch.Tensor:
        return tangent


class _Source(NamedTuple):
    """What is to be known of a tensor that has moved, for its derivatives.

    Attributes:
        began: the history of the group when the exchange began: so its derivatives say of which one they are.
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


def _derive(began: dict[Calls, int], operators: Sequence[Operator]) -> None:
    """Note that the next exchanges are derivatives, once in each group of workers."""
    for calls in {op._calls: None for op in operators}:
        calls.derive(began[calls])


def _adjoint(op: Operator) -> Operator:
    """How the gradient of what has moved moves back: recorded if this backward is itself differentiated."""
    mode, forward_mode = torch.is_grad_enabled(), is_differentiated_forward()
    if mode or forward_mode:
        return op.T.deriving(Derivatives(mode, forward_mode, mode and forward_mode))
    return op.unrecorded_adjoint


def _tangent_map(op: Operator) -> Operator:
    return op.deriving(Derivatives(op.derivatives.tangent_gradient))


def _anchored(needed: bool, device: torch.device) -> torch.Tensor | None:
    """The gradient of the anchor."""
    return torch.zeros(0, device=device) if needed else None


def _grouped(flat: Sequence[Any], counts: Sequence[int]) -> list[Tensors]:
    """The same, with as many at a time in a tuple as counted."""
    if len(counts) == 1:
        return [tuple(flat)]
    rest = iter(flat)
    return [tuple(next(rest) for _ in range(count)) for count in counts]


def _execute(operators: Sequence[Operator], flat: Sequence[torch.Tensor]) -> Tensors:
    arguments = _grouped(flat, [len(op.inputs) for op in operators])
    ys = execute_together(operators, [op._taken.pack(xs) for op, xs in zip(operators, arguments, strict=True)])
    return tuple(part for op, y in zip(operators, ys, strict=True) for part in op._made.unpack(y))


def execute_together(operators: Sequence[Operator], xs: Sequence[torch.Tensor]) -> Tensors:
    """Do this worker's part of several plans at once, without recording it."""
    if torch._C._autograd._profiler_enabled():
        with record_function(str(operators[0].label)):
            return _execute_together(operators, xs)
    return _execute_together(operators, xs)


def _execute_together(operators: Sequence[Operator], xs: Sequence[torch.Tensor]) -> Tensors:
    begun = [op.begin(x) for op, x in zip(operators, xs, strict=True)]
    for _, pending in begun:
        pending.wait()
    return tuple(y for y, _ in begun)


_NOTHING = torch.empty(0)
