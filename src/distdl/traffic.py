"""Traffic: what a worker sends and receives in an exchange that comes again and again, as places in tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Message = tuple[int, torch.Tensor]


class Part(NamedTuple):
    """What one message holds: a part of one of several tensors, which are there only when the message is sent.

    Attributes:
        worker: the other end.
        place: which of the tensors.
        slices: what of it; none stand for all.
        offset: from the first element of that tensor to the first of the part, in bytes.
        shape, strides, dtype: of the part.
    """

    worker: int
    place: int
    slices: tuple[slice, ...]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, worker: int, place: int, slices: tuple[slice, ...], laid: torch.Tensor) -> Part:
        """The part of a tensor that will be laid out as the given one is, which begins its memory."""
        part = laid[slices]
        offset = int(part.storage_offset()) * laid.element_size()
        return cls(worker, place, slices, offset, tuple(part.shape), part.stride(), laid.dtype)

    def message(self, tensors: Sequence[torch.Tensor]) -> Message:
        """The message, now that the tensors are there."""
        tensor = tensors[self.place]
        return self.worker, tensor[self.slices] if self.slices else tensor


class Traffic:
    """The messages of an exchange, made once for tensors of some layouts and used again and again.

    Attributes:
        sends, receives: as for :meth:`Communicator.exchange`.
        prepared: what a back-end wants to remember about them.
    """

    __slots__ = ("prepared", "receives", "sends")

    def __init__(self, sends: Sequence[Part], receives: Sequence[Part]) -> None:
        self.sends = sends
        self.receives = receives
        self.prepared: Any = None

    def messages(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Message], list[Message]]:
        """What is sent and what is received, now that the tensors are there."""
        return [part.message(tensors) for part in self.sends], [part.message(tensors) for part in self.receives]
