"""Tensors as MPI wants them, and point-to-point messages under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from distdl.comm import Part, Pending, Traffic, deliver

Shape = tuple[int, ...]

# MPI counts are 32-bit integers; larger tensors go in pieces
PIECE_BYTES = 1 << 30
BYTE, memory_at = MPI.BYTE, MPI.buffer.fromaddress
SHORTEST_RUN = 64  # bytes; tensors in shorter runs are packed if they are larger than SHORT_RUNS
SHORT_RUNS = 1 << 18
TYPES = {
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.int8: MPI.INT8_T, torch.int16: MPI.INT16_T, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T, torch.uint16: MPI.UINT16_T, torch.uint32: MPI.UINT32_T, torch.uint64: MPI.UINT64_T,
}  # fmt: skip


_all_through = MPI.Request.Testall


class Messages(Pending):
    """Point-to-point messages under way, and the memory that has to live until they are through."""

    __slots__ = ("_complete", "_deliveries", "_memory", "_requests", "_workers")

    def __init__(
        self,
        finish: Callable[..., None],
        requests: list[MPI.Request],
        workers: Sequence[int],
        memory: object,
        deliveries: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        self._complete, self._requests, self._workers = finish, requests, workers
        self._memory, self._deliveries = memory, deliveries

    def wait(self) -> None:
        requests, self._requests = self._requests, []
        if requests and not _all_through(requests):
            self._complete(requests, self._workers, self._memory)
        for tensor, room in self._deliveries:
            deliver(tensor, room)
        self._memory, self._deliveries = None, ()


class Runs:
    """How MPI reads and writes tensors that are not contiguous where they lie: types, made once for each shape.

    Attributes:
        most: how many are kept; those unused for longest are freed first.
    """

    def __init__(self, most: int = 256) -> None:
        self.most = most
        self._types: OrderedDict[Any, tuple[MPI.Datatype, int] | None] = OrderedDict()

    def of(self, shape: Shape, strides: Shape, width: int) -> tuple[MPI.Datatype, int] | None:
        """The MPI type of a tensor, and the bytes from its first element to its last; None if it has to be packed.

        Args:
            shape, strides: in elements.
            width: bytes of an element.
        """
        key = (shape, strides, width)
        if key in self._types:
            self._types.move_to_end(key)
            return self._types[key]
        self._types[key] = _describe(shape, strides, width)
        if len(self._types) > self.most:
            _, unused = self._types.popitem(last=False)
            if unused is not None:
                unused[0].Free()
        return self._types[key]


def _describe(shape: Shape, strides: Shape, width: int) -> tuple[MPI.Datatype, int] | None:
    run, nbytes = width, prod(shape) * width
    dims = [(n, by * width) for n, by in zip(shape, strides, strict=True) if n > 1]
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    reach = run
    for n, by in sorted(dims, key=lambda dim: dim[1]):
        if by < reach:
            return None  # the same memory several times
        reach += (n - 1) * by
    if nbytes > PIECE_BYTES or (run < SHORTEST_RUN and nbytes > SHORT_RUNS):
        return None
    kind = BYTE.Create_contiguous(run)
    for n, by in reversed(dims):  # in the order of a contiguous tensor, which may be at the other end
        narrow, kind = kind, kind.Create_hvector(n, 1, by)
        narrow.Free()
    return kind.Commit(), reach


_runs = Runs()


def _type_of(tensor: torch.Tensor) -> tuple[MPI.Datatype, int] | None:
    return _runs.of(tensor.shape, tensor.stride(), tensor.element_size())


def lies_in_runs(tensor: torch.Tensor) -> bool:
    """Whether MPI can read and write a tensor where it lies though it is not contiguous, and packing is not faster."""
    return not (tensor.is_contiguous() or tensor.is_cuda) and _type_of(tensor) is not None


def pieces(tensor: torch.Tensor, typed: bool = False) -> list[Any]:
    """The tensor's memory as MPI wants it: ``[buffer, count, type]``, in as many pieces as needed."""
    address, total = tensor.data_ptr(), tensor.nbytes
    if not tensor.is_contiguous():
        described = _type_of(tensor)
        assert described is not None, "a tensor that does not lie in runs has to be packed"
        return [[memory_at(address, described[1]), 1, described[0]]]
    if not typed and 0 < total <= PIECE_BYTES:
        return [[memory_at(address, total), total, BYTE]]
    width, kind = (tensor.element_size(), TYPES[tensor.dtype]) if typed else (1, BYTE)
    step = PIECE_BYTES // width * width
    found = []
    for start in range(0, total, step):
        length = min(step, total - start)
        found.append([memory_at(address + start, length), length // width, kind])
    return found


class Place(NamedTuple):
    """A part of a tensor as MPI finds it from the tensor's address.

    Attributes:
        tensor: which of the tensors.
        offset, reach: bytes to its first element, and from there to the end of its last.
        runs: shape, strides and width of what does not lie in one run; None if it does.
    """

    worker: int
    tensor: int
    offset: int
    reach: int
    runs: tuple[Shape, Shape, int] | None

    @classmethod
    def of(cls, part: Part) -> Place | None:
        """None if the part has to be packed, or goes in pieces."""
        layout = part.shape, part.strides, part.dtype.itemsize
        dims = [(n, by) for n, by in zip(part.shape, part.strides, strict=True) if n > 1]
        if all(by == prod(n for n, _ in dims[d + 1 :]) for d, (_, by) in enumerate(dims)):
            nbytes = prod(part.shape) * part.dtype.itemsize
            return None if nbytes > PIECE_BYTES else cls(part.worker, part.place, part.offset, nbytes, None)
        described = _runs.of(*layout)
        return described and cls(part.worker, part.place, part.offset, described[1], layout)

    def at(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """As MPI wants it: ``[buffer, count, type]``."""
        _, tensor, offset, reach, runs = self
        memory = memory_at(tensors[tensor].data_ptr() + offset, reach)
        if runs is None:
            return [memory, reach, BYTE]
        described = _runs.of(*runs)
        assert described is not None, "a part that does not lie in runs has no place"
        return [memory, 1, described[0]]


class Places:
    """The messages of an exchange as MPI finds them.

    Attributes:
        direct: whether it finds all of them. Otherwise some have to be packed, or go in pieces.
    """

    def __init__(self, traffic: Traffic) -> None:
        sends, receives = ([Place.of(part) for part in parts] for parts in (traffic.sends, traffic.receives))
        self.direct = None not in sends and None not in receives
        self.sends, self.receives = ([place for place in places if place] for places in (sends, receives))
        self.workers = [place.worker for place in (*self.receives, *self.sends)]
