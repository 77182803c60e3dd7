"""The torch.distributed back-end: gloo for CPU tensors, NCCL for CUDA tensors.

It makes process groups of its own, over a store of its own, so its messages never mix with those of the user's groups.
(``torch.distributed.new_group`` is not used: either it wants all workers of the world at every call, or it names a
group by how many groups this process has made, so that members that have made different numbers of groups never meet.)

A process that ends closes its sockets, and whoever waits for it gets an error at once. Other waits end at a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distdl.backends import register
from distdl.transport.communicator import (
    CommunicationError,
    Communicator,
    Group,
    IntArray,
    Message,
    Pending,
    as_bytes,
    begin_with,
    contiguous,
    deliver,
    empty,
    name_workers,
)
from distdl.transport.job import job, of_group

# what the transports can add up; other dtypes are summed by messages
_SUMS = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int8, torch.int32, torch.int64, torch.uint8,
}  # fmt: skip
_PATIENCE = 1.0  # seconds after which a waiting worker writes into the store that it waits


class TorchCommunicator(Communicator):
    """A process's link to the other processes of a torch.distributed job.

    Args:
        store: a store that all workers share, for distdl alone.
        rank, size: this worker's number, and how many there are.
        nccl: whether CUDA tensors go through NCCL; else they are staged through CPU memory and gloo.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, nccl: bool = False) -> None:
        super().__init__()
        self.rank = rank
        self.size = size
        self._world = tuple(range(size))
        self._store = store
        self._nccl = nccl
        self._groups: dict[tuple[bool, Group], Any] = {}
        self._generation = 0
        self._watch = _Watch(store, rank)
        self._group(self._world, direct=False)  # at once, so that from now on the others notice the end of a worker

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        direct = any(self._direct(tensor) for _, tensor in (*sends, *receives))
        group = self._group(self._world, direct)
        arrivals = [(source, tensor, self._landing(tensor)) for source, tensor in receives]
        departures = [(target, self._readable(tensor)) for target, tensor in sends]
        calls = [(group.recv, buffer, worker) for worker, _, buffer in arrivals]
        calls += [(group.send, tensor, worker) for worker, tensor in departures]
        works = self._post_nccl(group, calls) if direct else [(w, call([as_bytes(t)], w, tag)) for call, t, w in calls]

        def finish() -> None:
            for worker, work in works:
                self._finish(work, (worker,))
            for _, tensor, buffer in arrivals:
                deliver(tensor, buffer)
            departures.clear()  # until here their memory had to live

        return Pending(finish)

    def _post_nccl(self, group: Any, calls: Sequence[tuple[Any, torch.Tensor, int]]) -> list[tuple[int, Any]]:
        # NCCL runs messages one after the other unless they are posted as one; it has no tags
        device = calls[0][1].device
        group._start_coalescing(device)
        for call, tensor, worker in calls:
            call([as_bytes(tensor)], worker, 0)
        return [(calls[0][2], group._end_coalescing(device))]

    def broadcast(self, group: Group, tensor: torch.Tensor) -> Pending:
        sends = self.rank == group[0]
        buffer = self._readable(tensor) if sends else self._landing(tensor)
        handle = self._group(group, self._direct(tensor))
        work = handle.broadcast(as_bytes(buffer), sorted(group).index(group[0]), self._limit)
        return self._pending(work, group, buffer if sends else tensor, buffer)

    def sum(self, group: Group, x: torch.Tensor | None, y: torch.Tensor | None) -> Pending:
        tensor = x if y is None else y
        if self.ordered or tensor is None or tensor.dtype not in _SUMS or len(group) == 2:
            return super().sum(group, x, y)
        # gloo leaves partial sums in the tensors of the other members, so those give a copy
        buffer = self._readable(tensor).clone() if y is None else self._landing(y)
        if y is not None:
            begin_with(buffer, x)
        handle = self._group(group, self._direct(tensor))
        work = handle.reduce(buffer, sorted(group).index(group[0]), dist.ReduceOp.SUM, self._limit)
        return self._pending(work, group, buffer if y is None else y, buffer)

    def all_sum(self, group: Group, x: torch.Tensor, y: torch.Tensor) -> Pending:
        if self.ordered or y.dtype not in _SUMS or len(group) < 3:
            return super().all_sum(group, x, y)
        buffer = self._landing(y)
        buffer.copy_(x)
        work = self._group(group, self._direct(y)).allreduce(buffer, dist.ReduceOp.SUM, self._limit)
        return self._pending(work, group, y, buffer)

    def all_max(self, group: Group, values: IntArray) -> IntArray:
        if len(group) < 3:
            return super().all_max(group, values)  # one message each way is faster than gloo's reduction
        highest = values.copy()
        work = self._group(group, False).allreduce(torch.from_numpy(highest), dist.ReduceOp.MAX, self._limit)
        self._finish(work, group)
        return highest

    def release(self) -> None:
        """Close the process groups. Collective. They are made again when they are needed."""
        super().release()
        self._groups.clear()
        self._generation += 1

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.timeout)

    def _direct(self, tensor: torch.Tensor) -> bool:
        return self._nccl and tensor.is_cuda

    def _readable(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = contiguous(tensor.detach())
        return tensor.cpu() if tensor.is_cuda and not self._nccl else tensor

    def _landing(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        staged = tensor.is_cuda and not self._nccl
        if tensor.is_contiguous() and not staged:
            return tensor
        return empty(tensor.shape, tensor.dtype, None if staged else tensor)

    def _group(self, group: Group, direct: bool) -> Any:
        workers = tuple(sorted(group))
        if (direct, workers) not in self._groups:
            name = f"{self._generation}/{'nccl' if direct else 'gloo'}/{'_'.join(map(str, workers))}"
            store, place = dist.PrefixStore(name, self._store), workers.index(self.rank)
            if self._groups:
                # members meet in the store, where they would not notice the end of another, so let them meet here first
                self.all_gather(workers, torch.zeros(1))
            if direct:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._limit
                made: Any = dist.ProcessGroupNCCL(store, place, len(workers), options)
            else:
                made = self._meet(lambda: dist.ProcessGroupGloo(store, place, len(workers), self._limit), workers)
            self._groups[direct, workers] = made
        return self._groups[direct, workers]

    def _meet(self, make: Callable[[], Any], workers: Group) -> Any:
        self._watch.begin(self.where)
        try:
            return make()
        except RuntimeError as error:
            raise self._lost(workers, error) from error
        finally:
            self._watch.end()

    def _pending(self, work: Any, group: Group, tensor: torch.Tensor, buffer: torch.Tensor) -> Pending:
        def finish() -> None:
            self._finish(work, group)
            deliver(tensor, buffer)

        return Pending(finish)

    def _finish(self, work: Any, workers: Sequence[int]) -> None:
        self._meet(work.wait, tuple(workers))

    def _lost(self, workers: Sequence[int], error: RuntimeError) -> CommunicationError:
        others = [worker for worker in workers if worker != self.rank]
        if "timed out" not in str(error).lower() and "timeout" not in str(error).lower():
            return CommunicationError(
                f"worker {self.rank} lost a connection in {self.where}, waiting for {name_workers(others)}: {error}"
            )
        waiting = self._watch.waiting(others)
        late = self.overdue([worker for worker in others if worker not in waiting] or others)
        return CommunicationError(
            str(late) + "".join(f"; worker {worker} waits in {where}" for worker, where in sorted(waiting.items()))
        )


class _Watch:
    """Writes into the store where this worker waits, once a wait has become long, for others to see who is absent."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._key = f"waits/{rank}"
        self._wait: tuple[float, object] | None = None
        self._written = False
        self._lock = threading.Lock()
        threading.Thread(target=self._look, name="distdl-watch", daemon=True).start()

    def begin(self, where: object) -> None:
        with self._lock:
            self._wait = (time.monotonic(), where)

    def end(self) -> None:
        with self._lock:
            self._wait = None
            if self._written:
                self._store.delete_key(self._key)
                self._written = False

    def waiting(self, workers: Sequence[int]) -> dict[int, str]:
        """Those of the workers that wait too, and where."""
        keys = {worker: f"waits/{worker}" for worker in workers}
        try:
            return {worker: self._store.get(key).decode() for worker, key in keys.items() if self._store.check([key])}
        except RuntimeError:  # the store went away together with the worker that kept it
            return {}

    def _look(self) -> None:
        while True:
            time.sleep(_PATIENCE / 2)
            with self._lock:
                if self._wait is None or self._written or time.monotonic() - self._wait[0] < _PATIENCE:
                    continue
                try:
                    self._store.set(self._key, str(self._wait[1]))
                except RuntimeError:
                    return
                self._written = True


_over: dict[Any, TorchCommunicator] = {}


def over(group: Any) -> TorchCommunicator:
    """The communicator over the workers of a process group that the user made. Collective over them, once."""
    if group not in _over:
        nccl = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
        found = of_group(group)
        _over[group] = TorchCommunicator(found.store, found.rank, found.size, nccl)
    return _over[group]


def _open_gloo() -> TorchCommunicator:
    return _open("gloo")


def _open_nccl() -> TorchCommunicator:
    _check_nccl()
    return _open("nccl")


def _open(backend: str) -> TorchCommunicator:
    if dist.is_available() and dist.is_initialized():
        return over(dist.group.WORLD)
    found = job(backend)
    if backend == "nccl":
        torch.cuda.set_device(found.local_rank)
    return TorchCommunicator(found.store, found.rank, found.size, backend == "nccl")


def _check_nccl() -> None:
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        raise RuntimeError("the nccl back-end needs a CUDA build of torch with NCCL, and a GPU for each local worker")


register("gloo", _open_gloo)
register("nccl", _open_nccl, check=_check_nccl)
