"""Packing: several tensors as one vector, so that they move as one message."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from distdl.geometry.boxes import Shape


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all tensors, in their order, as one vector. (Of a single one that has any: a view, if it can.)"""
    full = [tensor.reshape(-1) for tensor in tensors if tensor.numel()]
    return torch.cat(full) if len(full) > 1 else full[0] if full else tensors[0].reshape(-1)


def unpack(vector: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """The tensors of these shapes of which a vector was packed: views of it."""
    sizes = [prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]
