"""Plain tensors that a user passes beside global ones: some values of each, for the workers to compare.

A plain tensor has to be the same on every worker. Where each draws its own (a batch that is shuffled by a seed of its
own, labels, noise), each takes its block of another tensor, and nobody sees it. So a model's first forwards compare
what it takes, and its first backwards compare what has stood beside global tensors outside of models, as in a loss.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

import torch

from distdl.partition import dims
from distdl.tensors.derivatives import is_recomputed
from distdl.tensors.modes import unobserved

_VALUES = 256  # of a tensor, about
_MOST = 16  # tensors that wait for a backward
_FIRST = 16  # backwards that compare them
_NOTHING = torch.empty(0, device="cpu")


class Sample(NamedTuple):
    """Some values of a plain tensor, on the host.

    Attributes:
        described: shape and dtype of the tensor, and whether it has values that can be read.
        number: a checksum of the values.
    """

    described: str
    number: int
    values: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Sample:
        number, values = 0, _NOTHING
        described = f"{'' if x.is_nested else dims(x.shape) or 'no dims'} {x.dtype}"
        if x.layout is torch.strided and not x.is_meta and x.numel():
            # (those of what has none of its own, as inside a transform of torch.func, are an error)
            with suppress(RuntimeError), unobserved():
                some = _some(x.detach())
                number, values = crc32(some.view(-1).view(torch.uint8).numpy().data), some
        if values is _NOTHING:
            described = f"{described} that is sparse, or has no values"
        return cls(described, number, values)


class Kept(NamedTuple):
    """Samples that wait for a backward.

    Attributes:
        samples: of plain tensors, in the order in which they came.
        passed: how many tensors there were. Samples of two workers are of the same tensors only where there were as
            many: not where one worker alone computes something to print it.
        upto: how many there had been from the start.
    """

    samples: tuple[Sample, ...]
    passed: int
    upto: int

    @property
    def number(self) -> int:
        """A checksum of all of them, the same on workers that have the same; 0 if there are none."""
        told = repr([self.passed, *[one[:2] for one in self.samples]])
        return crc32(told.encode()) if self.samples else 0


class Samples:
    """The samples of this worker that no backward has compared yet."""

    def __init__(self) -> None:
        self._kept: dict[int, Sample] = {}
        self._passed = self._compared = 0  # how many tensors there were, and of how many of them the comparison is over
        self._left = _FIRST

    def keep(self, x: torch.Tensor) -> None:
        """Keep some values of a plain tensor."""
        if not self._left or x.layout is not torch.strided or not x.numel() or is_recomputed():
            return
        self._passed += 1
        if len(self._kept) < _MOST:
            self._kept[self._passed] = Sample.of(x)

    def waiting(self) -> Kept:
        """All of them."""
        return Kept(tuple(self._kept.values()), self._passed - self._compared, self._passed)

    def forget(self, kept: Kept) -> None:
        """Let go what the workers have compared."""
        self._compared = max(self._compared, kept.upto)
        self._kept = {place: one for place, one in self._kept.items() if place > self._compared}
        self._left = max(self._left - 1, 0)


def _some(x: torch.Tensor) -> torch.Tensor:
    """Some values of a tensor: the same places in all tensors of one shape."""
    if x.dim():
        most = round(_VALUES ** (1 / x.dim()))
        x = x[tuple([slice(None, None, -(-extent // most)) for extent in x.shape])]
    return x.resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
