"""Plain tensors that a user passes beside global ones: some values of each, for the workers to compare.

A plain tensor has to be the same on every worker. Where each draws its own (a batch that is shuffled by a seed of its
own, labels, noise), each takes its block of another tensor, and nobody sees it. So in the first steps, and then in one
of four, some values of a few are kept, of others each time, those that models take or that stand beside global tensors
outside of models, until they travel with gradients as a few bits. (What a model computes or draws in its forward is not
looked at, nor what a checkpoint recomputes.) A step, here, is what lies between the forwards of any models.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from distdl.partition import dims
from distdl.tensors.derivatives import is_recomputed
from distdl.tensors.modes import unobserved

BITS = 16  # that travel with gradients
MIXING = 0x9E3779B97F4A7C15  # (odd: the highest bits of a product follow from all bits)
_HALF = 1 << 63
_VALUES = 256  # of a tensor, about
_KEPT = 4  # tensors of a step
_ROUNDING = 1e-3  # what a difference is at most, beside the largest value, that is none (other data differ by about 1)
# Of the first steps, and then of each of these numbers. Those of one have no common factor with those of the other, so
# that each of several forwards that come again and again has its turn (unless they are 55, or more).
_FIRST, _EACH = 4, (5, 11)
_FAR = (5 * 13, 11 * 17)  # and those of another device, for to read them waits for the device


class Sample(NamedTuple):
    """Some values of a plain tensor.

    Attributes:
        shape, dtype: of the tensor.
        values: as NumPy has them.
        number: that follows from all of that.
    """

    shape: tuple[int, ...]
    dtype: str
    values: np.ndarray[Any, Any]
    number: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Sample:
        """That of a plain tensor; without values, where it has none that can be read."""
        values = np.empty(0)
        if x.layout is torch.strided and not x.is_meta and x.numel():
            # (those of what has none of its own, as inside a transform of torch.func, are an error)
            with suppress(RuntimeError), unobserved():
                values = _some(x.detach())
        shape = () if x.is_nested else tuple(x.shape)
        return cls(shape, str(x.dtype), values, hash((shape, crc32(values.tobytes()))))


class Kept(NamedTuple):
    """What was kept in a step.

    Attributes:
        samples: of plain tensors that follow each other.
        first: the place of the first of them among those of the step.
        passed: how many the step had.
    """

    samples: tuple[Sample, ...] = ()
    first: int = 0
    passed: int = 0

    @property
    def places(self) -> tuple[int, int, int]:
        """Samples of two workers are of the same tensors only where these are equal.

        They are not where one worker alone computes something to print it.
        """
        return self.first, self.passed, len(self.samples)

    def behind(self, before: Kept, most: int) -> Kept:
        """These behind those of a step before, of which nobody has heard; of too many, these alone."""
        if not before.samples or len(before.samples) + len(self.samples) > most:
            return self
        return Kept(before.samples + self.samples, before.first, before.passed + self.passed)

    @property
    def number(self) -> int:
        return hash((self.first, self.passed, *[one.number for one in self.samples]))  # (the same on every worker)


class Samples:
    """Those that this worker has kept since they were compared."""

    def __init__(self) -> None:
        self._kept: list[Sample] = []
        self._step = 0
        self._open, self._far = True, True  # whether any are kept in this step, and those of another device
        self._first, self._passed = 0, 0  # which of the step's tensors are kept, and how many there were

    def keep(self, x: torch.Tensor) -> None:
        """Keep some values of a plain tensor, if it is one of those whose turn it is."""
        if not self._open or x.layout is not torch.strided or not x.numel() or is_recomputed():
            return
        place, self._passed = self._passed, self._passed + 1
        if not 0 <= place - self._first < _KEPT or (x.device.type != "cpu" and not self._far):
            return
        sample = Sample.of(x)
        if sample.values.size:
            self._kept.append(sample)

    def take(self) -> Kept:
        """All of them. The next step begins."""
        found = Kept()
        if self._kept:
            found, self._kept = Kept(tuple(self._kept), self._first, self._passed), []
        self._step += 1
        if self._open:
            following = self._first + _KEPT
            self._first, self._passed = following if following < self._passed else 0, 0
        self._open, self._far = (self._step < _FIRST or _comes(self._step, each) for each in (_EACH, _FAR))
        return found

    def begin_anew(self) -> None:
        """Keep the first tensors of the next step, as all workers do that have compared what they kept."""
        self._first = 0


def _comes(step: int, each: tuple[int, ...]) -> bool:
    return any(step % n == 0 for n in each)


def _some(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Some values of a tensor: at the same places of any tensor of its shape."""
    if x.dim():
        most = round(_VALUES ** (1 / x.dim()))
        x = x[tuple([slice(None, None, -(-extent // most)) for extent in x.shape])]
    if x.is_complex():
        x = x.resolve_conj().resolve_neg()
    x = x.clone().cpu()  # (memory of which there is an array is marked for ever: torch does not resize it)
    try:
        found: np.ndarray[Any, Any] = x.numpy()
    except TypeError:  # (NumPy has not all dtypes)
        found = x.float().numpy()
    return found


def bits_of(number: int) -> list[int]:
    """Bits that follow from all of a number of 64."""
    mixed = mixed_of(number)
    return [(mixed >> place) & 1 for place in range(64 - BITS, 64)]


def mixed_of(number: int) -> int:
    """A number of 64 bits, of which the highest follow from all of another's."""
    return (number * MIXING + _HALF) % (2 * _HALF) - _HALF


def how_apart(ours: Sample, theirs: Sample) -> str:
    """How a tensor of another worker differs from ours, beyond rounding; empty if it does not."""
    if theirs.values.size != ours.values.size and theirs.shape == ours.shape:
        return "is sparse, or has no values, there or"
    if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
        return f"is {dims(theirs.shape)} {theirs.dtype}"
    apart = difference(ours, theirs)
    return f"differs by {apart:.3g}" if apart else ""


def difference(ours: Sample, theirs: Sample) -> float:
    """The largest difference of two samples, beyond what rounding may be; 0 if there is none."""
    kind = ours.values.dtype.kind
    wide = np.complex128 if kind == "c" else np.float64 if kind == "f" else np.int64
    one, other = ours.values.astype(wide), theirs.values.astype(wide)
    same = (one == other) | ((one != one) & (other != other))
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.abs(one - other), nan=np.inf)
    largest = float(apart[~same].max(initial=0))
    dtype = getattr(torch, ours.dtype.removeprefix("torch."))
    rounding = max(2 * torch.finfo(dtype).eps, _ROUNDING) if dtype.is_floating_point or dtype.is_complex else 0.0
    scale = float(np.nan_to_num(np.abs(other), nan=0, posinf=0).max(initial=0))
    return largest if largest > rounding * scale else 0.0
