"""Plain tensors that a user passes beside global ones: some values of each, for the workers to compare.

A plain tensor has to be the same on every worker. Where each draws its own (a batch that is shuffled by a seed of its
own, labels, noise), each takes its block of another tensor, and nobody sees it. So in the first steps, and then in one
of five, some values of a few are kept, of others each time, those that models take or that stand beside global tensors
outside of models, until they travel with gradients as a few bits. (What a model computes or draws in its forward is not
looked at.) A step, here, is what lies between the forwards of any models.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

_VALUES = 256  # of a tensor, about
_KEPT = 4  # tensors of a step
_ROUNDING = 1e-3  # what a difference is at most, beside the largest value, that is none (other data differ by about 1)
# (primes: however many forwards come again and again, each of them has its turn)
_FIRST, _EACH = 4, 5  # of the first steps, and then of one of so many
_FAR = 13  # and of those of another device in one of so many of these, for to read them waits for the device


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
            with suppress(RuntimeError):  # (of what has none of its own, as inside a transform of torch.func)
                values = _some(x.detach())
        shape = () if x.is_nested else tuple(x.shape)
        return cls(shape, str(x.dtype), values, hash((shape, crc32(values.tobytes()))))


class Samples:
    """Those that this worker has kept since they were compared."""

    def __init__(self) -> None:
        self._kept: list[Sample] = []
        self._step = 0
        self._open, self._far = True, True  # whether any are kept in this step, and those of another device
        self._first, self._passed = 0, 0  # which of the step's tensors are kept, and how many there were

    def keep(self, x: torch.Tensor) -> None:
        """Keep some values of a plain tensor, if it is one of those whose turn it is."""
        if not self._open or x.layout is not torch.strided or not x.numel():
            return
        place, self._passed = self._passed, self._passed + 1
        if not 0 <= place - self._first < _KEPT or (x.device.type != "cpu" and not self._far):
            return
        sample = Sample.of(x)
        if sample.values.size:
            self._kept.append(sample)

    def take(self) -> tuple[Sample, ...]:
        """All of them. The next step begins."""
        self._step += 1
        if self._open:
            following = self._first + _KEPT
            self._first, self._passed = following if following < self._passed else 0, 0
        self._open = self._step < _FIRST or not self._step % _EACH
        self._far = self._step < _FIRST or not self._step % (_EACH * _FAR)
        if not self._kept:
            return ()
        found, self._kept = tuple(self._kept), []
        return found


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
