"""A process's link to the others of a torch.distributed job: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import atexit
import gc
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distdl.backends.torch_distributed.threads import in_their_turn
from distdl.transport import parts
from distdl.transport.communicator import (
    CommunicationError,
    Communicator,
    Group,
    Message,
    Pending,
    as_bytes,
    contiguous,
    deliver,
    empty,
    name_workers,
)
from distdl.transport.folding import begin_with
from distdl.transport.stores import absent, described, within
from distdl.transport.watch import Watch
from distdl.transport.whereabouts import told

# what NCCL can add up; other dtypes are summed by messages
_SUMS = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int8, torch.int32, torch.int64, torch.uint8,
}  # fmt: skip
_SENT_AT_ONCE = 1 << 19  # bytes that a worker sends in one round, rather than two
_MARGIN = 2.0  # seconds after which a group that gloo should have given up is given up
_ADVICE = (
    ". Each worker listens at the address of its host's name. If the others cannot reach that, as where it is "
    "127.0.1.1, set GLOO_SOCKET_IFNAME on every host to the network interface that joins them (`ip address` lists them)"
)
_PATIENCE = 0.3  # seconds between two looks for the failure of another worker to make a group
_NO_TAG = 1 << 15  # beyond the tags of exchanges
_FAILED = "failed"  # the key, in a group's part of the store, under which that stands
_ENDED = "had come to the end of the program (or called sys.exit)"
_LEFT = "left"  # the key of the store under which stands how many workers have come to their end


class TorchCommunicator(Communicator):
    """A process's link to the other processes of a torch.distributed job.

    Args:
        store: a store that all workers share, for distdl alone.
        rank, size: this worker's number, and how many there are.
        nccl: whether CUDA tensors go through NCCL; else they are staged through CPU memory and gloo.
        host: the address at which gloo listens. None: that of the interfaces ``GLOO_SOCKET_IFNAME``, or else the one
            of this host's name.
    Raises: CommunicationError at the time limit, if some worker has not come or cannot be reached.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, nccl: bool = False, host: str | None = None) -> None:
        super().__init__()
        self.rank = rank
        self.size = size
        self._world = tuple(range(size))
        self._store = store
        self._nccl = nccl
        self._groups: dict[tuple[bool, Group], Any] = {}
        self._captured: set[tuple[bool, Group]] = set()  # those of which a CUDA graph has messages
        self._host = host
        self._last_limit = self.timeout, timedelta(seconds=self.timeout)
        self._watch = Watch(store, rank)
        weakref.finalize(self, self._watch.dismiss).atexit = False  # its thread would go on otherwise
        _open_ones.add(self)
        self._group(self._world, direct=False)  # at once, so that from now on the others notice the end of a worker

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        direct = any(self._direct(tensor) for _, tensor in (*sends, *receives))
        group = self._group(self._world, direct)
        arrivals = [(source, tensor, self._landing(tensor)) for source, tensor in receives]
        departures = [(target, self._readable(tensor)) for target, tensor in sends]
        calls = [(group.recv, buffer, worker) for worker, _, buffer in arrivals]
        calls += [(group.send, tensor, worker) for worker, tensor in departures]
        try:
            works = (
                self._post_nccl(group, calls) if direct else [(w, call([as_bytes(t)], w, tag)) for call, t, w in calls]
            )
        except RuntimeError as error:
            raise self._lost([worker for _, _, worker in calls], error) from error

        def finish() -> None:
            limit = () if direct else (self._limit,)  # NCCL's wait returns at once, and has the limit of the group
            for worker, work in works:
                self._meet(work.wait, (worker,), (worker,), *limit)
            for _, tensor, buffer in arrivals:
                deliver(tensor, buffer)
            departures.clear()  # until here their memory had to live

        return Pending(finish)

    def _post_nccl(self, group: Any, calls: Sequence[tuple[Any, torch.Tensor, int]]) -> list[tuple[int, Any]]:
        # NCCL runs messages one after the other unless they are posted as one; it has no tags
        group._start_coalescing()
        for call, tensor, worker in calls:
            call([as_bytes(tensor)], worker, 0)
        return [(calls[0][2], group._end_coalescing())]

    # gloo's own collectives carry no tag: those of different calls would meet, and end the process if lengths differ.
    # Its all-reduce goes around a ring, too: twice as many messages, one after the other

    def broadcast(self, group: Group, tensor: torch.Tensor, tag: int = 0) -> Pending:
        if not self._direct(tensor):
            whole = len(group) == 2 or self.sends_whole(group, tensor)
            return super().broadcast(group, tensor, tag) if whole else parts.broadcast(self, group, tensor, tag)
        sends = self.rank == group[0]
        buffer = self._readable(tensor) if sends else self._landing(tensor)
        handle, root = self._group(group, True), sorted(group).index(group[0])
        work = self._begin(group, handle.broadcast, as_bytes(buffer), root)
        return self._pending(work, group, buffer if sends else tensor, buffer)

    def sum(self, group: Group, x: torch.Tensor | None, y: torch.Tensor | None, tag: int = 0) -> Pending:
        tensor = x if y is None else y
        assert tensor is not None
        direct = self._direct(tensor)
        by_messages = tensor.dtype not in _SUMS if direct else self.sends_whole(group, tensor)
        if self.ordered or len(group) == 2 or by_messages:
            return super().sum(group, x, y, tag)
        if not direct:
            return parts.add_up(self, group, x, y, tag)
        # NCCL may leave partial sums in the tensors of the other members, so those give a copy
        buffer = self._readable(tensor).clone() if y is None else self._landing(y)
        if y is not None:
            begin_with(buffer, x)
        handle, root = self._group(group, True), sorted(group).index(group[0])
        work = self._begin(group, handle.reduce, buffer, root, dist.ReduceOp.SUM)
        return self._pending(work, group, buffer if y is None else y, buffer)

    def sends_whole(self, group: Group, tensor: torch.Tensor) -> bool:
        # A round takes long, so small tensors are sent whole. Among many workers, parts of them would be as many
        # messages, of a few bytes each.
        return tensor.nbytes * min(len(group) - 1, 16) <= _SENT_AT_ONCE

    def all_sum(self, group: Group, x: torch.Tensor, y: torch.Tensor, tag: int = 0) -> Pending:
        if self.ordered or y.dtype not in _SUMS or len(group) < 3 or not self._direct(y):
            return super().all_sum(group, x, y, tag)
        buffer = self._landing(y)
        buffer.copy_(x)
        work = self._begin(group, self._group(group, True).allreduce, buffer, dist.ReduceOp.SUM)
        return self._pending(work, group, y, buffer)

    def release(self) -> None:
        """Close the process groups, but those of CUDA graphs. Collective. They are made again when they are needed."""
        super().release()
        captured = {key: self._groups.pop(key) for key in self._captured}
        self._close()
        self._groups = captured

    def leave(self, failure: BaseException | None = None) -> None:
        """Write into the store that this worker has come to its end, or failed, and close its connections."""
        # a CommunicationError only follows from the end of another worker
        if self._groups and not isinstance(failure, CommunicationError):
            how = _ENDED
            if failure is not None:
                how = f"failed with {type(failure).__name__}: {failure}"
            text = f"worker {self.rank} {how}"
            with suppress(RuntimeError):  # the store went away together with the worker that kept it
                within(_MARGIN, lambda: self._store.set(f"{_LEFT}/{self._store.add(_LEFT, 1)}", text))
        self._watch.stop()
        if self._captured:
            _end_graphs()
        try:
            self._close(failure is not None)
        except RuntimeError:  # a device has failed, and nobody has been told, so its messages are lost
            self._close(True)
            raise

    def interrupt(self, failure: CommunicationError | None = None) -> None:
        """Close the connections of gloo. There is no call for that, but a wait that takes too long does it."""
        if failure is not None:
            with suppress(RuntimeError):
                within(_MARGIN, lambda: self._watch.tell(str(failure)))
        for (direct, workers), group in list(self._groups.items()):
            for place in () if direct else [place for place, worker in enumerate(workers) if worker != self.rank]:
                with suppress(RuntimeError):  # each wait closes the connection to one worker
                    group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], place, _NO_TAG).wait(
                        timedelta(milliseconds=1)
                    )

    def _close(self, failed: bool = False) -> None:
        for (direct, _), group in self._groups.items():
            if direct:  # gloo closes a group that nobody holds any more; NCCL only warns of it
                if not failed:  # its waits return at once, so messages that others need may be under way
                    torch.cuda.synchronize()
                group.abort()
        self._groups.clear()

    def _left(self) -> str:
        """What an error says of workers that have come to their end."""

        def ask() -> str:
            keys = [f"{_LEFT}/{n + 1}" for n in range(self._store.add(_LEFT, 0))]
            return "".join(f"; {self._store.get(key).decode()}" for key in keys if self._store.check([key]))

        try:
            return within(_MARGIN, ask)
        except RuntimeError:
            return ""

    @property
    def _limit(self) -> timedelta:
        if self._last_limit[0] != self.timeout:
            self._last_limit = self.timeout, timedelta(seconds=self.timeout)
        return self._last_limit[1]

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
            name = f"{self.generation}/{'nccl' if direct else 'gloo'}/{'_'.join(map(str, workers))}"
            store, place = dist.PrefixStore(name, self._store), workers.index(self.rank)
            # members meet in the store, where they would not notice the end of another, so let them meet first
            if self._groups:
                self.all_gather(workers, torch.zeros(1, device="cpu"))
            else:
                self._gather_in(store, workers)
            if direct:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._limit
                made: Any = dist.ProcessGroupNCCL(store, place, len(workers), options)
            else:
                made = self._gloo(store, workers)
            self._groups[direct, workers] = made
        if direct and torch.cuda.is_current_stream_capturing():
            self._captured.add((direct, workers))
        return self._groups[direct, workers]

    def _gather_in(self, store: dist.Store, workers: Group) -> None:
        try:
            found = absent(store, self.rank, workers, self.timeout)
        except RuntimeError as error:
            raise CommunicationError(
                f"worker {self.rank} of {self.size} opens a world, and {described(store)} does not answer ({error}): "
                f"the process that keeps it has gone, is stopped or out of reach"
            ) from error
        if found:
            come = ", ".join(f"worker {worker} ({place})" for worker, place in found.items() if place)
            late = self.overdue(worker for worker, place in found.items() if place is None)
            raise CommunicationError(f"{late}, which did not come to {described(store)}; {come} did")

    def _gloo(self, store: dist.Store, workers: Group) -> Any:
        place, limit = workers.index(self.rank), self.timeout + _MARGIN
        ended = threading.Event()
        try:
            with in_their_turn():
                options = self._options()
                # of two workers, gloo lets the one with the higher address and port connect, and the other waits for it
                return within(
                    limit,
                    lambda: dist.ProcessGroupGloo(store, place, len(workers), options),
                    lambda: _failure_of_another(store, ended),
                )
        except RuntimeError as error:
            raise self._unconnected(store, workers, error) from error
        finally:
            ended.set()

    def _options(self) -> Any:
        """What gloo has to know of a new group: the limit of its waits, or also where it listens."""
        if self._host is None:
            return self._limit
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._threads = self._limit, 2
        options._devices = [gloo.create_device(hostname=self._host)]
        return options

    def _unconnected(self, store: dist.Store, workers: Group, error: RuntimeError) -> CommunicationError:
        """What to raise where a group cannot be made; the first worker to fail tells it to those that wait for it."""
        others = name_workers([worker for worker in workers if worker != self.rank])
        advice = "" if self._host is not None else _ADVICE
        text = f"worker {self.rank} of {self.size} could not connect to {others} by gloo: {_reason(error)}{advice}"
        with suppress(RuntimeError):
            first = within(_MARGIN, lambda: store.compare_set(_FAILED, "", text).decode())
            if first != text:
                text = f"worker {self.rank} of {self.size} gave up, after another worker had: {first}"
        return CommunicationError(text)

    def _meet(self, wait: Callable[..., Any], workers: Group, awaited: Sequence[int], *limit: timedelta) -> Any:
        self.begin_wait()
        self._watch.begin(self, awaited)
        try:
            return wait(*limit)
        except RuntimeError as error:
            raise self._lost(workers, error) from error
        finally:
            self._watch.end()
            self.waiting = None

    def _begin(self, group: Group, call: Callable[..., Any], *arguments: Any) -> Any:
        """Begin a collective of a process group. (To begin one with a peer that is gone is an error already.)"""
        try:
            return call(*arguments, self._limit)
        except RuntimeError as error:
            raise self._lost(group, error) from error

    def _pending(self, work: Any, group: Group, tensor: torch.Tensor, buffer: torch.Tensor) -> Pending:
        def finish() -> None:
            self._meet(work.wait, group, ())
            deliver(tensor, buffer)

        return Pending(finish)

    def _lost(self, workers: Sequence[int], error: RuntimeError) -> CommunicationError:
        """The error of a wait that failed, after which the others may be anywhere."""
        others, reason = [worker for worker in workers if worker != self.rank], _reason(error)
        late = any(words in reason.lower() for words in ("timed out waiting", "timeout"))

        def tell(waiting: dict[int, str]) -> str:
            if not late:
                awaited = name_workers(others)
                lost = f"worker {self.rank} lost a connection in {self.place}, waiting for {awaited}: {reason}"
                left = self._left()
                return told(lost + left, {}, apart=_ENDED in left)
            overdue = self.overdue([worker for worker in others if worker not in waiting] or others)
            return told(str(overdue), waiting, apart=False)

        first, own = self._watch.first_failure(others, late, tell), f"worker {self.rank} "
        if not first.startswith(own):
            first = f"{own}gave up in {self.place}, after another worker had: {first}"
        self.interrupt()
        return self.poison(CommunicationError(first))


def _failure_of_another(store: dist.Store, ended: threading.Event) -> None:
    """Return when this worker has made the group, or raise as soon as another worker has told that it cannot."""
    while not ended.wait(_PATIENCE):
        if store.check([_FAILED]):
            raise RuntimeError("another worker failed")


def _end_graphs() -> None:
    """Let go of CUDA graphs that are still there at the end: NCCL waits for ever for those that have messages."""
    for one in gc.get_objects():
        if issubclass(type(one), torch.cuda.CUDAGraph):
            with suppress(RuntimeError):  # a device may have failed, and all else is still to be closed
                one.reset()


def _reason(error: Exception) -> str:
    """What gloo says, without its advice, its source file and torch's stack; or the cause that NCCL gives."""
    text = str(error).partition("\nLast error:\n")[2] or str(error)  # NCCL's stands below the place in torch
    text = text.strip().partition("\n")[0].partition(". This is typically caused")[0]
    return re.sub(r"\[[^ \]]*\.cc:\d+\] ", "", text)


_open_ones: weakref.WeakSet[TorchCommunicator] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Close all connections before the interpreter ends: their threads abort a process that ends beside them."""
    with ExitStack() as stack:  # closes all, also where one raises an error
        for communicator in list(_open_ones):
            stack.callback(communicator.leave, getattr(sys, "last_value", None))
