"""Tensors as MPI wants them, and point-to-point messages under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from distdl.comm import Message, Pending, deliver

# MPI counts are 32-bit integers; larger tensors go in pieces
PIECE_BYTES = 1 << 30
TYPES = {
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.int8: MPI.INT8_T, torch.int16: MPI.INT16_T, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T, torch.uint16: MPI.UINT16_T, torch.uint32: MPI.UINT32_T, torch.uint64: MPI.UINT64_T,
}  # fmt: skip


class Messages(Pending):
    """Point-to-point messages under way, and the tensors that have to live until they are through."""

    __slots__ = ("_complete", "_ready", "_receives", "_requests", "_rooms")

    def __init__(
        self,
        finish: Callable[..., None],
        requests: list[MPI.Request],
        receives: Sequence[Message],
        rooms: Sequence[Message],
        ready: Sequence[Message],
    ) -> None:
        self._complete, self._requests = finish, requests
        self._receives, self._rooms, self._ready = receives, rooms, ready

    def wait(self) -> None:
        requests, self._requests = self._requests, []
        if requests and not MPI.Request.Testall(requests):
            workers = [worker for worker, _ in (*self._rooms, *self._ready)]
            self._complete(requests, workers, self._rooms, self._ready)
        for (_, tensor), (_, room) in zip(self._receives, self._rooms, strict=True):
            deliver(tensor, room)
        self._receives, self._rooms, self._ready = (), (), ()


def pieces(tensor: torch.Tensor, typed: bool = False) -> list[Any]:
    """The tensor's memory as MPI wants it: ``[buffer, count, type]``, in as many pieces as needed."""
    address, total = tensor.data_ptr(), tensor.nbytes
    if not typed and 0 < total <= PIECE_BYTES:
        return [[MPI.buffer.fromaddress(address, total), total, MPI.BYTE]]
    width, kind = (tensor.element_size(), TYPES[tensor.dtype]) if typed else (1, MPI.BYTE)
    step = PIECE_BYTES // width * width
    found = []
    for start in range(0, total, step):
        length = min(step, total - start)
        found.append([MPI.buffer.fromaddress(address + start, length), length // width, kind])
    return found
