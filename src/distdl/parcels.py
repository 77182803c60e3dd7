"""Parcels: several parts of tensors that go to one worker, as one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distdl.comm import Message, empty


def by_worker(messages: Sequence[Message]) -> dict[int, list[torch.Tensor]]:
    """The parts that go to, or come from, each worker, in their order."""
    parts: dict[int, list[torch.Tensor]] = {}
    for worker, tensor in messages:
        parts.setdefault(worker, []).append(tensor)
    return parts


def packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts as one message: a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])


def room(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where the message arrives that has these parts."""
    first = parts[0]
    return first if len(parts) == 1 else empty((sum(part.numel() for part in parts),), first.dtype, first)


def unpack(room: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy what has arrived to its parts."""
    if len(parts) > 1:
        for part, piece in zip(parts, room.split([part.numel() for part in parts]), strict=True):
            part.copy_(piece.view(part.shape))
