"""A thread's link to the other threads of its world. Tensors pass by reference.

A message has two ends, the sender's tensor and the receiver's. Whichever worker comes second finds the end of the first
and has both tensors in hand. It copies a small message at once, so that of two workers that send to each other only the
first has to wait. A large one is copied by its receiver, so that all workers copy at the same time. So each message is
copied once, whatever its strides.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

import torch

from distdl.backends.threaded.hub import Hub
from distdl.transport.callsite import Site
from distdl.transport.communicator import CommunicationError, Communicator, Group, IntArray, Message, Pending

_SMALL = 1 << 16  # bytes that take less time to copy than to wake another thread for


class Post:
    """What the workers of a world have posted and nobody has met yet, by sender, receiver and tag."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int, int], deque[_End]] = {}
        self.wanted: dict[tuple[int, int, int], deque[_End]] = {}


class _End:
    """One end of a message.

    Attributes:
        other: the worker at the other end.
        exchange: what it belongs to.
        done: whether the message has been copied.
        event: on CUDA, the moment at which the sender's tensor was written; then that at which it was read.
    """

    __slots__ = ("done", "event", "exchange", "other", "tensor")

    def __init__(self, other: int, tensor: torch.Tensor, exchange: _Exchange) -> None:
        self.other, self.tensor, self.exchange = other, tensor, exchange
        self.done = False
        self.event: torch.cuda.Event | None = None


_Pair = tuple[_End, _End]  # the sender's end and the receiver's


class _Exchange:
    """Messages of one worker that are under way together.

    Attributes:
        open: how many are not done.
        unread: the messages that this worker has to copy.
    """

    __slots__ = ("comm", "open", "unread")

    def __init__(self, comm: ThreadCommunicator, count: int) -> None:
        self.comm, self.open = comm, count
        self.unread: list[_Pair] = []

    def is_ready(self) -> bool:
        """Whether this worker can go on: with a message that it has to copy, or because all are done."""
        return not self.open or bool(self.unread)


class ThreadCommunicator(Communicator):
    """A thread's link to the other threads of its world.

    Args:
        hub, post: what the threads share.
    """

    threads = True

    def __init__(self, hub: Hub, post: Post, rank: int) -> None:
        super().__init__()
        self.hub, self.post = hub, post
        self.rank = rank
        self.size = hub.size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        me, sent, wanted = self.rank, self.post.sent, self.post.wanted
        mine = _Exchange(self, len(sends) + len(receives))
        outgoing = [_End(target, tensor.detach(), mine) for target, tensor in sends]
        incoming = [_End(source, tensor, mine) for source, tensor in receives]
        for end in outgoing:
            end.event = _record(end.tensor)
        pairs: list[_Pair] = []
        with self.hub.lock:
            for end in outgoing:
                other = _meet(wanted, sent, (me, end.other, tag), end)
                if other is not None:
                    pairs.append((end, other))
            for end in incoming:
                other = _meet(sent, wanted, (end.other, me, tag), end)
                if other is not None:
                    pairs.append((other, end))
            for pair in pairs:
                if not _is_small(pair):
                    pair[1].exchange.unread.append(pair)
                    self.hub.ring(pair[0].other)
        self._copy(list(filter(_is_small, pairs)))

        def awaited() -> list[int]:
            return [end.other for end in (*outgoing, *incoming) if not end.done]

        def finish() -> None:
            while True:
                with self.hub.lock:
                    unread, mine.unread = mine.unread, []
                self._copy(unread)
                self.hub.wait(self, mine.is_ready, awaited)
                if not mine.open:
                    break
            for end in outgoing:
                _await(end.tensor, end.event)

        return Pending(finish)

    def _copy(self, pairs: Sequence[_Pair]) -> None:
        if not pairs:
            return
        for source, target in pairs:
            read, written = source.tensor, target.tensor
            if read.shape != written.shape or read.dtype != written.dtype:
                receiver = target.exchange.comm
                error = CommunicationError(
                    f"worker {receiver.rank} in {receiver.place} expects {list(written.shape)} {written.dtype} from "
                    f"worker {target.other}, which sends {list(read.shape)} {read.dtype}"
                )
                self.hub.fail(self.poison(error))
                raise error
            _await(written, source.event)
            # inference mode may write to tensors of workers in any mode, and no other mode may
            with torch.inference_mode():
                written.copy_(read)
            source.event = _record(written)
        with self.hub.lock:
            for pair in pairs:
                for end in pair:
                    end.done = True
                    end.exchange.open -= 1
                    if not end.exchange.open:
                        self.hub.ring(end.exchange.comm.rank)

    @property
    def site(self) -> Site:
        asks_for_another = self.waiting is None and self.hub.threads.get(threading.get_ident(), self.rank) != self.rank
        return Site() if asks_for_another else super().site

    def interrupt(self, failure: CommunicationError | None = None) -> None:
        if failure is not None:
            self.hub.fail(failure)

    def refuse_thread(self, call: object) -> NoReturn:
        self.hub.check_caller(self, call)
        super().refuse_thread(call)

    def all_max(self, group: Group, values: IntArray) -> IntArray:
        with self.hub.lock:
            meeting = self.hub.join(self.rank, group, values)
        self.hub.wait(self, lambda: meeting.done, lambda: [w for w in group if w not in meeting.arrived])
        assert meeting.highest is not None
        return meeting.highest.copy()


def _meet(
    posted: dict[tuple[int, int, int], deque[_End]],
    waiting: dict[tuple[int, int, int], deque[_End]],
    key: tuple[int, int, int],
    end: _End,
) -> _End | None:
    """The other end of a message if it is there; else this end waits for it. Hold the lock."""
    others = posted.get(key)
    if others is None:
        waiting.setdefault(key, deque()).append(end)
        return None
    other = others.popleft()
    if not others:
        del posted[key]
    return other


def _is_small(pair: _Pair) -> bool:
    tensor = pair[1].tensor
    return tensor.nbytes <= _SMALL and not tensor.is_cuda


def _record(tensor: torch.Tensor) -> torch.cuda.Event | None:
    # on CUDA, "written" and "read" are moments of a stream, which the other worker's stream has to wait for
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _await(tensor: torch.Tensor, event: torch.cuda.Event | None) -> None:
    if event is not None and tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).wait_event(event)
    elif event is not None:
        event.synchronize()
