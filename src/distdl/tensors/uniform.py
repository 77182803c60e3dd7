"""Random numbers by place: each follows from a key and from its element's place in the global tensor.

Workers make the numbers of their own blocks, in any order and without a message, and together they have what one worker
has alone. No state is kept, and torch's generators are not drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, prod

import numpy as np
import torch
from numpy.typing import NDArray

from distdl.geometry.boxes import Box

Key = tuple[int, ...]
Value = Callable[[torch.Tensor], torch.Tensor]

_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # of the mixing: a shift and a factor
_KEY_STEP = 0xD1B54A32D192ED03  # not _STEP: a word must not be what is added to it at some place, mixed
_BITS = 53  # of a number
_AT_ONCE = 1 << 15  # elements whose 64-bit words stay in a core's cache


def uniform_block(
    key: Key,
    box: Box,
    extents: Sequence[int],
    value: Value | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The block of a global random tensor that lies in a box.

    Args:
        key: integers; another key gives other numbers.
        box: of the block, in cells of the global tensor.
        extents: shape of the global tensor.
        value: what an element is of its number u, which is uniform in [0, 1), in float64; u itself if not given.
        dtype: of the result.
    Source: SplitMix64's mixing function, applied twice to place and key (Steele, Lea & Flood, OOPSLA 2014).
    """
    block = torch.empty([stop - start for start, stop in box], dtype=dtype, device=device)
    for piece, numbers in _numbers(block, key, box, extents):
        u = numbers.double().mul_(2.0**-_BITS)
        piece.copy_(u if value is None else value(u))
    return block


def mask_block(
    key: Key, box: Box, extents: Sequence[int], p: float, device: torch.device | None = None
) -> torch.Tensor:
    """Where a block of random numbers is at least p: ``uniform_block(key, box, extents) >= p``, of dtype bool.

    Args:
        p: from 0 to 1.
    """
    block = torch.empty([stop - start for start, stop in box], dtype=torch.bool, device=device)
    least = ceil(p * 2.0**_BITS)  # u is a whole number of steps of 2^-53, and the product is exact
    for piece, numbers in _numbers(block, key, box, extents):
        if piece.is_cpu:
            np.greater_equal(numbers.numpy(), least, out=piece.numpy())  # takes half of torch's time
        else:
            torch.ge(numbers, least, out=piece)
    return block


def _numbers(
    block: torch.Tensor, key: Key, box: Box, extents: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of a block, and their random whole numbers below 2^53, in int64."""
    strides = [prod(extents[dim + 1 :]) for dim in range(len(extents))]
    origin = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    words = _words(key)
    mixed = _mixed if block.is_cpu else _mixed_on(block.device)
    block, strides = _merged(block, strides)
    for piece, first in _pieces(block, origin, strides):
        yield piece, mixed(piece.shape, first, strides, words)


def _merged(block: torch.Tensor, strides: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """The block with dims merged into one whose places follow one another at equal steps."""
    extents: list[int] = []
    steps: list[int] = []
    for extent, stride in zip(block.shape, strides, strict=True):
        if steps and steps[-1] == extent * stride:
            extents[-1] *= extent
            steps[-1] = stride
        else:
            extents.append(extent)
            steps.append(stride)
    return block.view(tuple(extents)), steps


def _pieces(block: torch.Tensor, origin: int, strides: Sequence[int]) -> Iterator[tuple[torch.Tensor, int]]:
    """Parts of a block that fit into a core's cache, and the places of their first elements."""
    if block.numel() > _AT_ONCE:
        dim = next(dim for dim, extent in enumerate(block.shape) if extent > 1)
        half = block.shape[dim] // 2
        yield from _pieces(block.narrow(dim, 0, half), origin, strides)
        rest = block.narrow(dim, half, block.shape[dim] - half)
        yield from _pieces(rest, origin + half * strides[dim], strides)
    elif block.numel():
        yield block, origin


def _mixed(shape: Sequence[int], origin: int, strides: Sequence[int], words: tuple[int, int]) -> torch.Tensor:
    """The numbers of some places. (NumPy has integers without a sign, and takes half of torch's time.)"""
    x = np.array([(origin * _STEP + words[0]) % 2**64], dtype=np.uint64)
    for extent, stride in zip(shape, strides, strict=True):
        x = (x[:, None] + np.arange(extent, dtype=np.uint64) * np.uint64(stride * _STEP % 2**64)).ravel()
    shifted = np.empty_like(x)
    _mix_in_place(x, shifted)
    np.bitwise_xor(x, np.uint64(words[1]), out=x)
    _mix_in_place(x, shifted)
    np.right_shift(x, np.uint64(64 - _BITS), out=x)
    return torch.from_numpy(x.view(np.int64)).view(tuple(shape))


def _mix_in_place(x: NDArray[np.uint64], shifted: NDArray[np.uint64]) -> None:
    for by, factor in _ROUNDS:
        np.bitwise_xor(x, np.right_shift(x, np.uint64(by), out=shifted), out=x)
        if factor > 1:
            np.multiply(x, np.uint64(factor), out=x)


def _mixed_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """The same, by torch on a device."""

    def mixed(shape: Sequence[int], origin: int, strides: Sequence[int], words: tuple[int, int]) -> torch.Tensor:
        places = torch.full((), origin, dtype=torch.int64, device=device)
        for extent, stride in zip(shape, strides, strict=True):
            places = places.unsqueeze(-1) + torch.arange(extent, device=device) * stride
        x = places.mul_(_signed(_STEP)).add_(_signed(words[0]))
        return _shifted(_mix(_mix(x).bitwise_xor_(_signed(words[1]))), 64 - _BITS)

    return mixed


def _mix(x: torch.Tensor) -> torch.Tensor:
    for by, factor in _ROUNDS:
        x = x.bitwise_xor_(_shifted(x, by)).mul_(_signed(factor))
    return x


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    # torch shifts in copies of the sign bit, which have to be cleared
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _words(key: Key) -> tuple[int, int]:
    """Two words of 64 bits that depend on all of a key."""
    word, words = len(key), []
    for number in (*key, 0, 0):
        word = (word + number + _KEY_STEP) % 2**64
        for by, factor in _ROUNDS:
            word = (word ^ (word >> by)) * factor % 2**64
        words.append(word)
    return words[-2], words[-1]


def _signed(word: int) -> int:
    """The number that a 64-bit word is in two's complement."""
    return word - 2**64 if word >= 2**63 else word
