"""Recycled memory: large CPU tensors in pages that have been touched before.

The first touch of fresh pages costs more than a copy into them. So the memory of a large tensor from here comes back
when the last tensor that shares it dies (views and what autograd saved included), and the next tensor of about that
size gets it. At most ``pool.limit`` bytes lie idle; the environment variable ``DISTDL_RECYCLED_MEMORY`` sets it in MiB,
and 0 switches recycling off. What torch allocates itself stays with the process likewise (see :func:`keep_freed`).
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch

from distdl.environment import recycled_memory, tunes_malloc
from distdl.tensors.private_torch import disable_current_modes
from distdl.tensors.recorders import as_one_call

SMALLEST = 1 << 20  # bytes; below, the allocator of torch keeps its pages by itself


class Pool:
    """Memory that waits for its next use.

    Attributes:
        limit: most bytes that may lie idle; 0 switches recycling off.
        idle: bytes that lie idle now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.idle = 0
        self._blocks: dict[int, list[np.ndarray[Any, Any]]] = {}  # by size; no list is empty
        self._returned: deque[np.ndarray[Any, Any]] = deque()  # what has come back and is not yet among them
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Memory of at least that many bytes, which comes back when the array dies."""
        capacity = _round_up(nbytes)
        block = None
        with self._lock:
            self._sort_in()
            blocks = self._blocks.get(capacity)
            if blocks is not None:
                block = blocks.pop()
                self.idle -= capacity
                if not blocks:
                    del self._blocks[capacity]
        if block is None:
            with disable_current_modes():  # modes that count memory count the tensor over this block instead
                block = torch.empty(capacity, dtype=torch.uint8, device="cpu").numpy()
        lease = block.view(_Lease)
        lease.home = (self, block)
        return lease

    def give(self, block: np.ndarray[Any, Any]) -> None:
        """Take memory back; what exceeds the limit is freed, the sizes unused for longest first."""
        self._returned.append(block)
        # the collector may come here while this thread holds the lock: then whoever holds it sorts the block in
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        """Put what has come back among the blocks. Hold the lock."""
        while self._returned:
            block = self._returned.popleft()
            if block.nbytes > self.limit:
                continue
            blocks = self._blocks.pop(block.nbytes, [])
            blocks.append(block)
            self._blocks[block.nbytes] = blocks  # at the end of the order
            self.idle += block.nbytes
            while self.idle > self.limit:
                size, oldest = next(iter(self._blocks.items()))
                oldest.pop()
                self.idle -= size
                if not oldest:
                    del self._blocks[size]


class _Lease(np.ndarray[Any, Any]):
    """Memory on loan: a torch storage holds it, and lets it go when the last tensor over it dies."""

    home: tuple[Pool, np.ndarray[Any, Any]] | None = None

    def __del__(self) -> None:
        if self.home is not None:
            pool, block = self.home
            pool.give(block)


pool = Pool(recycled_memory())


def empty(
    shape: Sequence[int], dtype: torch.dtype, beside: torch.Tensor | None = None, channels_last: bool = False
) -> torch.Tensor:
    """An uninitialised dense tensor, in recycled memory if it is large and on the CPU.

    Args:
        beside: a tensor on the same device; the CPU if not given.
        channels_last: whether dim 1 is the last one in memory, instead of a contiguous tensor.
    """
    nbytes = prod(shape) * dtype.itemsize
    if SMALLEST <= nbytes <= pool.limit and (beside is None or beside.device.type == "cpu"):
        return _recycled(nbytes, tuple(shape), dtype, channels_last)
    device = "cpu" if beside is None else beside.device
    if channels_last:
        return torch.empty(shape, dtype=dtype, device=device, memory_format=_CHANNELS_LAST[len(shape)])
    return torch.empty(shape, dtype=dtype, device=device) if beside is None else beside.new_empty(shape, dtype=dtype)


@as_one_call
def _recycled(nbytes: int, shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> torch.Tensor:
    # the storage ends where the tensor does, for what is saved of a tensor is all of its storage
    storage = torch.frombuffer(pool.take(nbytes), dtype=torch.uint8, count=nbytes).untyped_storage()
    # set_, because a view could not be written in place once an autograd Function has returned it
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, _strides(shape, channels_last))


@cache
def keep_freed() -> None:
    """Have the C library keep up to ``pool.limit`` bytes at the end of each heap, for torch's own tensors.

    By itself, glibc gives the end of the heap back to the system as soon as some MiB are free there. So after each
    backward it gives back the activations, and the next forward touches fresh pages. Arrays above 32 MiB it always
    gives back. Other C libraries are left alone, and so is one that its own variables tune (see
    ``environment.tunes_malloc``).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or not pool.limit or tunes_malloc():
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)  # setting either threshold keeps malloc from changing both
    mallopt(_M_TRIM_THRESHOLD, min(pool.limit, _LARGEST_INT))


# of glibc's malloc.h and malloc.c
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_ON_HEAP, _LARGEST_INT = -1, -3, 32 << 20, (1 << 31) - 1


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values where they can be read by address: as they are, and not negated or conjugated when read.

    Zeros that torch keeps without memory (its derivatives of complex numbers make them) are written out.

    Raises: ValueError if there is no memory to read.
    """
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    kind = kind_without_memory(tensor)
    if kind:
        raise ValueError(f"a message needs a tensor that has data of its own; got one that is {kind}")
    return tensor.resolve_conj().resolve_neg()


def kind_without_memory(tensor: torch.Tensor) -> str:
    """What kind of tensor this is if its elements lie nowhere in memory, or only in other tensors; else empty.

    Masked tensors are of such a kind, and all others that torch makes as wrappers. (Zeros without memory are readable.)
    """
    try:
        if not tensor.numel() or tensor._is_zerotensor() or tensor.data_ptr() != 0:
            return ""
    except RuntimeError:  # some kinds raise it in place of an address
        pass
    layout = tensor.layout
    # a global tensor has a Layout there
    if tensor.is_meta or (layout is not torch.strided and isinstance(layout, torch.layout)):
        return "meta" if tensor.is_meta else str(layout)
    return f"a {type(tensor).__name__}, which wraps other tensors"


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor of the same shape and dtype on the device "meta", where torch knows little of sparse ones."""
    if tensor.layout is torch.strided:
        return tensor.to("meta")
    return torch.empty((), dtype=tensor.dtype, device="meta").expand(tensor.shape)


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a sparse one with its zeros."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a tensor is made of: of a sparse one, its indices and its values."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether dim 1 is the last one in memory, and the tensor not also contiguous."""
    layout = _CHANNELS_LAST.get(tensor.dim())
    return layout is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout)


def _strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    strides = [0] * len(shape)
    stride = 1
    for dim in (1, *range(len(shape) - 1, 1, -1), 0) if channels_last else range(len(shape) - 1, -1, -1):
        strides[dim] = stride
        stride *= max(shape[dim], 1)
    return tuple(strides)


def _round_up(nbytes: int) -> int:
    """The next multiple of an eighth of the largest power of two within: near sizes share their memory."""
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step
