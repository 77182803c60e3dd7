"""The MPI back-end, over mpi4py and any MPI.

Every wait is a non-blocking operation that is tested until it is through or a deadline has passed, so that no worker
waits for ever for one that is gone. Tensors are handed to MPI by address, whatever their dtype; sums use MPI's own
reductions where MPI knows the dtype. Tensors that MPI cannot read where they are (CUDA without a CUDA-aware MPI) are
staged through pinned memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from distdl.backends.mpi import messages
from distdl.backends.mpi.messages import TYPES, Regions, Requests, has_datatype, pieces
from distdl.backends.mpi.process import abort_on_uncaught_exceptions, is_cuda_aware
from distdl.backends.mpi.waiting import Waits
from distdl.transport.calls import Meeting
from distdl.transport.communicator import (
    SMALL_SUM,
    Addressed,
    Calls,
    CommunicationError,
    Communicator,
    Group,
    IntArray,
    Message,
    Pending,
    Prepared,
    contiguous,
    deliver,
    empty,
)
from distdl.transport.folding import begin_with

_GROUP_TAG, _MAXIMUM_TAG = 32770, 32771  # beyond the tags of exchanges
_REDUCED_BYTES = 1 << 19  # up to here, all-sums by MPI itself are faster than in parts


class MPICommunicator(Communicator):
    """A process's link to the others of an MPI communicator, which it duplicates.

    Args:
        parent: the user's communicator. Use :meth:`over`, which makes one duplicate however often it is called.
    Attributes:
        parent: the user's communicator.
    """

    absent = MPI.PROC_NULL
    _keyval: int | None = None

    def __init__(self, parent: MPI.Intracomm) -> None:
        super().__init__()
        self.rank = parent.Get_rank()
        self.size = parent.Get_size()
        self.parent = parent
        self._world = parent  # until there is a duplicate, this serves to ask who is absent
        self._duplicate: tuple[MPI.Intracomm, MPI.Request] | None = None
        self._groups: dict[Group, MPI.Intracomm] = {}
        self._handles: dict[Group, tuple[tuple[MPI.Intracomm, int], Calls]] = {}
        self._lent: dict[Group, MPI.Intracomm] = {tuple(range(self.size)): parent}
        self._cuda_aware = is_cuda_aware()
        self._waits = Waits(self, parent)
        if self.size > 1:
            abort_on_uncaught_exceptions()

    @classmethod
    def over(cls, parent: MPI.Intracomm) -> MPICommunicator:
        """The communicator over the workers of ``parent``: collective the first time, then always the same object.

        Raises: CommunicationError at the time limit, if some worker has not come. Called again, it goes on waiting.
        """
        if cls._keyval is None:
            cls._keyval = MPI.Comm.Create_keyval()
        known = parent.Get_attr(cls._keyval)
        if known is None:
            known = cls(parent)
            parent.Set_attr(cls._keyval, known)
        assert isinstance(known, MPICommunicator)
        if not known._groups:
            known._open()
        return known

    def _open(self) -> None:
        everyone = tuple(range(self.size))
        if self._duplicate is None:
            self._duplicate = self.parent.Idup()
        duplicate, through = self._duplicate
        self.where = f"the opening of a world of {self.size} workers"
        self._waits.attempt([through], everyone, memory=None)  # too long a wait here leaves nobody out of step
        del self.where
        self._world = self._groups[everyone] = duplicate
        self._waits.leaving.forget()
        self._waits = Waits(self, duplicate)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        self._check_released()
        world, requests, workers = self._world, [], []
        buffers = [(source, tensor if has_datatype(tensor) else self._landing(tensor)) for source, tensor in receives]
        ready = [(target, tensor if has_datatype(tensor) else self._readable(tensor)) for target, tensor in sends]
        for begin, ends in ((world.Irecv, buffers), (world.Isend, ready)):
            for worker, tensor in ends:
                found = [begin(piece, worker, tag) for piece in pieces(tensor)]
                requests += found
                workers += [worker] * len(found)
        deliveries = [(tensor, buffer) for (_, tensor), (_, buffer) in zip(receives, buffers, strict=True)]
        return Requests(self._waits, requests, workers, (buffers, ready), deliveries)

    def prepare(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Prepared:
        return Regions(sends, receives)

    def start(self, prepared: Prepared, tensors: Sequence[torch.Tensor], tag: int = 0) -> Pending:
        if not (isinstance(prepared, Regions) and prepared.direct and tensors[0].is_cpu):
            return super().start(prepared, tensors, tag)
        if self.released:
            self._check_released()
        receive, send = self._world.Irecv, self._world.Isend
        requests = [receive(region.at(tensors), region.worker, tag) for region in prepared.receiving]
        requests += [send(region.at(tensors), region.worker, tag) for region in prepared.sending]
        return Requests(self._waits, requests, prepared.workers, tensors)

    def broadcast(self, group: Group, tensor: torch.Tensor, tag: int = 0) -> Pending:
        comm, root = self._handle(group)
        buffer = self._readable(tensor) if self.rank == group[0] else self._landing(tensor)
        requests = [comm.Ibcast(piece, root) for piece in pieces(buffer)]
        if self.rank == group[0]:
            return self._pending(group, requests, buffer, buffer)
        return self._pending(group, requests, tensor, buffer, needs=group[:1])

    def sum(self, group: Group, x: torch.Tensor | None, y: torch.Tensor | None, tag: int = 0) -> Pending:
        tensor = x if y is None else y
        few = tensor is not None and len(group) == 2 and tensor.nbytes > SMALL_SUM
        if self.ordered or tensor is None or tensor.dtype not in TYPES or few:
            return super().sum(group, x, y, tag)
        comm, root = self._handle(group)
        if y is None:
            ready = self._readable(tensor)
            requests = [comm.Ireduce(piece, None, MPI.SUM, root) for piece in pieces(ready, typed=True)]
            return self._pending(group, requests, ready, ready)
        buffer = self._landing(y)
        begin_with(buffer, x)
        requests = [comm.Ireduce(MPI.IN_PLACE, piece, MPI.SUM, root) for piece in pieces(buffer, typed=True)]
        return self._pending(group, requests, y, buffer, needs=group)

    def all_sum(self, group: Group, x: torch.Tensor, y: torch.Tensor, tag: int = 0) -> Pending:
        if self.ordered or y.dtype not in TYPES or y.nbytes > _REDUCED_BYTES:
            return super().all_sum(group, x, y, tag)
        (comm, _), buffer, ready = self._handle(group), self._landing(y), self._readable(x)
        pairs = zip(pieces(ready, typed=True), pieces(buffer, typed=True), strict=True)
        requests = [comm.Iallreduce(own, total, MPI.SUM) for own, total in pairs]
        return self._pending(group, requests, y, buffer, ready, needs=group)

    def all_gather(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        if len(group) < 3 or tensor.is_cuda or tensor.numel() == 0 or tensor.nbytes > messages.PIECE_BYTES:
            return super().all_gather(group, tensor)
        comm, _ = self._handle(group)
        ready = self._readable(tensor)
        gathered = empty((len(group), *tensor.shape), tensor.dtype, tensor)
        memory = [MPI.buffer.fromaddress(one.data_ptr(), one.nbytes) for one in (ready, gathered)]
        count = [tensor.nbytes, MPI.BYTE]
        requests = [comm.Iallgather([memory[0], *count], [memory[1], *count])]
        self._come_together(group, requests, ready, gathered)
        ascending = np.sort(group)  # that is the order of the MPI communicator
        places = np.searchsorted(ascending, group)
        return gathered if (ascending == group).all() else gathered[torch.from_numpy(places)]

    def all_max(self, group: Group, values: IntArray) -> IntArray:
        if len(group) == 1:
            return values.copy()
        if len(group) == 2:
            return self._higher(group[0] if group[1] == self.rank else group[1], values)
        highest = values.copy()
        comm, _ = self._handle(group)
        requests = [comm.Iallreduce(MPI.IN_PLACE, [highest, len(values), MPI.INT64_T], MPI.MAX)]
        self._come_together(group, requests)
        return highest

    def _come_together(self, group: Group, requests: Sequence[MPI.Request], *memory: object) -> None:
        # In a user's own call, ``where`` still names an earlier call, in which nobody needs the others.
        self._waits.finish(requests, group, *memory, needs=group if isinstance(self.where, Meeting) else ())

    def _higher(self, other: int, values: IntArray) -> IntArray:
        """The maximum with the values of one other worker: a message each way."""
        self._check_released()
        received = np.empty_like(values)
        requests = [
            self._world.Irecv([received, len(received), MPI.INT64_T], other, _MAXIMUM_TAG),
            self._world.Isend([values, len(values), MPI.INT64_T], other, _MAXIMUM_TAG),
        ]
        Requests(self._waits, requests, (other, other), (received, values)).wait()
        return np.maximum(received, values, out=received)

    def lend(self, workers: Group) -> MPI.Intracomm:
        """An MPI communicator over these workers, in this order, for others than distdl. Collective over them, once."""
        if workers not in self._lent:
            self._lent[workers] = self._create(workers)
        return self._lent[workers]

    def release(self) -> None:
        """Free the duplicates, and the communicator that was passed in unless it is COMM_WORLD. Collective."""
        super().release()
        if self.released:
            return
        self.released = True
        self._waits.leaving.forget()
        self._handles.clear()
        self._lent.pop(tuple(range(self.size)))
        for made in (self._groups, self._lent):
            for workers in sorted(made):
                made.pop(workers).Free()
        if self._keyval is not None:
            self.parent.Delete_attr(self._keyval)
        if MPI.Comm.Compare(self.parent, MPI.COMM_WORLD) != MPI.IDENT:
            self.parent.Free()

    def _check_released(self) -> None:
        if self.released:
            raise CommunicationError(f"{self.where} belongs to a world that has been deactivated")

    def _handle(self, group: Group) -> tuple[MPI.Intracomm, int]:
        """The MPI communicator over the workers of a group, and the place of the group's root in it."""
        known = self._handles.get(group)
        if known is None:
            self._check_released()
            workers = tuple(sorted(map(int, group)))  # the integers may be NumPy's
            if workers not in self._groups:
                self._groups[workers] = self._create(workers)
            handle = self._groups[workers], workers.index(group[0])
            known = self._handles[group] = handle, self._waits.leaving.calls(workers)
        known[1].number += 1
        return known[0]

    def _create(self, workers: Group) -> MPI.Intracomm:
        self._check_released()
        # making an MPI group blocks and has no deadline, so its members come together first in a way that has one
        super().all_gather(workers, torch.zeros(1, device="cpu"))
        members = self._world.Get_group()
        chosen = members.Incl(list(workers))
        made = self._world.Create_group(chosen, _GROUP_TAG)
        chosen.Free()
        members.Free()
        return made

    def _pending(
        self, group: Group, requests: list[MPI.Request], tensor: torch.Tensor, buffer: torch.Tensor, read: Any = None,
        needs: Group = (),
    ) -> Pending:  # fmt: skip
        begun = self._position()

        def finish() -> None:
            # if another call of the group has begun since, others may be behind in that one
            self._waits.finish(requests, group, buffer, read, needs=needs if self._position() == begun else ())
            deliver(tensor, buffer)

        return Pending(finish)

    def _readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy of it that MPI can read and write by address."""
        if not tensor.is_contiguous():
            tensor = contiguous(tensor)
        if not tensor.is_cuda:
            return tensor
        if self._cuda_aware:
            torch.cuda.current_stream(tensor.device).synchronize()
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor)

    def _landing(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a buffer of its shape into which MPI can write by address."""
        if tensor.is_cuda and not self._cuda_aware:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return tensor if tensor.is_contiguous() else empty(tensor.shape, tensor.dtype, tensor)

    def _position(self) -> object:
        """Which call this worker is in, if it is one of a group."""
        group = getattr(self.where, "group", None)
        return None if group is None else (group, self.calls(group).position)

    def leave(self, failure: BaseException | None = None) -> None:
        self._waits.leaving.leave()


def comm_world() -> MPICommunicator:
    """The communicator over all processes of the job."""
    return MPICommunicator.over(MPI.COMM_WORLD)
