"""Tensors as MPI wants them, and point-to-point messages under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from distdl.comm import Message, Pending, deliver

# MPI counts are 32-bit integers; larger tensors go in pieces
PIECE_BYTES = 1 << 30
SHORTEST_RUN = 64  # bytes; tensors in shorter runs are packed if they are larger than SHORT_RUNS
SHORT_RUNS = 1 << 18
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


class Runs:
    """How MPI reads and writes tensors that are not contiguous where they lie: types, made once for each shape.

    Attributes:
        most: how many are kept; those unused for longest are freed first.
    """

    def __init__(self, most: int = 256) -> None:
        self.most = most
        self._types: OrderedDict[Any, tuple[MPI.Datatype, int] | None] = OrderedDict()

    def of(self, tensor: torch.Tensor) -> tuple[MPI.Datatype, int] | None:
        """The MPI type of a tensor, and the bytes from its first element to its last; None if it has to be packed."""
        key = (tensor.shape, tensor.stride(), tensor.dtype)
        if key in self._types:
            self._types.move_to_end(key)
            return self._types[key]
        self._types[key] = _describe(tensor)
        if len(self._types) > self.most:
            _, unused = self._types.popitem(last=False)
            if unused is not None:
                unused[0].Free()
        return self._types[key]


def _describe(tensor: torch.Tensor) -> tuple[MPI.Datatype, int] | None:
    run = tensor.element_size()
    dims = [(n, by * run) for n, by in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    reach = run
    for n, by in sorted(dims, key=lambda dim: dim[1]):
        if by < reach:
            return None  # the same memory several times
        reach += (n - 1) * by
    if tensor.nbytes > PIECE_BYTES or (run < SHORTEST_RUN and tensor.nbytes > SHORT_RUNS):
        return None
    kind = MPI.BYTE.Create_contiguous(run)
    for n, by in reversed(dims):  # in the order of a contiguous tensor, which may be at the other end
        narrow, kind = kind, kind.Create_hvector(n, 1, by)
        narrow.Free()
    return kind.Commit(), reach


_runs = Runs()


def lies_in_runs(tensor: torch.Tensor) -> bool:
    """Whether MPI can read and write a tensor where it lies though it is not contiguous, and packing is not faster."""
    return not (tensor.is_contiguous() or tensor.is_cuda) and _runs.of(tensor) is not None


def pieces(tensor: torch.Tensor, typed: bool = False) -> list[Any]:
    """The tensor's memory as MPI wants it: ``[buffer, count, type]``, in as many pieces as needed."""
    address, total = tensor.data_ptr(), tensor.nbytes
    if not tensor.is_contiguous():
        described = _runs.of(tensor)
        assert described is not None, "a tensor that does not lie in runs has to be packed"
        return [[MPI.buffer.fromaddress(address, described[1]), 1, described[0]]]
    if not typed and 0 < total <= PIECE_BYTES:
        return [[MPI.buffer.fromaddress(address, total), total, MPI.BYTE]]
    width, kind = (tensor.element_size(), TYPES[tensor.dtype]) if typed else (1, MPI.BYTE)
    step = PIECE_BYTES // width * width
    found = []
    for start in range(0, total, step):
        length = min(step, total - start)
        found.append([MPI.buffer.fromaddress(address + start, length), length // width, kind])
    return found
