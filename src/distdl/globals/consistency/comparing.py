"""Comparing tensors that every worker has whole, without further messages: bits of them travel with gradients.

Whatever writes into weights has to write the same on every worker, and nobody sees it do so. So bits of one parameter
or buffer travel with the gradients of a backward, and of the next one with those of the next backward. In the first
backwards, the bits also follow from plain tensors (see :mod:`distdl.globals.consistency.checksums`). Gradients are
added up over n workers, and so are the bits: the sum of each is 0 or n if all workers have the same. Only if it is not,
the tensors themselves are compared. A difference as small as rounding is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from distdl.globals.consistency.checksums import Sample, Samples, bits_of, bytes_of, digest, rounding_of, wide
from distdl.globals.layouts.context import Context
from distdl.globals.tensor.observers import COMPARING, PLAIN_BESIDE
from distdl.partition.sharing import gather_values
from distdl.tensors.modes import unobserved
from distdl.tensors.recorders import as_one_call

SAME = (
    "What writes into weights and buffers after the first forward has to write the same everywhere: optimisers take "
    "the same steps with the same options (learning rate, clipping), gradients are the same, and initial values that "
    "are drawn again come from one seed, or from one state_dict"
)
_WEIGHT = (
    "a distributed model needs the same weights on every worker; {} of worker {} differs from that of worker 0 by "
    f"{{:.3g}}, where its largest value is {{:.3g}}. {SAME}. (DISTDL_DEBUG=1 compares all of them before each forward)"
)
_PLAIN = (
    "a plain tensor beside a global one, or that a distributed model takes, is the same on every worker, and each "
    "takes a part of it; one of {} on worker 0 {} on worker {}. Let all workers have the same data (one seed for what "
    "is shuffled or drawn), or one of them (distdl.distribute_tensor), or make a global tensor of the parts that they "
    "have (GlobalTensor.from_local). distdl.distribute(model, P) gives all workers the weights of worker 0"
)


class Turn:
    """Which parameter or buffer of a model is compared next. Each backward that has compared one moves on.

    Attributes:
        number: of the parameter or buffer.
        unread: on a GPU, the last backward's look, its sums of the bits, and an event: then they are on the host.
    """

    def __init__(self) -> None:
        self.number = 0
        self.unread: tuple[Look, torch.Tensor, torch.Event] | None = None


class Look:
    """What is compared with the gradients of a forward: one tensor, and the samples of plain tensors that wait.

    Args:
        turn: moves on when this is compared; None if nothing is compared.
        one: the tensor; None on all workers if samples alone are compared.
        name: of the tensor.
    """

    def __init__(self, context: Context, turn: Turn | None, one: torch.Tensor | None = None, name: str = "") -> None:
        self._context, self._turn, self._one, self._name = context, turn, one, name
        self._number = 0 if turn is None else turn.number
        self._samples: tuple[int, list[Sample]] = (0, [])

    @cached_property
    def bits(self) -> torch.Tensor | None:
        """``BITS`` numbers of 0 or 1: every message of the backward carries the same. None for zeros."""
        if self._turn is None:
            return None
        self._samples = self._context.own(Samples).take()
        if self._one is None and not self._samples[0]:
            return None
        with unobserved():
            number = digest(self._samples) if self._samples[0] else 0
            return bits_of(torch.zeros(1, device="cpu") if self._one is None else self._one, number)

    @as_one_call
    def settle(self, sums: torch.Tensor) -> None:
        """Compare the tensors if the bits that came with a backward's first message differ. Collective.

        Raises: ValueError, the same on every worker, if the tensors differ.
        """
        turn, self._turn = self._turn, None
        if turn is None:
            return
        turn.number = self._number + 1
        if sums.is_cpu:
            self._compare(sums)
            return
        # On a GPU, the sums of the last backward are read: those of this one would wait for all work in the queue.
        before = turn.unread
        turn.unread = self, sums.to("cpu", non_blocking=True), torch.Event(sums.device)
        turn.unread[2].record()
        if before is not None:
            before[2].synchronize()
            before[0]._compare(before[1])

    def _compare(self, sums: torch.Tensor) -> None:
        if differ(sums, self._context):
            check_samples(self._context, "comparing plain tensors", *self._samples)
            if self._one is not None:
                _check_weight(self._context, self._one, self._name)


def differ(sums: torch.Tensor, context: Context) -> bool:
    """Whether bits differ between workers, from their sums over all workers: equal ones add up to 0 or to n.

    Any other sum is a difference, also nan: MPI may have added up messages of different calls.
    """
    return any(n not in (0, len(context.everyone)) for n in sums.tolist())


def check_samples(context: Context, what: str, passed: int, samples: Sequence[Sample]) -> list[int]:
    """Check that plain tensors are equal to those of worker 0. Collective.

    Nothing is compared if workers have different numbers of them, or have read them at different places.

    Args:
        what: is compared, as a text that is the same on every worker.
        passed: how many plain tensors there were, also those without a sample.
        samples: of the plain tensors, in order.
    Returns: how many each worker had.
    Raises: ValueError, the same on every worker, if one differs.
    """
    context.comm.where = what
    told = gather_values(context.comm, context.everyone, what, (passed, list(samples)))
    counts = [count for count, _ in told]
    if len({(count, *(Sample(*one).start for one in each)) for count, each in told}) > 1:
        return counts
    for place, first in enumerate(told[0][1]):
        every = [Sample(*each[place]) for _, each in told]
        described, rounding, values, _ = first
        for worker, theirs in enumerate(every):
            if theirs.described != described:
                raise ValueError(_PLAIN.format(described, f"is {theirs.described}", worker))
            apart, largest = _apart(theirs.values, values)
            if apart > rounding * largest:
                raise ValueError(_PLAIN.format(described, f"differs by {apart:.3g}", worker))
    return counts


def _check_weight(context: Context, one: torch.Tensor, name: str) -> None:
    """Compare a tensor with that of worker 0. Collective.

    Nothing is compared if names, shapes or dtypes differ between workers: these tensors are not one variable.

    Raises: ValueError, the same on every worker, if they differ by more than rounding.
    """
    context.comm.where = what = "comparing weights"
    mine = (name, tuple(one.shape), str(one.dtype))
    told = gather_values(context.comm, context.everyone, what, mine)
    if any(theirs != mine for theirs in told):
        return
    first = wide(first_of(context, one))
    apart, largest = _apart(wide(one), first)
    far = gather_values(context.comm, context.everyone, what, apart)
    worker = max(range(len(far)), key=far.__getitem__)
    if far[worker] > rounding_of(one.dtype) * largest:
        raise ValueError(_WEIGHT.format(name, worker, far[worker], largest))


def first_of(context: Context, one: torch.Tensor) -> torch.Tensor:
    """The tensor of worker 0, on the host, where all workers have one of that shape and dtype. Collective."""
    cells = bytes_of(one)
    context.comm.through.broadcast(context.everyone, cells).wait()
    return cells.view(one.dtype).reshape(one.shape)


def _apart(own: torch.Tensor, first: torch.Tensor) -> tuple[float, float]:
    """The largest difference of values from those of worker 0, and the largest of worker 0's."""
    if not own.numel():
        return 0.0, 0.0
    same = (own == first) | (own.isnan() & first.isnan())
    apart = (own - first).abs().nan_to_num(torch.inf).masked_fill(same, 0).max()
    return float(apart), float(first.abs().nan_to_num(0.0, 0.0, 0.0).max())


PLAIN_BESIDE.append(lambda context, plain: context.own(Samples).keep(plain))
COMPARING.append(as_one_call(lambda context: Look(context, context.keep_told(Turn, Turn))))
