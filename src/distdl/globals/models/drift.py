"""What every worker has whole: whether it is still the same on all of them.

Whatever writes into weights has to write the same on every worker, and nobody sees it do so. So in each forward that
has a graph, one parameter or buffer is looked at, each in its turn. Sixteen bits that follow from all of its bits
travel behind the gradients, so there is no message more. The sum of a bit over n workers is 0 or n if all have the
same. Only if it is not, the workers compare what they have looked at, and all raise the same error.

The same bits also follow from how often torch says that each parameter has been written, and from some values of the
plain tensors that stood beside global ones (see :mod:`distdl.globals.samples`).

Differences of rounding are none: processors that are not of one kind round otherwise in the step of an optimiser. What
differed by that alone is left out for a while, and for twice as long the next time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import sub
from typing import Any, NamedTuple

import torch

from distdl.globals.comparing import bits_of_all, differ, farthest
from distdl.globals.context import Context
from distdl.globals.samples import Kept, Sample, bits_of, how_apart
from distdl.partition import dims
from distdl.partition.sharing import gather_values

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # (those of quantised weights know their own functions only)
_WRITES = 3  # for how many forwards it is not asked how often parameters have been written, at first
_LONGEST = 1023
_MOST_KEPT = 16  # plain tensors that wait for a backward


Places = list[tuple[weakref.ref[torch.nn.Module], str]]  # modules, and the names that their buffers have there


class Seen(NamedTuple):
    """What the bits follow from beside a tensor.

    Attributes:
        kept: of plain tensors.
        writes: into each parameter, since they were counted first; none in forwards in which this is not asked.
        place: of the tensor.
    """

    kept: Kept
    writes: tuple[int, ...]
    place: int = 0

    @property
    def number(self) -> int:
        return hash((self.kept.number, self.writes))  # (of numbers: the same everywhere)


class _Sent(NamedTuple):
    """What has been looked at, and the sums of its bits over all workers, which a GPU copies to the host until then."""

    sums: torch.Tensor
    arrived: torch.Event | None
    context: Context
    one: torch.Tensor | None
    seen: Seen
    counted: Sequence[torch.Tensor]


class _Turns:
    """When something is looked at that may be left out: the more seldom, the more often it came to nothing.

    Args:
        pause: how many times it is left out between two looks, at first.
    """

    def __init__(self, pause: int = 0) -> None:
        self._pause = self._left = pause

    def come(self) -> bool:
        """Whether it is looked at this time."""
        if self._left:
            self._left -= 1
            return False
        self._left = self._pause
        return True

    def seldomer(self) -> None:
        """The workers have compared it, and it differs by nothing that matters."""
        self._pause = self._left = min(2 * self._pause + 1, _LONGEST)


class Drift:
    """Looks at the parameters and buffers of a model, one in each forward."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)  # (a graph keeps what is looked at, and a model the graph of its weights)
        self._values, self._writes, self._samples = _Turns(), _Turns(_WRITES), _Turns()
        self._turn = 0  # how many values it has looked at
        self._place = 0  # what comes next: a parameter, or behind them a buffer
        self._buffers: Places = []  # of the buffers, at the last begin of a round
        self._counted: list[torch.Tensor] | None = None  # the parameters whose writes are counted
        self._before: list[int] = []  # how often each had been written then
        self._most = 0  # of how many workers bits can be added up in their dtypes
        self._waiting: list[Seen] = []  # the last, until a backward has sent its bits
        self._last: _Sent | None = None  # on a GPU, what was looked at last; settled with the next

    def look(
        self,
        context: Context,
        parameters: Sequence[torch.Tensor],
        counted: list[torch.Tensor],
        buffers: Callable[[], Places],
    ) -> Look:
        """At the next of some parameters and buffers.

        Args:
            counted: those of which the writes are counted, the same list as long as they are the same. The bits travel
                in their dtypes.
            buffers: where buffers are, asked for once in each round.
        """
        if counted is not self._counted:
            self._counted, self._before = counted, _writes_of(counted)
            self._most = int(2 / max([torch.finfo(dtype).eps for dtype in {one.dtype for one in counted}]))
        before = self._waiting[0] if self._waiting else None
        if before is not None:  # (no backward may ever come for it: so all that it has looked at is looked at again)
            self._place = before.place
        look = self._look(context, parameters, counted, buffers, before)
        self._waiting = look.waiting
        return look

    def _look(
        self,
        context: Context,
        parameters: Sequence[torch.Tensor],
        counted: list[torch.Tensor],
        buffers: Callable[[], Places],
        before: Seen | None,
    ) -> Look:
        kept, place = context.samples.take(), self._place
        if len(context.everyone) > self._most or context.comm.imagined or _is_captured(counted):
            return Look(self, context, None, None, counted, None)
        one: Any = self._next(parameters, buffers) if self._values.come() else None
        if kept.samples and not self._samples.come():
            kept = Kept()
        asked = self._writes.come() or (before is not None and before.writes)
        writes = tuple(map(sub, _writes_of(counted), self._before)) if asked else ()
        if before is not None:
            kept = kept.behind(before.kept, _MOST_KEPT)
        seen = Seen(kept, writes, place)
        number = seen.number if kept.samples or writes else 0
        if type(one) not in _PLAIN or one.layout is not torch.strided or one.device.type == "meta" or not one.numel():
            return Look(self, context, None, seen, counted, torch.tensor(bits_of(number), device="cpu"))
        return Look(self, context, one, seen, counted, bits_of_all(one.detach(), self._turn, number))

    def _next(self, parameters: Sequence[torch.Tensor], buffers: Callable[[], Places]) -> torch.Tensor | None:
        self._turn += 1
        if self._place >= len(parameters) + len(self._buffers):
            self._place = 0
        place, self._place = self._place, self._place + 1
        if place < len(parameters):
            if not place:
                self._buffers = buffers()
            return parameters[place]
        owner, name = self._buffers[place - len(parameters)]
        module = owner()
        return None if module is None else module._buffers.get(name)  # (the forward may have set another)

    def settle(self, sent: _Sent) -> None:
        """Compare what has been looked at if the workers' bits differ. Collective.

        On a GPU one backward later: to read the bits of this one would wait for all that it has been told to do.
        """
        ready: _Sent | None = sent
        if _is_far(sent.sums):
            ready, self._last = self._last, _copied(sent)
        if ready is None:
            return
        if ready.arrived is not None:
            ready.arrived.synchronize()
        if differ(ready.sums, len(ready.context.everyone)):
            self._compare(ready.context, ready.one, ready.seen, ready.counted)

    def _compare(self, context: Context, one: torch.Tensor | None, seen: Seen, counted: Sequence[torch.Tensor]) -> None:
        """Compare what this worker has looked at with what the others have. Collective.

        Raises: ValueError, the same on every worker, if anything differs by more than rounding.
        """
        context.comm.where = "comparing weights"
        name = None if one is None else self._listed().get(one, "a parameter")
        described = None if one is None else (name, tuple(one.shape), str(one.dtype))
        samples, *places = seen.kept
        mine = (tuple(map(tuple, samples)), tuple(places), seen.writes, described)
        gathered = gather_values(context.comm, context.everyone, "comparing weights", mine)
        told = [
            Seen(Kept(tuple([Sample(*sample) for sample in samples]), *places), tuple(writes), seen.place)
            for samples, places, writes, _ in gathered
        ]
        first = told[0]
        for worker, theirs in enumerate(told):
            if theirs.kept.places == first.kept.places:
                for ours, sample in zip(first.kept.samples, theirs.kept.samples, strict=True):
                    _check_alike(ours, sample, worker)
        counts = zip(*[theirs.writes for theirs in told], strict=True)
        written = [place for place, each in enumerate(counts) if len(set(each)) > 1]
        for place in written:
            self._compare_values(context, counted[place])
        if any(theirs.number != first.number for theirs in told):
            if written:
                self._writes.seldomer()
                self._counted = None  # (from the next forward on, writes are counted anew)
            if any(theirs.kept.number != first.kept.number for theirs in told):
                self._samples.seldomer()
                context.samples.begin_anew()
            return
        if one is not None and all(theirs[3] == gathered[0][3] for theirs in gathered):
            self._compare_values(context, one)
        self._values.seldomer()  # (it may also be a buffer that each has of its block, or that some have not)

    def _listed(self) -> dict[torch.Tensor, str]:
        """All that is looked at, with the names."""
        module = self._module()
        if module is None:
            return {}
        return {one: name for name, one in (*module.named_parameters(), *module.named_buffers())}

    def _compare_values(self, context: Context, one: torch.Tensor) -> None:
        """Compare a parameter or buffer with that of worker 0. Collective.

        Raises: ValueError, the same on every worker, if they differ by more than rounding.
        """
        name = self._listed().get(one, "a parameter")
        worker, apart, largest = farthest(context.comm, context.everyone, one, "comparing weights")
        if worker:
            raise ValueError(
                f"a distributed model needs the same weights on every worker; {name} of worker {worker} differs from "
                f"that of worker 0 by {apart:.3g}, where its largest value is {largest:.3g}. What writes into "
                "weights and buffers after the first forward has to write the same everywhere: optimisers take the "
                "same steps with the same options (learning rate, clipping), gradients are the same, and initial "
                "values that are drawn again come from one seed, or from one state_dict. (DISTDL_DEBUG=1 compares all "
                "of them before each forward)"
            )


def _is_far(sums: torch.Tensor) -> bool:
    """Whether it takes a wait to read them."""
    return not sums.is_cpu


def _copied(sent: _Sent) -> _Sent:
    """The same with its sums on the host, once they have arrived there."""
    arrived = torch.Event(sent.sums.device)
    sent = sent._replace(sums=sent.sums.to("cpu", non_blocking=True), arrived=arrived)
    arrived.record()
    return sent


def _is_captured(counted: Sequence[torch.Tensor]) -> bool:
    """Whether what is computed goes into a CUDA graph, which is replayed without Python."""
    return any(one.is_cuda for one in counted[:1]) and torch.cuda.is_current_stream_capturing()


def _writes_of(parameters: Sequence[torch.Tensor]) -> list[int]:
    """How often each has been written."""
    return [one._version if type(one) is torch.nn.Parameter else 0 for one in parameters]


def check_plain(context: Context, given: Sequence[torch.Tensor]) -> None:
    """Check that the plain tensors that a model takes are those of worker 0. Collective.

    Raises: ValueError, the same on every worker.
    """
    if context.comm.imagined:
        return
    context.comm.where = "the plain tensors that a distributed model takes"
    mine = tuple([tuple(Sample.of(one)) for one in given])
    told = gather_values(context.comm, context.everyone, context.comm.where, mine)
    for worker, theirs in enumerate(told):
        if len(theirs) != len(told[0]):
            raise ValueError(
                f"a distributed model takes the same tensors on every worker; worker 0 gives {len(told[0])} plain "
                f"tensors, and worker {worker} {len(theirs)}"
            )
        for ours, one in zip(told[0], theirs, strict=True):
            _check_alike(Sample(*ours), Sample(*one), worker)


def _check_alike(first: Sample, theirs: Sample, worker: int) -> None:
    """Check that a plain tensor is that of worker 0.

    Raises: ValueError.
    """
    how = how_apart(first, theirs)
    if not how:
        return
    raise ValueError(
        f"a plain tensor beside a global one, or that a distributed model takes, is the same on every worker, and each "
        f"takes a part of it; one of {dims(first.shape)} {first.dtype} on worker 0 {how} on worker {worker}. Let all "
        "workers have the same data (one seed for what is shuffled or drawn), or one of them "
        "(distdl.distribute_tensor), or make a global tensor of the parts that they have (GlobalTensor.from_local)"
    )


class Look:
    """What is looked at in a forward, and what travels of it.

    Attributes:
        bits: 0 or 1 each; none if nothing is looked at.
        waiting: what they follow from, until a backward has sent them.
    """

    def __init__(
        self,
        drift: Drift,
        context: Context,
        one: torch.Tensor | None,
        seen: Seen | None,
        counted: Sequence[torch.Tensor],
        bits: torch.Tensor | None,
    ) -> None:
        self._drift, self._context, self._one, self._counted = drift, context, one, counted
        self.waiting = [] if seen is None else [seen]
        self.bits = bits

    def settle(self, sums: torch.Tensor) -> None:
        """Compare what was looked at itself, once, if its bits differ. Collective.

        Args:
            sums: of the bits, over all workers.
        """
        if self.waiting:
            self._drift.settle(_Sent(sums, None, self._context, self._one, self.waiting.pop(), self._counted))
