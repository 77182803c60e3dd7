"""Small vectors, as the moments of a normalisation: as arrays of NumPy on the CPU, and as tensors elsewhere.

An operator of torch costs some microseconds however small its tensor is, and one of NumPy a fifth of that. A formula is
written once, with what both kinds have: arithmetic, indices, ``reshape`` and ``sum(dims, keepdims=True)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def as_array(tensor: torch.Tensor) -> Any:
    """A tensor as formulas take it, in the same memory."""
    return tensor.detach().numpy() if tensor.is_cpu else tensor.detach()


def in_float64(tensors: Sequence[torch.Tensor]) -> Any:
    """Small tensors one behind the other, in one dim and in float64."""
    if tensors[0].is_cpu:
        return np.concatenate([one.numpy() for one in tensors], None, dtype=np.float64)
    return torch.cat([one.reshape(-1) for one in tensors]).double()


def as_tensor(found: Any) -> torch.Tensor:
    """The tensor of what a formula has found, in the same memory."""
    return found if isinstance(found, torch.Tensor) else torch.from_numpy(found)
