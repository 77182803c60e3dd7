"""Tensors as MPI wants them, and point-to-point messages under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from distdl.backends.mpi.waiting import Waits
from distdl.transport.communicator import Addressed, Pending, Prepared, View, deliver

Shape = tuple[int, ...]

# MPI counts are 32-bit integers; larger tensors go in pieces
PIECE_BYTES = 1 << 30
BYTE, memory_at = MPI.BYTE, MPI.buffer.fromaddress
# bytes; a larger strided message is packed. Open MPI moves a contiguous message by a single copy, but a strided one in
# fragments, for which both workers have to run at the same time. In some launches that took several times as long.
LARGEST_STRIDED = 1 << 20
TYPES = {
    torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX, torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.int8: MPI.INT8_T, torch.int16: MPI.INT16_T, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T, torch.uint16: MPI.UINT16_T, torch.uint32: MPI.UINT32_T, torch.uint64: MPI.UINT64_T,
}  # fmt: skip


_all_through = MPI.Request.Testall


class Requests(Pending):
    """Point-to-point messages under way, and the memory that has to live until they are through."""

    __slots__ = ("_deliveries", "_memory", "_requests", "_waits", "_workers")

    def __init__(
        self,
        waits: Waits,
        requests: list[MPI.Request],
        workers: Sequence[int],
        memory: object,
        deliveries: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        self._waits, self._requests, self._workers = waits, requests, workers
        self._memory, self._deliveries = memory, deliveries

    def wait(self) -> None:
        requests, self._requests = self._requests, []
        try:
            through = not requests or _all_through(requests)
        except MPI.Exception as error:
            raise self._waits.mismatch(error, self._workers) from error
        if not through:
            self._waits.finish(requests, self._workers, self._memory)
        for tensor, buffer in self._deliveries:
            deliver(tensor, buffer)
        self._memory, self._deliveries = None, ()


class Datatypes:
    """How MPI reads and writes tensors that are not contiguous where they lie: datatypes, made once for each layout.

    Attributes:
        most: how many are kept; those unused for longest are freed first.
    """

    def __init__(self, most: int = 256) -> None:
        self.most = most
        self._types: OrderedDict[Any, tuple[MPI.Datatype, int] | None] = OrderedDict()

    def of(self, shape: Shape, strides: Shape, width: int) -> tuple[MPI.Datatype, int] | None:
        """The datatype of a tensor, and the bytes from its first element to its last; None if it has to be packed.

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
    segment, nbytes = width, prod(shape) * width
    dims = [(n, by * width) for n, by in zip(shape, strides, strict=True) if n > 1]
    while dims and dims[-1][1] == segment:
        segment *= dims.pop()[0]
    reach = segment
    for n, by in sorted(dims, key=lambda dim: dim[1]):
        if by < reach:
            return None  # the same memory several times
        reach += (n - 1) * by
    if nbytes > LARGEST_STRIDED:
        return None
    kind = BYTE.Create_contiguous(segment)
    for n, by in reversed(dims):  # in the order of a contiguous tensor, which may be at the other end
        narrow, kind = kind, kind.Create_hvector(n, 1, by)
        narrow.Free()
    return kind.Commit(), reach


_datatypes = Datatypes()


def _type_of(tensor: torch.Tensor) -> tuple[MPI.Datatype, int] | None:
    return _datatypes.of(tensor.shape, tensor.stride(), tensor.element_size())


def has_datatype(tensor: torch.Tensor) -> bool:
    """Whether MPI can read and write a tensor where it lies though it is not contiguous, and packing is not faster."""
    return not (tensor.is_contiguous() or tensor.is_cuda) and _type_of(tensor) is not None


def pieces(tensor: torch.Tensor, typed: bool = False) -> list[Any]:
    """The tensor's memory as MPI wants it: ``[buffer, count, type]``, in as many pieces as needed."""
    address, total = tensor.data_ptr(), tensor.nbytes
    if not tensor.is_contiguous():
        described = _type_of(tensor)
        assert described is not None, "a tensor without a datatype is packed"
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


class Region(NamedTuple):
    """A region of a tensor as MPI finds it from the tensor's address. (:class:`View` says why that is safe.)

    Attributes:
        worker: the other end of the message.
        tensor: which of the tensors.
        offset, reach: bytes to its first element, and from there to the end of its last.
        layout: shape, strides and width of what is not contiguous; None if it is.
    """

    worker: int
    tensor: int
    offset: int
    reach: int
    layout: tuple[Shape, Shape, int] | None

    @classmethod
    def of(cls, worker: int, view: View) -> Region | None:
        """None if the region has to be packed, or goes in pieces."""
        if view.is_contiguous:
            nbytes = view.nbytes
            return None if nbytes > PIECE_BYTES else cls(worker, view.tensor, view.offset, nbytes, None)
        layout = view.shape, view.strides, view.dtype.itemsize
        described = _datatypes.of(*layout)
        return described and cls(worker, view.tensor, view.offset, described[1], layout)

    def at(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """As MPI wants it: ``[buffer, count, type]``."""
        _, tensor, offset, reach, layout = self
        memory = memory_at(tensors[tensor].data_ptr() + offset, reach)
        if layout is None:
            return [memory, reach, BYTE]
        described = _datatypes.of(*layout)
        assert described is not None, "a region without a datatype is packed"
        return [memory, 1, described[0]]


class Regions(Prepared):
    """A prepared exchange as MPI finds its messages in memory.

    Attributes:
        direct: whether it finds all of them. Otherwise some have to be packed, or go in pieces.
        sending, receiving: the regions, if it does.
        workers: the other end of each message, receives first.
    """

    __slots__ = ("direct", "receiving", "sending", "workers")

    def __init__(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> None:
        super().__init__(sends, receives)
        sending, receiving = ([Region.of(*message) for message in messages] for messages in (sends, receives))
        self.direct = None not in sending and None not in receiving
        self.sending, self.receiving = ([one for one in regions if one] for regions in (sending, receiving))
        self.workers = [region.worker for region in (*self.receiving, *self.sending)]
