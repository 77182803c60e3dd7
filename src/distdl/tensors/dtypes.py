"""Dtypes: which tensors move, which can be added up, and which carry gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.uint16, torch.uint32,
    torch.uint64, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
HALVES = (torch.float16, torch.bfloat16)  # torch adds these up in float32
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_MOVED_ONLY = {torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2}
RARE = frozenset([*_MOVED_ONLY, torch.complex32])
"""Dtypes with which many of torch's functions do not compute, which they say only of tensors that have cells."""


def dtype_code(dtype: torch.dtype) -> int:
    """The number that stands for a dtype in messages.

    Raises: ValueError for a dtype that distdl does not move (quantised ones).
    """
    if dtype not in _CODES:
        raise ValueError(f"distdl cannot move tensors of {dtype}")
    return _CODES[dtype]


def can_be_added(dtype: torch.dtype) -> bool:
    """Whether torch adds tensors of this dtype: not the small floats, nor the wide unsigned integers."""
    return dtype not in _MOVED_ONLY


def carries_gradients(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype have gradients, which have to be added up."""
    return (dtype.is_floating_point or dtype.is_complex) and can_be_added(dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, torch casts nothing by itself. (For meta tensors it has no autocast.)"""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
