r"""Entering: a tensor that every worker has whole becomes each worker's own copy, and parts of its gradient add up.

A plain tensor beside a global one is one variable, equal on all workers. Each worker computes with its own copy, so
each gets a part of the gradient; the gradient of the variable is the sum of the parts:

.. math:: w_t = w, \qquad \partial w = \sum_t \partial w_t

*Entering* is the first map, and *leaving* the second, its adjoint. Each is the adjoint of the other, so entering moves
nothing, and its backward is one all-sum of all tensors that entered together, packed as one message.

Where there are several messages, tensors enter in two nodes. Autograd runs the nodes of a backward in the opposite
order of that in which the forward made them, so a message is under way while the nodes between run::

    w ----- enter -----> ... the forward goes on ... ----- use -----> copies, just before the first of them is read

    dw <-- wait, add --- ... the backward goes on ... <-- send ------ parts, once all of them are there

Workers may send at different places of their backwards, as one may have read a weight before the others did. So each
message has a tag of its own that no exchange in between can have. It is counted among the exchanges where it is waited
for, and all workers wait in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from distdl.exchange import Operator
from distdl.exchange.packing import Packing
from distdl.globals.layouts.context import Context
from distdl.globals.tensor.observers import BITS, Compared
from distdl.plan.planning import all_sum
from distdl.tensors.constants import Constant
from distdl.tensors.derivatives import NONE, is_checkpointed
from distdl.tensors.function import Function
from distdl.tensors.memory import as_dense, empty, readable
from distdl.tensors.private_torch import current_graph_task_id, profiler_enabled
from distdl.tensors.recorders import as_one_call, here
from distdl.transport import Label
from distdl.transport.calls import LAST_TAG
from distdl.transport.communicator import Pending

_SUM = "gradients of replicated tensors"
_AHEAD = 64 << 20  # bytes of sums that are under way at most, before anybody waits for them


class Which(NamedTuple):
    """Which parameters of a model enter together.

    Attributes:
        places: the numbers of these parameters among all of the model, in growing order.
        path: of the smallest module that has all of them.
    """

    places: tuple[int, ...] = ()
    path: str = ""


_NO_PARAMETERS = Which()


def enter(
    context: Context,
    tensors: Sequence[torch.Tensor],
    compared: Compared | None = None,
    which: Which = _NO_PARAMETERS,
    recomputed: bool = True,
) -> tuple[torch.Tensor, ...]:
    """This worker's own copies of plain tensors of one dtype, whose gradients travel as one message.

    Args:
        compared: its bits go with the gradients.
        which: which parameters of a model they are, if they are some. Where workers differ in that (as one does that
            has frozen another layer), their messages never meet.
        recomputed: whether a checkpoint around this call makes the copies again.
    """
    if len(context.everyone) == 1:
        return tuple(tensors)
    total = _Sum.of(context, tensors, compared, which)
    way = _Way(total, compared, tensors[0].device)
    way.recomputed = recomputed
    copies: tuple[torch.Tensor, ...] = _Enter.apply(way, *tensors)
    return copies


def leave(
    context: Context, tensors: Sequence[torch.Tensor], parts: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """The sums over all workers of parts of gradients by tensors of one dtype; None where no worker has a part."""
    totals: tuple[torch.Tensor | None, ...] = _Leave.apply(_Sum.of(context, tensors), None, tensors[0].device, *parts)
    return totals


def enter_apart(
    context: Context, buckets: Sequence[tuple[Sequence[torch.Tensor], Which]], compared: Compared | None
) -> list[Callable[[], tuple[torch.Tensor, ...]]]:
    """Let buckets of parameters enter, each with a message of its own for its gradients.

    The gradients of a bucket travel while the backward goes on from the place where its copies are used to this one.

    Args:
        buckets: parameters of one dtype, and which these are.
        compared: its bits go with each message, as a backward may come to any bucket, and to no other.
    Returns: for each bucket, a function that gives this worker's own copies. It is called once.
    """
    ways = [_Way(_Sum.of(context, tensors, compared, which), compared, tensors[0].device) for tensors, which in buckets]
    # On a GPU, sending early would wait for the device. The debugging mode sends nothing before all have said what.
    if all(way.device.type in ("cpu", "meta") for way in ways) and context.comm.watch is None:
        first = ways[0].began  # with all labels: messages of workers that differ in one never meet
        for way in ways:
            first = (first ^ way.total.operator.label.mark) * 5
        for place, way in enumerate(ways):
            way.tag = LAST_TAG + 1 + ((first + place) & LAST_TAG)
            if here.recorder is not None:
                way.later = LAST_TAG + 1 + (here.recorder.reserve() & LAST_TAG)
    return [partial(_use, way, _Enter.apply(way, *tensors)) for way, (tensors, _) in zip(ways, buckets, strict=True)]


def _use(way: _Way, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        copies: tuple[torch.Tensor, ...] = _Use.apply(way, *tensors)
    return copies


def settle(context: Context) -> None:
    """Wait for the messages of backwards that have failed on every worker, which nobody else waits for.

    Inside of a backward nothing is done: the messages may be that backward's.
    """
    if current_graph_task_id() == -1:
        # all workers wait for messages of two rounds in one order, wherever each worker has sent them
        under_way = context.own(UnderWay)
        for begun in sorted(under_way.values(), key=lambda begun: begun.tag):
            context.comm.where = begun.label
            begun.pending.wait()
        under_way.clear()


class _Sum:
    """The sum of tensors over all workers, as one message."""

    def __init__(
        self,
        context: Context,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        bits: int,
        which: Which,
    ) -> None:
        # behind the tensors goes how many workers have a gradient of each: None stays None if no worker has one
        structure = (*map(tuple, shapes), (len(shapes),), (bits,))
        count = sum(map(prod, structure))
        plan = all_sum(context.world, [0], dict.fromkeys(context.everyone, (count,)), context.me)
        self.context, self.shapes = context, structure[:-2]
        self._packing = Packing(structure, (count,))
        self._all_owned = Constant(torch.ones(len(shapes), dtype=dtype, device="cpu"))
        self._bits = bits
        # the label tells messages apart, as some transports end the process where messages of two lengths meet
        named = f"parameters {_listed(which.places)} of the model" if which.places else f"{len(shapes)}"
        label = Label(f"{_SUM} ({named}; {count} elements)", detail=(structure, dtype, which.places))
        label.path = which.path
        self.operator = Operator(plan, context.comm, context.everyone, label, dtype, NONE, [(count,)], [(count,)])

    @classmethod
    def of(
        cls,
        context: Context,
        tensors: Sequence[torch.Tensor],
        compared: Compared | None = None,
        which: Which = _NO_PARAMETERS,
    ) -> _Sum:
        shapes, dtype = tuple(tensor.shape for tensor in tensors), tensors[0].dtype
        # bits of more workers than the dtype can count cannot be added up
        many = len(context.everyone) > 2 / torch.finfo(dtype).eps
        bits = 0 if compared is None or many else BITS
        key = (shapes, dtype, bits, which)
        return context.keep((cls, *key), lambda: cls(context, *key))

    def __call__(
        self, parts: Sequence[torch.Tensor | None], device: torch.device, compared: Compared | None = None
    ) -> list[torch.Tensor | None]:
        return self.totals(self.operator.execute(self.packed(parts, device, compared)), compared, parts)

    def send(
        self,
        parts: Sequence[torch.Tensor | None],
        device: torch.device,
        compared: Compared | None,
        tag: int,
        later: int,
    ) -> Begun:
        """Begin to add up, by messages between pairs: collectives of a transport would have to begin in one order.

        Args:
            tag: of the messages.
            later: their tag in replays, if a step is recorded now.
        """
        x = self.packed(parts, device, compared)
        recorder = here.recorder
        begun = self._begin(x, tag) if recorder is None else recorder.begin(self._begin, (x, tag), (x, later))
        y, pending = begun
        return Begun(y, pending, tag, self.operator.label)

    def _begin(self, x: torch.Tensor, tag: int) -> tuple[torch.Tensor, Pending]:
        comm, group = self.context.comm, self.context.everyone
        if comm.waiting is not None:
            comm.refuse_thread(self.operator.label)
        comm.where = self.operator.label
        x = x if x.is_meta else readable(x)
        y = empty(x.shape, x.dtype, x)
        with _profiled(self.operator.label):
            # two workers send each other all of it in one round: of two rounds, only the first would travel meanwhile
            pending = comm.through.all_sum_by_messages(group, x, y, tag, len(group) == 2)
        return y, Pending(partial(self._finish, pending))

    def _finish(self, pending: Pending) -> None:
        """Wait for a sum that was begun, which is counted as an exchange here."""
        self.operator.count()
        with _profiled(self.operator.label):
            pending.wait()

    def wait(self, begun: Begun) -> torch.Tensor:
        """The sum that was begun."""
        begun.pending.wait()
        return begun.moved

    def packed(
        self, parts: Sequence[torch.Tensor | None], device: torch.device, compared: Compared | None
    ) -> torch.Tensor:
        """The buffer that travels: the parts, or zeros for a missing one; a flag for each part that is there; bits.

        A sparse part becomes dense, as other workers may have other places.
        """
        dtype = self.operator.dtype
        full = [
            torch.zeros(shape, dtype=dtype, device=device) if part is None else as_dense(part)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]
        missing = [place for place, part in enumerate(parts) if part is None]
        owned = self._all_owned.on(device)
        if missing:
            owned = owned.clone()
            owned[missing] = 0
        sent = _bits(compared if self._bits else None, self._bits, dtype, device)
        return self._packing.pack((*full, owned, sent))

    def totals(
        self, moved: torch.Tensor, compared: Compared | None, parts: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The sums that have arrived; None where no worker has a part. If bits differ, the workers compare."""
        *totals, owners, bits = self._packing.unpack(moved)
        if moved.is_meta:
            return [*totals]  # which parts no worker has is not known without values
        if compared is not None and self._bits:
            compared.settle(bits.real)
        if all(part is not None for part in parts):  # so none is None, and to read the flags would wait for a device
            return [*totals]
        return [total if n else None for total, n in zip(totals, owners.tolist(), strict=True)]


@as_one_call
def _bits(compared: Compared | None, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The bits that travel with the parts."""
    bits = None if compared is None else compared.bits
    if bits is None:  # made on the device, as nothing may be copied to it while a CUDA graph captures the step
        return torch.zeros(count, dtype=dtype, device=device)
    return bits.to(device, dtype, non_blocking=True)


def _listed(places: Sequence[int]) -> str:
    """Numbers that grow, for people: ``0-3, 7``."""
    starts = [n for n in places if n - 1 not in places]
    stops = [n for n in places if n + 1 not in places]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True))


class Begun(NamedTuple):
    """A sum that has begun: its result, and its messages. It refers to no parameters, as it may outlive a model."""

    moved: torch.Tensor
    pending: Pending
    tag: int
    label: Label


class UnderWay(dict[Any, Begun]):
    """The sums of a world that have begun, and that nobody has waited for yet, by their ways and backwards."""


class _Way:
    """How the gradients of tensors that have entered together leave, in one graph.

    Attributes:
        began: of which recorded node their message is the backward.
        device: of the tensors.
        tag: of their message, if it may be sent before it is waited for.
        later: the tag of the same message in replays of this step (see ``distdl.programs``).
        recomputed: whether a checkpoint in which they enter makes the copies again.
    """

    def __init__(self, total: _Sum, compared: Compared | None, device: torch.device) -> None:
        self.total, self.compared, self.device = total, compared, device
        self.began = total.operator.pass_by()
        self.tag: int | None = None
        self.later = 0
        self.recomputed = True
        self._key = object()  # its key among the sums under way, which does not keep the parameters alive

    def sends(self, parts: Sequence[torch.Tensor | None]) -> bool:
        """Begin to add the parts up, unless too much is under way."""
        under_way = self.total.context.own(UnderWay)
        if self.tag is None or sum(one.moved.nbytes for one in under_way.values()) > _AHEAD:
            return False
        # if the backward fails before it waits, the sum stays there, as the transport writes to its memory
        begun = self.total.send(parts, self.device, self.compared, self.tag, self.later)
        under_way[self._key, current_graph_task_id()] = begun
        return True

    def totals(self, parts: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The sums over all workers: those that this backward has begun, or else sums of these parts."""
        total, under_way = self.total, self.total.context.own(UnderWay)
        total.operator.derive(self.began)
        if self.tag is None:
            return total(parts, self.device, self.compared)
        # the number of the backward tells its sum from that of one that has failed, or in which this one runs
        key = self._key, current_graph_task_id()
        moved = total.wait(under_way.get(key) or total.send(parts, self.device, self.compared, self.tag, self.later))
        under_way.pop(key, None)
        return total.totals(moved, self.compared, parts)


def _profiled(label: Label) -> AbstractContextManager[object]:
    return record_function(str(label)) if profiler_enabled() else nullcontext()


class _Enter(Function):
    """Each worker's copies of tensors that are the same everywhere. Its backward adds up the parts of gradients."""

    enters = True

    @staticmethod
    def forward(ctx: Any, way: _Way, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.way = way
        ctx.set_materialize_grads(False)
        ctx.checkpointed = way.recomputed and is_checkpointed()
        if ctx.checkpointed:  # so that every worker recomputes this node; elsewhere, several graphs may share it
            ctx.save_for_backward(_NOTHING)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *parts: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.checkpointed and ctx.saved_tensors
        way: _Way = ctx.way
        if torch.is_grad_enabled():
            way.total.operator.derive(way.began)
            return None, *_Leave.apply(way.total, way.compared, way.device, *parts)
        return None, *way.totals(parts)


class _Use(Function):
    """The copies of tensors that have entered. Its backward sends the parts, and passes none on.

    It passes them on where the backward is itself differentiated, or too much is under way.
    """

    enters = True

    @staticmethod
    def forward(ctx: Any, way: _Way, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.way = way
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *parts: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled() or not ctx.way.sends(parts):
            return None, *parts
        return None, *[None for _ in parts]


class _Leave(Function):
    """The sums over workers of parts of gradients: the adjoint of entering."""

    @staticmethod
    def forward(
        ctx: Any, total: _Sum, compared: Compared | None, device: torch.device, *parts: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.total = total
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(_NOTHING)
        return tuple(None if one is None else one.clone() for one in total(parts, device, compared))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        there = [one for one in cotangents if one is not None]
        copies = iter(enter(ctx.total.context, there) if there and torch.is_grad_enabled() else there)
        return None, None, None, *(None if one is None else next(copies) for one in cotangents)


_NOTHING = torch.empty(0, device="cpu")
