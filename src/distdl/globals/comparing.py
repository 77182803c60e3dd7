"""Comparing what every worker has whole: bits that travel with gradients, and how far apart two copies are.

The bits follow from all of a tensor. Gradients are added up over n workers, and so are the bits: the sum of each is 0
or n if all workers have the same. Only if it is not, the tensor itself is compared. Differences of rounding are none.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from distdl.globals.context import Context
from distdl.partition.sharing import gather_values

BITS = 16  # that travel with gradients
_MIXING = 0x9E3779B97F4A7C15  # (odd: the highest bits of a product follow from all bits)
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS = 4096  # numbers that have a factor each
_SHORTEST = 1021  # numbers of such a row (more, shorter rows take longer)
_FIRST = 4  # backwards by a parameter of no distributed model in which it is compared


class Looks:
    """How often each parameter that belongs to no distributed model has been compared. The key is its memory.

    (A weak reference to a parameter would stop ``torch.utils.swap_tensors``, so its storage is referred to.)
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[StorageWeakRef, int]] = {}
        self._most = 64  # how many there are before those that are gone are left out

    @classmethod
    def of(cls, context: Context) -> Looks:
        """Those of a world."""
        found: Looks = context.comm.kept.setdefault(cls, cls())
        return found

    def come(self, one: torch.Tensor) -> bool:
        """Whether a parameter is compared this time."""
        key = one.untyped_storage()._cdata, int(one.storage_offset())
        reference, times = self._seen.get(key) or (StorageWeakRef(one.untyped_storage()), 0)
        if times == _FIRST:
            return False
        self._seen[key] = reference, times + 1
        if len(self._seen) > self._most:
            self._seen = {key: kept for key, kept in self._seen.items() if not kept[0].expired()}
            self._most = 2 * len(self._seen) + 64
        return True


def is_comparable(one: torch.Tensor | None) -> bool:
    """Whether a tensor has values from which bits can follow."""
    if one is None or type(one) not in (torch.Tensor, torch.nn.Parameter):  # (quantised weights know few functions)
        return False
    return one.layout is torch.strided and not one.is_meta and one.numel() > 0


def differ(sums: torch.Tensor, context: Context) -> bool:
    """Whether bits were not the same on all workers, over which these are their sums.

    A sum that no bits have, as nan, is a difference, too: MPI may have added up messages of another call.
    """
    return any(n not in (0, len(context.everyone)) for n in sums.tolist())


def check_same(context: Context, one: torch.Tensor | None, name: str, rule: str, rounding: float = 0.0) -> None:
    """Compare a tensor with that of worker 0. Collective.

    Nothing is compared where workers have tensors of other names, shapes or dtypes: these are not one variable.

    Args:
        one: the tensor; None on a worker that has none.
        rule: what the error says, of ``name``, ``worker``, ``apart`` and ``largest``.
        rounding: a smaller difference of floats is none, as a share of the largest value; at least sqrt(eps).
    Raises: ValueError, the same on every worker, if they differ by more than rounding.
    """
    context.comm.where = what = "comparing weights"
    mine = None if one is None else (name, tuple(one.shape), str(one.dtype))
    told = gather_values(context.comm, context.everyone, what, mine)
    if one is None or any(theirs != mine for theirs in told):
        return
    cells = bytes_of(one)
    context.comm.through.broadcast(context.everyone, cells).wait()
    wide = torch.complex128 if one.is_complex() else torch.float64
    own, first = one.detach().cpu().to(wide), cells.view(one.dtype).reshape(one.shape).to(wide)
    same = (own == first) | (own.isnan() & first.isnan())
    apart = (own - first).abs().nan_to_num(torch.inf).masked_fill(same, 0).max()
    far = gather_values(context.comm, context.everyone, what, float(apart))
    largest = float(first.abs().nan_to_num(0.0, 0.0, 0.0).max())
    worker = max(range(len(far)), key=far.__getitem__)
    is_exact = not (one.is_floating_point() or one.is_complex())
    rounding = 0.0 if is_exact else max(torch.finfo(one.dtype).eps ** 0.5, rounding)
    if far[worker] > rounding * largest:
        raise ValueError(rule.format(name=name, worker=worker, apart=far[worker], largest=largest))


def bytes_of(one: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, as a tensor of bytes by itself."""
    return one.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def bits_of(one: torch.Tensor, number: int = 0) -> torch.Tensor:
    """Some that follow from all bits of a tensor, and from a number. (It waits for no device.)

    Each number of the tensor counts by its place: one factor for each, or for rows of them. Factors and lengths of rows
    are odd, so that what changes all numbers alike (a sign, an exponent) changes their sums.
    """
    one = one.detach().resolve_conj().resolve_neg()
    cells = torch.view_as_real(one) if one.is_complex() else one
    numbers = _in_memory(cells.view(_WHOLE_NUMBERS[cells.element_size()]))
    count = numbers.numel()
    if count > _ROWS:
        length = max(-(-count // _ROWS), _SHORTEST) | 1
        full = count - count % length
        # (added up in a wider kind, it takes ten times longer)
        kind = None if numbers.dtype is torch.int8 else numbers.dtype
        rows = numbers[:full].view(-1, length).sum(1, dtype=kind)
        numbers = torch.cat([rows, numbers[full:]]) if full < count else rows
    factors, shifts = _constants(numbers.numel(), one.device)
    if numbers.dtype is torch.int64:  # (else two numbers that change only in sign would leave the sum as it is)
        numbers = numbers ^ (numbers >> 32)
    total = (numbers.to(torch.int64) * factors).sum()
    if number:
        total = total + ((number * _MIXING + (1 << 63)) % (1 << 64) - (1 << 63))
    return (total >> shifts) & 1


def _in_memory(x: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor along one dim, in the order in which they lie in memory."""
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    return x.reshape(-1)


@lru_cache(256)
def _constants(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd factors, and by how much the highest bits are shifted."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_MIXING)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) | np.uint64(1)
    shifts = torch.arange(64 - BITS, 64, device=device)
    return torch.from_numpy(mixed.view(np.int64)).to(device, non_blocking=True), shifts
