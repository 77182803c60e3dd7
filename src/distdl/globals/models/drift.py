"""Whether what every worker has whole, parameters and buffers, is still the same on all of them.

Whatever writes into weights has to write the same on every worker, and nobody sees it do so. So bits of one parameter
or buffer, each in its turn, travel with the gradients of a backward (see :mod:`distdl.globals.comparing`), and so there
is no message more. In the first backwards, the bits also follow from plain tensors (:mod:`distdl.globals.samples`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from distdl.globals.comparing import bits_of, check_same, differ, is_comparable
from distdl.globals.context import Context
from distdl.globals.models.equality import SAME, whole_of
from distdl.globals.samples import Kept, Sample
from distdl.partition.sharing import gather_values
from distdl.tensors.modes import unobserved

_RULE = (
    "a distributed model needs the same weights on every worker; {name} of worker {worker} differs from that of worker "
    f"0 by {{apart:.3g}}, where its largest value is {{largest:.3g}}. {SAME}. (DISTDL_DEBUG=1 compares all of them "
    "before each forward)"
)


_PLAIN = (
    "a plain tensor beside a global one, or that a distributed model takes, is the same on every worker, and each "
    "takes a part of it; one of {name} on worker 0 {how} on worker {worker}. Let all workers have the same data (one "
    "seed for what is shuffled or drawn), or one of them (distdl.distribute_tensor), or make a global tensor of the "
    "parts that they have (GlobalTensor.from_local)"
)
_ROUNDING = 1e-3  # of plain tensors (other data differ by about 1)


class _Place(NamedTuple):
    """Where a module has a parameter or buffer."""

    name: str
    module: weakref.ref[torch.nn.Module]
    key: str

    def read(self) -> torch.Tensor | None:
        module = self.module()
        if module is None:
            return None
        held = module._parameters if self.key in module._parameters else module._buffers
        return held.get(self.key)  # (the forward may have set another)


class Drift:
    """Which parameter or buffer of a model is compared next. The next one is, once a backward has compared it."""

    def __init__(self) -> None:
        self._round: list[_Place] = []  # (a graph keeps this, and a model the graph of its weights)
        self.turn = 0
        self._last: _Sent | None = None

    def look(self, context: Context, module: torch.nn.Module) -> Look:
        """What is compared with the gradients of a forward that begins."""
        if context.comm.imagined or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return Look(self, context, None, "")  # (a CUDA graph is replayed without Python)
        if self.turn >= len(self._round):
            self._round, self.turn = _places_in(module), 0
        place = self._round[self.turn]
        one = place.read()
        return Look(self, context, one if is_comparable(one) else torch.zeros(1, device="cpu"), place.name)

    def arrived(self, sent: _Sent) -> _Sent | None:
        """What has been sent, once its sums are on the host: on a GPU one backward later.

        To read those of this one would wait for all that the GPU has been told to do.
        """
        if not _is_far(sent.sums):
            return sent
        ready, self._last = self._last, _copied(sent)
        if ready is not None and ready.copied is not None:
            ready.copied.synchronize()
        return ready


def _places_in(module: torch.nn.Module) -> list[_Place]:
    """Of all that every worker has whole, and that belongs to the state."""
    names = {name for name, _ in whole_of(module)}
    found = []
    for path, child in module.named_modules():
        for key in (*child._parameters, *child._buffers):
            name = f"{path}.{key}".lstrip(".")
            if name in names and key not in child._non_persistent_buffers_set:
                found.append(_Place(name, weakref.ref(child), key))
    return found


class Look:
    """What is compared with the gradients of a forward.

    Args:
        one: the tensor whose turn it is; None if nothing is compared.
    """

    def __init__(self, drift: Drift, context: Context, one: torch.Tensor | None, name: str) -> None:
        self._drift, self._context, self._one, self._name = drift, context, one, name
        self._turn, self._kept = drift.turn, context.samples.waiting()
        self._settled = one is None

    @cached_property
    def bits(self) -> torch.Tensor | None:
        """The checksum, one number for each bit: every message of the backward carries the same."""
        with unobserved():
            return None if self._one is None else bits_of(self._one, self._kept.number)

    def settle(self, sums: torch.Tensor) -> None:
        """If the bits that came with a backward's first message differ, compare the tensor itself. Collective.

        Raises: ValueError, the same on every worker.
        """
        if self._settled:
            return
        self._settled = True
        self._drift.turn = self._turn + 1
        self._context.samples.forget(self._kept)
        ready = self._drift.arrived(_Sent(sums, None, self._context, self._one, self._name, self._kept))
        if ready is not None and differ(ready.sums, ready.context):
            _check_samples(ready.context, "comparing plain tensors", ready.kept.samples, ready.kept.passed)
            check_same(ready.context, ready.one, ready.name, _RULE)


class _Sent(NamedTuple):
    """The sums of bits over all workers, what they follow from, and when a GPU has copied them to the host."""

    sums: torch.Tensor
    copied: torch.Event | None
    context: Context
    one: torch.Tensor | None
    name: str
    kept: Kept


def _is_far(sums: torch.Tensor) -> bool:
    """Whether they lie on a device, so that reading them would wait for it."""
    return not sums.is_cpu


def _copied(sent: _Sent) -> _Sent:
    """The same with its sums on the host, once they have arrived there."""
    copied = torch.Event(sent.sums.device)
    sent = sent._replace(sums=sent.sums.to("cpu", non_blocking=True), copied=copied)
    copied.record()
    return sent


def check_plain(context: Context, given: Sequence[torch.Tensor]) -> None:
    """Check that the plain tensors that a model takes are those of worker 0. Collective.

    Raises: ValueError, the same on every worker.
    """
    if context.comm.imagined:
        return
    what = "the plain tensors that a distributed model takes"
    counts = _check_samples(context, what, [Sample.of(one) for one in given], len(given))
    for worker, count in enumerate(counts):
        if count != counts[0]:
            raise ValueError(
                f"a distributed model takes the same tensors on every worker; worker 0 gives {counts[0]} plain "
                f"tensors, and worker {worker} {count}"
            )


def _check_samples(context: Context, what: str, samples: Sequence[Sample], passed: int) -> list[int]:
    """Check that plain tensors are those of worker 0, where all workers have as many. Collective.

    Args:
        passed: how many plain tensors there were, with those of which there are no samples.
    Returns: how many each worker has.
    Raises: ValueError, the same on every worker.
    """
    context.comm.where = what
    told = gather_values(context.comm, context.everyone, what, (passed, [tuple(one[:2]) for one in samples]))
    counts = [count for count, _ in told]
    if len({(count, len(each)) for count, each in told}) > 1:
        return counts
    for place, sample in enumerate(samples):
        every = [each[place] for _, each in told]
        described, number = every[0]
        for worker, (theirs, _) in enumerate(every):
            if theirs != described:
                raise ValueError(_PLAIN.format(name=described, how=f"is {theirs}", worker=worker))
        if any(theirs != number for _, theirs in every):
            check_same(context, sample.values, described, _PLAIN.replace("{how}", "differs by {apart:.3g}"), _ROUNDING)
    return counts
