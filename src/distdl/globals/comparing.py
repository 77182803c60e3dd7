"""Comparing what every worker has whole: bits that follow from all of a tensor, and how far apart two of them are."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from distdl.globals.samples import BITS, MIXING, mixed_of
from distdl.partition.sharing import gather_values
from distdl.transport import Communicator

_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS = 4096  # numbers that have a factor each
_SHORTEST = 1021  # of a tensor with more numbers: how many are added up first, at least
_FIRST = 4  # backwards by a parameter of no distributed model in which it is looked at


class Looks:
    """How often parameters of no distributed model have been looked at, by their memory.

    (A weak reference to a parameter itself would keep torch from swapping it for another.)
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[StorageWeakRef, int]] = {}
        self._most = 64  # how many there are before those that are gone are left out

    def times(self, one: torch.Tensor) -> int | None:
        """How often a parameter has been looked at, if it is looked at once more."""
        key = _place_of(one)
        reference, times = self._seen.get(key) or (StorageWeakRef(one.untyped_storage()), 0)
        if times < _FIRST:
            self._seen[key] = reference, times + 1
            if len(self._seen) > self._most:
                self._seen = {key: kept for key, kept in self._seen.items() if not kept[0].expired()}
                self._most = 2 * len(self._seen) + 64
            return times
        return None

    def forget(self, one: torch.Tensor) -> None:
        """Let it be looked at again."""
        self._seen.pop(_place_of(one), None)


def _place_of(one: torch.Tensor) -> tuple[int, int]:
    return one.untyped_storage()._cdata, int(one.storage_offset())


def farthest(comm: Communicator, group: tuple[int, ...], one: torch.Tensor, what: str) -> tuple[int, float, float]:
    """Whose copy of a tensor differs most from worker 0's, by how much, and the largest value there. Collective.

    Of one shape and dtype everywhere. The first worker of the group if none differs by more than rounding may.
    """
    cells = bytes_of(one)
    comm.through.broadcast(group, cells).wait()
    wide = torch.complex128 if one.is_complex() else torch.float64
    mine, first = one.detach().cpu().to(wide), cells.view(one.dtype).reshape(one.shape).to(wide)
    same = (mine == first) | (mine.isnan() & first.isnan())
    apart = (mine - first).abs().nan_to_num(torch.inf).masked_fill(same, 0).max()
    told = gather_values(comm, group, what, float(apart))
    largest = float(first.abs().nan_to_num(0.0, 0.0, 0.0).max())
    worker = max(range(len(told)), key=told.__getitem__)
    rounding = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() or one.is_complex() else 0.0
    return (worker if told[worker] > rounding * largest else 0), told[worker], largest


def bytes_of(one: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, as a tensor of bytes by itself."""
    return one.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def bits_of_all(one: torch.Tensor, turn: int = 0, number: int = 0) -> torch.Tensor:
    """Some that follow from all bits of a tensor, and from a number. (It waits for no device.)

    Each number of the tensor counts by its place: one factor for each, or for rows of them, whose lengths follow from
    the turn. They are odd, so that what changes all numbers alike (a sign, an exponent) changes their sums.
    """
    one = one.resolve_conj().resolve_neg()
    cells = torch.view_as_real(one) if one.is_complex() else one
    numbers = _in_memory(cells.view(_WHOLE_NUMBERS[cells.element_size()]))
    count = numbers.numel()
    if count > _ROWS:
        length = (max(_SHORTEST, -(-count // _ROWS)) + 2 * (turn % 16)) | 1
        rows = count // length
        first = (count - rows * length) * (turn % 2)  # (the last ones, that fill no row, are in every second turn)
        # (added up in a wider kind, it takes ten times longer)
        kind = None if numbers.dtype is torch.int8 else numbers.dtype
        numbers = numbers[first : first + rows * length].view(rows, length).sum(1, dtype=kind)
    factors, shifts = _constants(numbers.numel(), one.device)
    if numbers.dtype is torch.int64:  # (else signs alone, that change twice, change no sum)
        numbers = numbers ^ (numbers >> 32)
    total = (numbers.to(torch.int64) * factors).sum()
    return ((total + mixed_of(number) if number else total) >> shifts) & 1


def differ(sums: torch.Tensor, workers: int) -> bool:
    """Whether bits were not the same on all workers, over which these are their sums."""
    return any(0 < n < workers for n in sums.tolist())


def _in_memory(x: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor along one dim, in the order in which they lie in memory."""
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    return x.reshape(-1)


@lru_cache(256)
def _constants(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd factors, and by how much the highest bits are shifted."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(MIXING)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) | np.uint64(1)
    shifts = torch.arange(64 - BITS, 64, device=device)
    return torch.from_numpy(mixed.view(np.int64)).to(device, non_blocking=True), shifts
