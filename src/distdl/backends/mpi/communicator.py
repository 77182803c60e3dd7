"""The MPI back-end, over mpi4py and any MPI.

Every wait is a non-blocking operation that is tested until it is through or a deadline has passed, so that no worker
waits for ever for one that is gone. Tensors are handed to MPI by address, whatever their dtype; sums use MPI's own
reductions where MPI knows the dtype. Tensors that MPI cannot read where they are (CUDA without a CUDA-aware MPI) are
staged through pinned memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from distdl.backends.mpi import messages
from distdl.backends.mpi.leaving import Leaving
from distdl.backends.mpi.messages import TYPES, Regions, Requests, has_datatype, pieces
from distdl.backends.mpi.process import abort_on_uncaught_exceptions, is_cuda_aware
from distdl.backends.mpi.questions import Questions
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
    name_workers,
)
from distdl.transport.folding import begin_with
from distdl.transport.whereabouts import told

_GROUP_TAG, _MAXIMUM_TAG = 32770, 32771  # beyond the tags of exchanges
_REDUCED_BYTES = 1 << 19  # up to here, all-sums by MPI itself are faster than in parts
_SPINS = 20  # tests of a request before the processor is offered to others
_PATIENCE = 1.0  # seconds after which a waiting worker tells others that it waits
_NOTICED = 2.5  # seconds after which workers whose message has gone elsewhere have told where they wait


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
        self._abandoned: list[Any] = []
        self._cuda_aware = is_cuda_aware()
        self._leaving, self._questions = Leaving(parent), Questions(self, parent)
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
        self._finish([through], everyone, None)  # (too long a wait here leaves nobody out of step)
        del self.where
        self._world = self._groups[everyone] = duplicate
        self._leaving.forget()
        self._leaving, self._questions = Leaving(duplicate), Questions(self, duplicate)

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
        return Requests(self, requests, workers, (buffers, ready), deliveries)

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
        return Requests(self, requests, prepared.workers, tensors)

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
        # (of a user's own call, ``where`` names an earlier one, in which nobody needs the others)
        self.finish(requests, group, *memory, needs=group if isinstance(self.where, Meeting) else ())

    def _higher(self, other: int, values: IntArray) -> IntArray:
        """The maximum with the values of one other worker: a message each way."""
        self._check_released()
        received = np.empty_like(values)
        requests = [
            self._world.Irecv([received, len(received), MPI.INT64_T], other, _MAXIMUM_TAG),
            self._world.Isend([values, len(values), MPI.INT64_T], other, _MAXIMUM_TAG),
        ]
        Requests(self, requests, (other, other), (received, values)).wait()
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
        self._leaving.forget()
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
            workers = tuple(sorted(map(int, group)))  # (the integers may be NumPy's)
            if workers not in self._groups:
                self._groups[workers] = self._create(workers)
            handle = self._groups[workers], workers.index(group[0])
            known = self._handles[group] = handle, self._leaving.calls(workers)
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
            # (where another call of the group has begun since, it is not this one in which others may be behind)
            self.finish(requests, group, buffer, read, needs=needs if self._position() == begun else ())
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

    def finish(
        self, requests: Sequence[MPI.Request], workers: Sequence[int], *memory: object, needs: Group | None = None
    ) -> None:
        """Wait until all requests are through with the memory.

        Args:
            workers: the other end of each message; of one of MPI's own calls, the group.
            needs: of one of MPI's own calls, the workers that have to come to it before this one can go on, if that is
                known; None of messages.
        """
        try:
            self._finish(requests, workers, memory, needs)
        except CommunicationError as error:
            raise self._failed(error) from None
        except MPI.Exception as error:
            raise self.mismatch(error, workers) from error

    def mismatch(self, error: MPI.Exception, workers: Sequence[int]) -> CommunicationError:
        """The error of a message that is not what this worker expects: the others are in other calls."""
        waiting = self._questions.waiting(sorted(set(workers) - {self.rank}), _NOTICED)
        text = (
            f"worker {self.rank} got a message in {self.place} that is not the one that it expects from "
            f"{name_workers(set(workers) - {self.rank})}, so these are in another call ({error.Get_error_string()})"
        )
        return self._failed(CommunicationError(told(text, waiting)))

    def _failed(self, error: CommunicationError) -> CommunicationError:
        """Note an error that leaves the workers out of step, and tell the others."""
        self._questions.tell(error)
        return self.poison(error)

    def _finish(
        self, requests: Sequence[MPI.Request], workers: Sequence[int], memory: object, needs: Group | None = ()
    ) -> None:
        done = requests[0].Test if len(requests) == 1 else partial(MPI.Request.Testall, requests)
        for _ in range(_SPINS):
            if done():
                return
        try:
            self.begin_wait()
            self._wait(done, requests, workers, needs)
        except CommunicationError:
            self._abandoned.append((requests, memory))  # MPI may still write to it
            raise
        finally:
            self.waiting = None

    def _wait(
        self, done: Callable[[], bool], requests: Sequence[MPI.Request], workers: Sequence[int], needs: Group | None
    ) -> None:
        begun, before = time.monotonic(), self.failure
        self._questions.begin()
        while not done():
            os.sched_yield()
            if self.failure is not before:
                raise CommunicationError(str(self.failure))  # found by another thread
            waited = time.monotonic() - begun
            if waited > _PATIENCE:
                self._questions.missing = self._unfinished(requests, workers) if needs is None else needs
                self._questions.answer()
                self._questions.compare(workers if needs is None else self._next(workers), waited, workers)
                self._check_left(requests, workers, needs is None)
            late = waited > self.timeout and (self._unfinished(requests, workers) if needs is None else workers)
            if late:
                raise self._missing(late)

    def _unfinished(self, requests: Sequence[MPI.Request], workers: Sequence[int]) -> Sequence[int]:
        """The workers of messages that are not through."""
        return [worker for worker, request in zip(workers, requests, strict=True) if not request.Test()]

    def _next(self, group: Sequence[int]) -> Sequence[int]:
        """Whom of a group this worker asks, in MPI's own calls: if any two differ, so do two that are neighbours."""
        if self.rank not in group:
            return ()
        return (group[(group.index(self.rank) + 1) % len(group)],)

    def _check_left(self, requests: Sequence[MPI.Request], workers: Sequence[int], are_messages: bool) -> None:
        """Raise if the requests can never be through, because a worker that they need has come to its end."""
        if not self._leaving.look():
            return
        if are_messages:
            gone = self._leaving.among(self._unfinished(requests, workers))
        else:  # a group, whose members call together
            gone = self._leaving.before_last_call(tuple(sorted(workers)))
        if gone:
            text = (
                f"worker {self.rank} waits in {self.place} for {name_workers(gone)}, which had come to the end of the "
                f"program (or called sys.exit)"
            )
            raise CommunicationError(told(text, {}))

    def leave(self, failure: BaseException | None = None) -> None:
        self._leaving.leave()

    def _missing(self, workers: Iterable[int]) -> CommunicationError:
        """The error of a wait that took too long. Those that wait too answer within a moment; the others are absent."""
        asked = sorted(set(workers) - {self.rank})
        waiting = self._questions.waiting(asked, _PATIENCE)
        error = self.overdue([worker for worker in asked if worker not in waiting] or asked)
        return CommunicationError(told(str(error), waiting, apart=False))


def comm_world() -> MPICommunicator:
    """The communicator over all processes of the job."""
    return MPICommunicator.over(MPI.COMM_WORLD)
