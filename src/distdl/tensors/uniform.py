"""Random numbers by place: each follows from a key and from its element's place in the global tensor.

Workers make the numbers of their own blocks, in any order and without a message, and together they have what one worker
has alone. No state is kept, and torch's generators are not drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from distdl.geometry.boxes import Box

Key = tuple[int, ...]
Value = Callable[[torch.Tensor], torch.Tensor]

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_KEY_STEP = 0xD1B54A32D192ED03  # not _STEP: a word must not be what is added to it at some place, mixed
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
    strides = [prod(extents[dim + 1 :]) for dim in range(len(extents))]
    origin = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    if block.numel():
        _fill(block, origin, strides, _words(key), value)
    return block


def _fill(
    block: torch.Tensor, origin: int, strides: Sequence[int], words: tuple[int, int], value: Value | None
) -> None:
    if block.numel() > _AT_ONCE:
        dim = next(dim for dim, extent in enumerate(block.shape) if extent > 1)
        half = block.shape[dim] // 2
        _fill(block.narrow(dim, 0, half), origin, strides, words, value)
        rest = block.narrow(dim, half, block.shape[dim] - half)
        _fill(rest, origin + half * strides[dim], strides, words, value)
        return
    places = torch.full((), origin, dtype=torch.int64, device=block.device)
    for extent, stride in zip(block.shape, strides, strict=True):
        places = places.unsqueeze(-1) + torch.arange(extent, device=block.device) * stride
    mixed = places.mul_(_signed(_STEP)).add_(_signed(words[0]))
    mixed = _mix(_mix(mixed).bitwise_xor_(_signed(words[1])))
    u = mixed.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).double().mul_(2.0**-53)
    block.copy_(u if value is None else value(u))


def _mix(x: torch.Tensor) -> torch.Tensor:
    for by, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        # (torch shifts in copies of the sign, which have to go)
        x = x.bitwise_xor_((x >> by).bitwise_and_((1 << (64 - by)) - 1)).mul_(_signed(factor))
    return x


def _words(key: Key) -> tuple[int, int]:
    """Two words of 64 bits that depend on all of a key."""
    word, words = len(key), []
    for number in (*key, 0, 0):
        word = (word + number + _KEY_STEP) % 2**64
        for by, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            word = (word ^ (word >> by)) * factor % 2**64
        words.append(word)
    return words[-2], words[-1]


def _signed(word: int) -> int:
    """The number that a 64-bit word is in two's complement."""
    return word - 2**64 if word >= 2**63 else word
