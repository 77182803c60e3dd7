"""Plain tensors that a user passes beside global ones: some values of each, for the workers to compare.

A plain tensor has to be the same on every worker. Where each draws its own (a batch that is shuffled by a seed of its
own, labels, noise), each takes its block of another tensor, and nobody sees it. So a model's first forwards compare
what it takes, and its first backwards compare what has stood beside global tensors outside of models, as in a loss.
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

_VALUES = 256  # of a tensor, about
_MOST = 16  # tensors that wait for a backward
_FIRST = 16  # backwards that compare them
_ROUNDING = 1e-3  # what a difference is at most, beside the largest value, that is none (other data differ by about 1)


class Sample(NamedTuple):
    """Some values of a plain tensor.

    Attributes:
        shape, dtype: of the tensor.
        values: as NumPy has them.
    """

    shape: tuple[int, ...]
    dtype: str
    values: np.ndarray[Any, Any]

    @classmethod
    def of(cls, x: torch.Tensor) -> Sample:
        """That of a plain tensor; without values, where it has none that can be read."""
        values = np.empty(0)
        if x.layout is torch.strided and not x.is_meta and x.numel():
            # (those of what has none of its own, as inside a transform of torch.func, are an error)
            with suppress(RuntimeError), unobserved():
                values = _some(x.detach())
        return cls(() if x.is_nested else tuple(x.shape), str(x.dtype), values)


class Kept(NamedTuple):
    """Samples that wait for a backward.

    Attributes:
        samples: of plain tensors that follow each other.
        passed: how many tensors there were. Samples of two workers are of the same tensors only where there were as
            many: not where one worker alone computes something to print it.
        upto: how many there had been from the start.
    """

    samples: tuple[Sample, ...]
    passed: int
    upto: int

    @property
    def number(self) -> int:
        """That follows from all of them: the same on workers that have the same."""
        found = crc32(repr([self.passed, *[one[:2] for one in self.samples]]).encode())
        for one in self.samples:
            found = crc32(one.values.tobytes(), found)
        return found if self.samples else 0


class Samples:
    """Those that this worker has kept since some were compared."""

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


def _some(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Some values of a tensor: at the same places of any tensor of its shape."""
    if x.dim():
        most = round(_VALUES ** (1 / x.dim()))
        x = x[tuple([slice(None, None, -(-extent // most)) for extent in x.shape])]
    x = x.resolve_conj().resolve_neg()
    x = x.clone().cpu()  # (memory of which there is an array is marked for ever: torch does not resize it)
    try:
        found: np.ndarray[Any, Any] = x.numpy()
    except TypeError:  # (NumPy has not all dtypes)
        found = x.float().numpy()
    return found


def check_alike(told: list[tuple[Sample, ...]]) -> None:
    """Check that plain tensors of all workers, by worker, are those of worker 0: as many on each.

    Raises: ValueError.
    """
    for worker, each in enumerate(told):
        for first, theirs in zip(told[0], each, strict=True):
            how = how_apart(first, theirs)
            if how:
                raise ValueError(
                    f"a plain tensor beside a global one, or that a distributed model takes, is the same on every "
                    f"worker, and each takes a part of it; one of {dims(first.shape)} {first.dtype} on worker 0 {how} "
                    f"on worker {worker}. Let all workers have the same data (one seed for what is shuffled or drawn), "
                    "or one of them (distdl.distribute_tensor), or make a global tensor of the parts that they have "
                    "(GlobalTensor.from_local)"
                )


def how_apart(ours: Sample, theirs: Sample) -> str:
    """How a tensor of another worker differs from ours, beyond rounding; empty if it does not."""
    if theirs.values.size != ours.values.size and theirs.shape == ours.shape:
        return "is sparse, or has no values, there or"
    if theirs[:2] != ours[:2]:
        return f"is {dims(theirs.shape)} {theirs.dtype}"
    apart = _difference(ours, theirs)
    return f"differs by {apart:.3g}" if apart else ""


def _difference(ours: Sample, theirs: Sample) -> float:
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
