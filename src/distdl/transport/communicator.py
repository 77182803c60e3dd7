"""Communicator: what a back-end offers to the rest of distdl.

A back-end is one class with ``rank``, ``size`` and ``exchange``. Everything else here is built on ``exchange``; a
back-end overrides a method only to be faster. It knows nothing of gradients, halos or layers.

Workers are numbered from 0 in the world of the communicator. A *group* is a tuple of different workers that contains
this one; every member passes the same tuple, and makes its calls for that group in the same order. Where a group has a
root, it comes first.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from distdl import environment
from distdl.environment.arguments import checks_arguments
from distdl.geometry.boxes import balanced
from distdl.tensors.memory import empty as empty
from distdl.tensors.memory import keep_freed
from distdl.transport.calls import Calls as Calls
from distdl.transport.calls import numbered
from distdl.transport.callsite import Site
from distdl.transport.folding import fold_into
from distdl.transport.view import Addressed as Addressed
from distdl.transport.view import Message as Message
from distdl.transport.view import View as View

Group = tuple[int, ...]
IntArray = NDArray[np.int64]

_CALLS = ("exchange", "start", "broadcast", "sum", "all_sum", "all_gather", "all_max")
SMALL_SUM = 1 << 15  # bytes up to which each member of an all-sum sends its tensor to each other, rather than in parts


class CommunicationError(RuntimeError):
    """A wait for other workers that cannot end: one of them failed, is absent, or makes another call.

    Attributes:
        has_own_cause: whether this worker failed in another way first, by the error that is the cause of this one.
    """

    has_own_cause = False


class LongGroup(tuple[int, ...]):
    """A group that may be long and is looked up often: it computes its hash once."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


def check_group(members: Group, size: int, what: str) -> None:
    """Check that a group has different workers of a world of this size. (One of a partition has: :class:`LongGroup`.)

    Raises: ValueError that names what needs the group.
    """
    if type(members) is LongGroup or not members:
        return
    if not 0 <= min(members) <= max(members) < size or len(set(members)) < len(members):
        raise ValueError(f"{what} needs different members from 0 to {size - 1}; got {members}")


class Pending:
    """Messages under way. Tensors may be touched again only after :meth:`wait`.

    After ``wait``, all that was sent has been read from its tensor, and all that was to be received has arrived.
    """

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        if finish is not None and not callable(finish):
            raise TypeError(f"a Pending needs finish to be a function or None; got {finish!r}")
        self._finish = finish

    def wait(self) -> None:
        """Wait until the messages are through. The second time it returns at once."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def wait_all(pending: Iterable[Pending]) -> None:
    """Wait for all of them."""
    for one in pending:
        one.wait()


class Prepared:
    """An exchange that comes again and again, for tensors of always the same layouts.

    Attributes:
        sends, receives: ``(other worker, region of a tensor)``.
    """

    __slots__ = ("receives", "sends")

    @checks_arguments
    def __init__(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> None:
        self.sends = sends
        self.receives = receives


class Communicator(ABC):
    """One worker's link to the others of its world.

    Attributes:
        rank, size: this worker's number, and how many workers there are.
        absent: the ``rank`` that a partition reports where this worker is not a member.
        timeout: longest wait for other workers, in seconds (environment variable ``DISTDL_TIMEOUT``; default 600).
        released: whether :meth:`release` has left it unusable.
        failure: the error after which workers of this world are out of step (see :meth:`poison`); None before.
        imagined: whether the other workers are not there, and nothing is sent (see ``distdl.summary``).
        threads: whether the workers are threads of one process.
        started_alone: whether there is one worker because nothing launched more, and not because one was asked for.
        where: what this worker does just now; an error of a wait names it.
        waiting: the thread of this worker that waits for others (its ident), and where; None while none does. A
            back-end sets it in its waits (see :meth:`begin_wait`), and every call looks at it first.
        generation: how many times it has been released.
        kept: what others keep for as long as this communicator lives, under keys of their own.
        ordered: whether sums are made in the order of the workers (see ``distdl.reproducible``), not as it is fastest.
        watch: called before each exchange of an operator, with its label, members and dtype; may raise.
        recorder: the communicator that records what goes through this one, and passes it on; None if nothing does.
    """

    rank: int
    size: int
    absent: int = -1
    released: bool = False
    failure: CommunicationError | None = None
    imagined: bool = False
    threads: bool = False
    started_alone: bool = False
    generation: int = 0
    ordered: bool = False
    watch: Callable[..., None] | None = None
    recorder: Communicator | None = None
    where: object = "an exchange"

    def __init__(self) -> None:
        if not self.imagined:
            keep_freed()
        self.timeout = environment.timeout()
        self.kept: dict[Any, Any] = {}
        self.waiting: tuple[int, object] | None = None
        self._calls: dict[Group, Calls] = {}

    @property
    def through(self) -> Communicator:
        """What messages go through: the recorder, if there is one, else this communicator."""
        return self.recorder or self

    def calls(self, group: Group) -> Calls:
        """How many exchanges a group of workers has begun, as this worker counts them: the same object every time."""
        return self._calls.setdefault(group, Calls())

    def groups(self) -> list[Group]:
        """The groups of which there are :meth:`calls`."""
        return list(self._calls)

    def poison(self, error: CommunicationError) -> CommunicationError:
        """Note an error after which workers are out of step: messages of different calls would meet from now on.

        Every later call raises an error that says so, and why. Returns: the error, to be raised.
        """
        if self.failure is None:
            self.failure = error
            for call in _CALLS:  # a test in each call of whether it may go on would cost every step
                setattr(self, call, self._refuse)
        return error

    def begin_wait(self) -> None:
        """Note that this thread waits; the back-end sets :attr:`waiting` to None when it waits no longer.

        Raises: as :meth:`refuse_thread`, where another thread waits.
        """
        ident = threading.get_ident()
        if self.waiting is not None:
            self.refuse_thread(self.where)
        self.waiting = ident, self.where

    def refuse_thread(self, call: object) -> NoReturn:
        """Refuse a call that a thread makes while another one of the same worker waits.

        Which of the two the other workers are in is not known: messages of both could meet. So both end, by one error.

        Args:
            call: the label of the layer, or what else is called.
        Raises: CommunicationError that names both threads, and what each of them does.
        """
        ident, where = self.waiting or (0, self.where)
        names = {thread.ident: repr(thread.name) for thread in threading.enumerate()}
        error = CommunicationError(
            f"worker {self.rank} is in two calls at once: the thread {threading.current_thread().name!r} calls "
            f"{numbered(call)} while the thread {names.get(ident, 'that has ended')} waits in {numbered(where)}. "
            f"Only one thread of a worker at a time may call layers, functions of global tensors, and their backward"
        )
        self.interrupt(self.poison(error))
        raise error

    @property
    def place(self) -> str:
        """What this worker does just now, for errors: of a layer with its number, for layers may have one name.

        With the line of the user's that called it, and the path of the module.
        """
        return f"{numbered(self.where)}{self.site}"

    @property
    def site(self) -> Site:
        """Where in the user's script this worker waits, or else calls this."""
        return Site.of(self.waiting[0] if self.waiting else threading.get_ident())

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise CommunicationError(
            f"worker {self.rank} cannot go on in {self.place}: the workers of its world are out of step since an "
            f"earlier error: {self.failure}"
        )

    def how_to_start(self, workers: int) -> str:
        """Where this worker was started alone, what an error says of starting more of them; elsewhere nothing."""
        if not self.started_alone:
            return ""
        script = Path(sys.argv[0]).name if sys.argv[0].endswith(".py") else "SCRIPT"
        return (
            f"; this process was started alone: start {workers} workers by 'distdl run -n {workers} {script}', "
            f"'mpirun -n {workers} python {script}' or 'torchrun --nproc-per-node {workers} {script}', or call "
            f"distdl.run_workers(function, {workers})"
        )

    @abstractmethod
    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        """Send and receive point-to-point messages, both ways at once.

        Args:
            sends, receives: ``(other worker, tensor)``. Both ends know dtype and shape; tensors need not be
                contiguous, are not empty, and none of them is a message to oneself.
            tag: a number from 0 to 32767 that must be the same at both ends. Messages of a pair of workers that have
                equal tags arrive in the order they were sent.
        """

    def prepare(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Prepared:
        """Prepare an exchange of regions of tensors: a back-end that reads memory by address describes them once."""
        return Prepared(sends, receives)

    def start(self, prepared: Prepared, tensors: Sequence[torch.Tensor], tag: int = 0) -> Pending:
        """Begin a prepared exchange, now that its tensors are there."""
        sends, receives = (
            [(worker, view.take(tensors)) for worker, view in messages]
            for messages in (prepared.sends, prepared.receives)
        )
        return self.exchange(sends, receives, tag)

    # The tag of a collective is that of the messages of which it is made. A transport's own collective has none.

    def broadcast(self, group: Group, tensor: torch.Tensor, tag: int = 0) -> Pending:
        """Copy the root's tensor into the (contiguous) tensor of every other member."""
        if self.rank == group[0]:
            return self.through.exchange([(worker, tensor) for worker in group[1:]], [], tag)
        return self.through.exchange([], [(group[0], tensor)], tag)

    def sum(self, group: Group, x: torch.Tensor | None, y: torch.Tensor | None, tag: int = 0) -> Pending:
        """Add the (contiguous) tensors x of all members into the root's y.

        The root's x may be None, and then it adds nothing; y is None on the other members.
        """
        if self.rank != group[0]:
            assert x is not None
            return self.through.exchange([(group[0], x)], [], tag)
        assert y is not None
        return self._sum_into(y, [] if x is None else [x], group[1:], tag)

    def _sum_into(self, y: torch.Tensor, own: Sequence[torch.Tensor], sources: Sequence[int], tag: int) -> Pending:
        buffers = _buffers(len(sources), y)
        pending = self.through.exchange([], list(zip(sources, buffers, strict=True)), tag)

        def finish() -> None:
            pending.wait()
            fold_into(y, [*own, *buffers])

        return Pending(finish)

    def sends_whole(self, group: Group, tensor: torch.Tensor) -> bool:
        """Whether members of a collective send each other whole tensors, in one round, rather than parts, in two."""
        return tensor.nbytes <= SMALL_SUM

    def all_sum(self, group: Group, x: torch.Tensor, y: torch.Tensor, tag: int = 0) -> Pending:
        """Add the (contiguous) tensors x of all members into the y of each; every member gets the same bits.

        Of a large tensor each member adds up one part and then sends it to the others, so that what it sends does not
        grow with the group. Of a small one each adds up all of it, in one round.
        """
        return self.all_sum_by_messages(group, x, y, tag, self.sends_whole(group, x))

    def all_sum_by_messages(self, group: Group, x: torch.Tensor, y: torch.Tensor, tag: int, whole: bool) -> Pending:
        """The same by messages of one tag, which the members may begin between other calls of theirs.

        Args:
            whole: whether they send each other whole tensors, in one round, rather than parts, in two.
        """
        x, y = x.view(-1), y.view(-1)
        parts = [(0, x.numel())] * len(group) if whole else balanced(x.numel(), len(group))
        slices = {w: slice(*part) for w, part in zip(group, parts, strict=True) if part[0] < part[1]}
        others = [worker for worker in slices if worker != self.rank]
        mine = y[slices.get(self.rank, slice(0, 0))]
        sources = [worker for worker in group if worker != self.rank] if mine.numel() else []
        buffers = dict(zip(sources, _buffers(len(sources), mine), strict=True))
        adding = self.through.exchange([(worker, x[slices[worker]]) for worker in others], list(buffers.items()), tag)

        def finish() -> None:
            adding.wait()
            if mine.numel():
                own = x[slices[self.rank]]
                fold_into(mine, [own if worker == self.rank else buffers[worker] for worker in group])
            if not whole:
                sends = [(worker, mine) for worker in buffers]
                self.through.exchange(sends, [(worker, y[slices[worker]]) for worker in others], tag).wait()

        return Pending(finish)

    def all_gather(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the tensors of all members, which have one shape and dtype, in the order of the group."""
        gathered = tensor.new_empty((len(group), *tensor.shape))
        gathered[group.index(self.rank)] = tensor
        others = [(place, worker) for place, worker in enumerate(group) if worker != self.rank]
        if tensor.numel():
            sends, receives = [(w, tensor) for _, w in others], [(w, gathered[place]) for place, w in others]
            self.through.exchange(sends, receives).wait()
        return gathered

    def all_max(self, group: Group, values: IntArray) -> IntArray:
        """Element-wise maximum of a short int64 vector over the members: the message of every agreement."""
        highest: IntArray = self.all_gather(group, torch.from_numpy(values)).numpy().max(axis=0)
        return highest

    def release(self) -> None:
        """Give back what this communicator has made (groups, duplicates). Collective over all workers."""
        self._calls.clear()
        self.generation += 1

    def interrupt(self, failure: CommunicationError | None = None) -> None:  # noqa: B027 (a back-end need not)
        """End the waits of this worker, and those of the others for it, by an error. Another thread may call it.

        Args:
            failure: the error, if it is known.
        """

    def leave(self, failure: BaseException | None = None) -> None:  # noqa: B027 (a back-end need not)
        """Say that this worker has come to its end, or failed, so that others that wait for it know. Called last."""

    def deadline(self) -> float:
        """The moment (of ``time.monotonic``) at which a wait that begins now has taken too long."""
        return time.monotonic() + self.timeout

    def overdue(self, awaited: Iterable[int]) -> CommunicationError:
        """The error of a wait that took longer than ``timeout``."""
        return CommunicationError(
            f"worker {self.rank} waited longer than {self.timeout:g} s (DISTDL_TIMEOUT) in {self.place} "
            f"for {name_workers(awaited)}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "partitions and layers, and what else has a communicator, belong to their process and cannot be pickled: "
            "make a partition where it is used, and of a network, call distdl.save"
        )


def _buffers(n: int, like: torch.Tensor) -> list[torch.Tensor]:
    """n tensors like a contiguous one, in one memory."""
    if not n:
        return []
    every = empty((n, *like.shape), like.dtype, like)
    return [every[place] for place in range(n)]


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if it is contiguous, else a copy that is."""
    if tensor.is_contiguous():
        return tensor
    return empty(tensor.shape, tensor.dtype, tensor).copy_(tensor)


def deliver(tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy what has arrived in a buffer to the tensor for which it is; nothing if it has arrived there."""
    if buffer.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(buffer)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a vector of bytes, which shares it.

    Raises: ValueError if it is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"as_bytes needs a contiguous tensor; got one of shape {list(tensor.shape)} with strides {tensor.stride()}"
        )
    # as_strided, because a tensor of one element counts as contiguous whatever its strides
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def name_workers(workers: Iterable[int]) -> str:
    """``worker 3`` or ``workers 0, 2, 5``; long lists are shortened."""
    listed = sorted(set(workers))
    head = ", ".join(str(worker) for worker in listed[:16])
    more = f" and {len(listed) - 16} more" if len(listed) > 16 else ""
    return f"worker{'s' if len(listed) != 1 else ''} {head}{more}"
