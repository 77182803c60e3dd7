"""Operator: a plan together with the workers that execute it. ``y = op(x)``, and ``op.T`` is the adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch

from distdl.environment.arguments import built, checks_arguments, known
from distdl.exchange import watching
from distdl.exchange.nodes import Apply, ApplyPacked, Stay, anchor_beside, are_bare, execute_together
from distdl.exchange.packing import Packing, Tensors
from distdl.exchange.transfer import Transfer
from distdl.geometry.boxes import Shape, whole
from distdl.plan import Move, Plan
from distdl.tensors.derivatives import NONE, Derivatives, has_tangent, is_checkpointed
from distdl.tensors.dtypes import carries_gradients
from distdl.tensors.function import TransformError
from distdl.tensors.memory import is_channels_last, readable
from distdl.tensors.modes import unobserved
from distdl.tensors.recorders import here
from distdl.transport.calls import LARGEST, LAST_TAG, Begun
from distdl.transport.communicator import Communicator, Group, Pending, check_group
from distdl.transport.label import Label

_TRANSFERS_KEPT = 8


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
        lends: only one function of torch's sees y. So nobody else reads the memory of the gradient of y, and the
            adjoint may make the gradient of x in it.
        reuses: whether the result may lie in the memory of x, as in the adjoint of an operator that lends.
    Attributes:
        recorded: whether the movement is recorded for differentiation, on every member.
        calls: what the members have exchanged so far.
    """

    @checks_arguments
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
        check_group(members, comm.size, "an Operator")
        self.plan, self.comm, self.members, self.label = plan, comm, members, label
        self.dtype, self.derivatives = dtype, derivatives
        self.inputs, self.outputs = tuple(map(tuple, inputs)), tuple(map(tuple, outputs))
        self.keeps_format, self.still = keeps_format, still
        self.lends, self.reuses = lends, reuses
        self.recorded = (derivatives.gradient or derivatives.tangent) and carries_gradients(dtype)
        watching.begin(comm)
        self.calls, self._mark = comm.calls(members), label.mark
        self._here = Begun(members, self.calls, label)
        self._taken = Packing(self.inputs, plan.inputs.get(comm.rank))
        self._made = Packing(self.outputs, plan.outputs.get(comm.rank))
        self._plain = self._taken.plain and self._made.plain
        self._transfers: dict[Any, Transfer] = {}
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
        plan = known(Plan, own, own, (Move.known(comm.rank, whole(vector), comm.rank, whole(vector)),))
        return built(cls, plan, comm, members, label, dtype, derivatives, shapes, shapes, still=True)

    @cached_property
    def T(self) -> Operator:
        """The adjoint."""
        transposed = built(
            Operator, self.plan.T, self.comm, self.members, self.label, self.dtype, self.derivatives, self.outputs,
            self.inputs, self.keeps_format, self.still, self.reuses, self.lends,
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
        other = built(
            Operator, self.plan, self.comm, self.members, self.label, self.dtype, derivatives, self.inputs,
            self.outputs, self.keeps_format, self.still, self.lends, self.reuses,
        )  # fmt: skip
        if not self.reuses or other.recorded == self.recorded:
            other._transfers = self._transfers
        return other

    def __call__(self, *xs: torch.Tensor) -> Any:
        """This worker's result: a tensor, or a tuple of as many as there are ``outputs``."""
        if self.still:
            return self._stay(xs)
        if self._plain:
            return self.move(xs[0])
        ys = self.move_packed(xs)
        return ys[0] if len(ys) == 1 else ys

    def move(self, x: torch.Tensor) -> torch.Tensor:
        """The result of an operator that moves one tensor as it is."""
        if not self.recorded:
            return self.execute(x.detach())
        derivatives = self.derivatives
        bare = (derivatives.gradient and not x.requires_grad) or (derivatives.tangent and not has_tangent(x))
        anchor = anchor_beside(x, derivatives) if bare else None
        y: torch.Tensor = Apply.apply(self, anchor, x)
        return y

    def move_packed(self, xs: Tensors) -> Tensors:
        """The results of an operator that moves several tensors as one."""
        if not self.recorded:
            return self._made.unpack(self.execute(self._taken.pack(xs).detach()))
        derivatives = self.derivatives
        anchor = anchor_beside(xs[0], derivatives) if are_bare(xs, derivatives) else None
        ys: Tensors = ApplyPacked.apply(self, anchor, *xs)
        return ys

    def _stay(self, xs: Tensors) -> Any:
        """The tensors as they are. Inside an activation checkpoint that is recorded all the same, on every member.

        A checkpoint recomputes its forward only up to the last saved tensor. So every member saves something behind the
        layer's agreement, or some would agree again and wait for others that do not.
        """
        if is_checkpointed() and self.derivatives.gradient and carries_gradients(self.dtype):
            anchor = torch.empty(0, device=xs[0].device, requires_grad=True)
            # a tensor without elements may be of a dtype that carries no gradient
            x = xs[0] if carries_gradients(xs[0].dtype) else xs[0].to(self.dtype)
            xs = (Stay.apply(x, anchor), *xs[1:])
        return xs[0] if len(xs) == 1 else xs

    def execute(self, x: torch.Tensor) -> torch.Tensor:
        """Do this worker's part of the plan, without recording it."""
        if torch._C._autograd._profiler_enabled():
            return execute_together((self,), (x,))[0]
        with unobserved():
            y, pending = self.begin(x)
            pending.wait()
        return y

    def begin(self, x: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Begin to execute the plan. The result is there after the wait.

        Raises: TransformError inside a transform of ``torch.func``.
        """
        if here.recorder is not None:
            begun: tuple[torch.Tensor, Pending] = here.recorder.begin(self.begin, (x,))
            return begun
        if torch._C._are_functorch_transforms_active():
            raise TransformError
        if type(x) is not torch.Tensor or x.is_conj() or x.is_neg() or x._is_zerotensor():
            x = readable(x)  # transports read memory
        layout = x.shape, x.stride(), x.is_cpu, x.dtype
        transfer = self._transfers.get(layout) or self._transfer(layout, x)
        comm = self.comm
        if comm.waiting is not None:
            comm.refuse_thread(self.label)
        comm.where = self._here
        if comm.watch is not None:
            comm.watch(self.label, self.members, self.dtype)
        # counts the exchange as :meth:`count` does; a call of a method would cost as much again
        calls = self.calls
        calls.number += 1
        calls.log.append(self.label)
        calls.history = history = (calls.history ^ self._mark) * 5 & LARGEST
        return transfer.begin(x, history & LAST_TAG)

    def count(self) -> None:
        """Count an exchange of this operator whose messages others have sent, where this worker waits for them."""
        comm, calls = self.comm, self.calls
        comm.where = self._here
        calls.number += 1
        calls.log.append(self.label)
        calls.history = (calls.history ^ self._mark) * 5 & LARGEST

    def packed(self, xs: Tensors) -> torch.Tensor:
        """Several tensors as the one that :meth:`begin` takes."""
        return self._taken.pack(xs)

    def unpacked(self, y: torch.Tensor) -> Tensors:
        """The results of which the one from :meth:`begin` is made, once it is there: views of it."""
        return self._made.unpack(y)

    @property
    def history(self) -> int:
        """What the group has exchanged so far, as a number (see :class:`distdl.transport.calls.Calls`)."""
        return self.calls.history

    def pass_by(self) -> int:
        """Count a node in whose backward alone this operator moves something. Returns what its :meth:`derive` takes."""
        return self.calls.pass_by()

    def derive(self, began: int) -> None:
        """Note that the next exchange is a derivative of the one that began at this history."""
        self.calls.derive(began)

    def _transfer(self, layout: Any, x: torch.Tensor) -> Transfer:
        self._check_reads(x)
        shape = self.plan.outputs.get(self.comm.rank)
        channels_last = self.keeps_format and shape is not None and len(shape) == x.dim() and is_channels_last(x)
        if len(self._transfers) == _TRANSFERS_KEPT:
            self._transfers.clear()
        transfer = self._transfers[layout] = Transfer(
            self.comm, self.plan.pattern, self.plan.schedule(self.comm.rank), x, self._made.shape, shape is None,
            self.dtype, channels_last, self.reuses and not self.recorded,
        )  # fmt: skip
        return transfer

    def _check_reads(self, x: torch.Tensor) -> None:
        """Check that x is what the plan reads: back-ends would read its memory as if it were.

        Raises: ValueError, on this worker, if it is not.
        """
        planned = self.plan.inputs.get(self.comm.rank)
        if planned is None or not (x.numel() or prod(planned)):
            return
        if tuple(x.shape) != tuple(planned) or x.dtype is not self.dtype:
            raise ValueError(
                f"{self.label} moves a tensor of the shape {list(planned)}, {self.dtype}, from worker "
                f"{self.comm.rank}, which has one of the shape {list(x.shape)}, {x.dtype}"
            )

    def filled(self, xs: Sequence[torch.Tensor | None], device: torch.device) -> Tensors:
        """The tensors to pass: zeros where this worker has none to give."""
        pairs = zip(xs, self.inputs, strict=True)
        return tuple([torch.zeros(shape, dtype=self.dtype, device=device) if x is None else x for x, shape in pairs])

    def __repr__(self) -> str:
        return f"{self.label}: {self.plan!r}"
