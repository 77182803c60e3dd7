"""What workers compare of a tensor that has to be the same on all of them: a checksum, bits of one, or some values.

A plain tensor has to be the same on every worker. If each worker draws its own (labels, noise, a batch that is shuffled
by another seed), each takes its block of another tensor, and nobody sees it. So the first forwards of a model compare
some values of the plain tensors that it takes. The first backwards compare some of the plain tensors that have stood
beside global ones outside of models, as in a loss, and of parameters that belong to no model.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple
from zlib import crc32

import torch

from distdl.globals.tensor.observers import BITS
from distdl.partition import dims
from distdl.partition.encoding import encode
from distdl.tensors.modes import unobserved
from distdl.tensors.private_torch import current_graph_task_id
from distdl.tensors.recorders import aside

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of tensors whose values are compared
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16}  # by bytes of an element; of longer ones, each four bytes are one
_ROW = 1021  # numbers that are added up before their sum is multiplied
_VALUES = 256  # about as many values are in a sample
_MOST = 16  # samples that wait for a backward, at most
_FIRST = 16  # backwards that compare samples
_ROUNDING = 1e-3  # relative, of data; data that was drawn by another seed differs by about 1


def bytes_of(one: torch.Tensor) -> torch.Tensor:
    """The cells of a tensor as bytes: a new tensor on the host."""
    cells = one.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    return cells.reshape(-1).view(torch.uint8)


def checksum(one: torch.Tensor) -> int:
    """A CRC-32 of the cells of a tensor."""
    return crc32(bytes_of(one).numpy().data)


def is_comparable(one: torch.Tensor | None) -> bool:
    """Whether a tensor has values that :func:`bits_of` can read. Quantised weights know too few functions."""
    if one is None or type(one) not in PLAIN:
        return False
    return one.layout is torch.strided and not one.is_meta and one.numel() > 0


def bits_of(one: torch.Tensor, number: int = 0) -> torch.Tensor:
    """``BITS`` numbers of 0 or 1 that follow from all bits of a tensor and from a number, without waiting for a device.

    The cells are read as integers, and each is multiplied by a factor of its place, or in a long tensor each sum of a
    row. Factors and lengths of rows are odd: a change of all cells alike (of a sign, of an exponent) changes the sums.
    """
    cells = one.detach().resolve_conj().resolve_neg().reshape(-1)
    cells = torch.view_as_real(cells).reshape(-1) if cells.is_complex() else cells
    numbers = cells.view(_WHOLE_NUMBERS.get(cells.element_size(), torch.int32))
    full = numbers.numel() // _ROW * _ROW
    if full > 4 * _ROW:  # to add up in a wider dtype takes ten times longer
        kind = None if numbers.dtype is torch.int8 else numbers.dtype
        numbers = torch.cat([numbers[:full].view(-1, _ROW).sum(1, dtype=kind), numbers[full:]])
    factors, shifts = _constants(numbers.numel(), one.device)
    return ((numbers.to(torch.int64) * factors).sum() + number >> shifts) & 1


@lru_cache(256)
def _constants(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd factors, the same in all processes, and shifts that bring each of the highest bits to the lowest place."""
    drawn = torch.Generator("cpu").manual_seed(0)
    factors = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=drawn, device="cpu") | 1
    return factors.to(device, non_blocking=True), torch.arange(64 - BITS, 64, device=device)


def digest(value: Any) -> int:
    """A hash of 64 bits of a value that :mod:`distdl.partition.encoding` can encode."""
    return int.from_bytes(blake2b(encode(value), digest_size=8).digest(), "little", signed=True)


class Sample(NamedTuple):
    """Some values of a plain tensor.

    Attributes:
        described: shape and dtype of the tensor, and whether it has values that can be read.
        rounding: the largest difference that counts as none, relative to the largest value.
        values: on the host, from the same places in all tensors of one shape.
        start: which places are read. It moves on from backward to backward, so that in time many are.
    """

    described: str
    rounding: float
    values: torch.Tensor
    start: int = 0

    @classmethod
    def of(cls, x: torch.Tensor, start: int = 0) -> Sample:
        described = f"{'' if x.is_nested else dims(x.shape) or 'no dims'} {x.dtype}"
        if is_comparable(x):
            # a tensor without values of its own, as inside a transform of torch.func, raises
            with suppress(RuntimeError), unobserved():
                most = round(_VALUES ** (1 / max(x.dim(), 1)))
                steps = [max(-(-extent // most), 1) for extent in x.shape]
                some = x.detach()[tuple([slice(start % step, None, step) for step in steps])]
                least = 0.0 if type(x) is torch.nn.Parameter else _ROUNDING
                return cls(described, rounding_of(x.dtype, least), wide(some).clone(), start)
        return cls(f"{described} that is sparse, or has no values", 0.0, torch.empty(0, device="cpu"))


def rounding_of(dtype: torch.dtype, least: float = 0.0) -> float:
    """The difference that counts as rounding, relative to the largest value; 0 for integers."""
    is_exact = not (dtype.is_floating_point or dtype.is_complex)
    return 0.0 if is_exact else max(torch.finfo(dtype).eps ** 0.5, least)


def wide(x: torch.Tensor) -> torch.Tensor:
    """The values of a tensor on the host, in the widest dtype."""
    return x.detach().cpu().to(torch.complex128 if x.is_complex() else torch.float64).resolve_conj().contiguous()


class Samples:
    """The samples of this worker that no backward has compared yet."""

    def __init__(self) -> None:
        self._waiting: list[Sample] = []
        self._passed = 0  # tensors since the last backward, also those beyond _MOST
        self._left = _FIRST  # backwards that will compare

    def keep(self, x: torch.Tensor) -> None:
        """Keep some values of a plain tensor, outside of backwards: there, workers do not compute in one order."""
        if not self._left or current_graph_task_id() != -1 or not is_comparable(x):
            return
        if x.requires_grad and x.numel() == 1 and type(x) is torch.Tensor:  # may be the loss of this worker's block
            return
        self._passed += 1
        if len(self._waiting) < _MOST:
            with aside():
                self._waiting.append(Sample.of(x, _FIRST - self._left))

    def take(self) -> tuple[int, list[Sample]]:
        """The number of tensors since the last backward, and their samples in that order. They count as compared then.

        Only if two workers have the same number are their samples those of the same tensors: one worker alone may have
        computed something to print it.
        """
        taken = self._passed, self._waiting
        self._passed, self._waiting, self._left = 0, [], self._left - bool(self._passed)
        return taken
