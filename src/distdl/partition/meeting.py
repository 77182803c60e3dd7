"""Meeting: how the members of a group find out, at the beginning of a call, that they are in the same call.

Every call in which members have to agree begins with a maximum over one short vector of fixed length, whatever the
call: so a worker that is in another call is noticed, and every member raises the same error. The vector also carries
the history of the group's exchanges. Exchanges have no such beginning, and native collectives not even tags; so if they
have run in different orders (in a backward, or where shapes are fixed), the next meeting of the members finds it out.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from distdl.partition.encoding import decode, encode
from distdl.tensors.function import TransformError
from distdl.transport.calls import Meeting, cure
from distdl.transport.communicator import CommunicationError, Communicator, Group

MOST_TENSORS = 4
_SHOWN = 200  # exchanges of which a member tells the others, when they look for the first that differs


class Preamble(NamedTuple):
    """What a worker sends at the beginning of a call; the derivatives of its tensors follow.

    The members take the maximum. Of a number that has to be the same on all, the negative is sent, too: its maximum is
    the negative of the minimum. What tells whether they are in the same call comes first: where another collective of
    some member meets this one, it writes over the beginning.

    Attributes:
        history: of the exchanges of the group.
        identity: of the call: of the layer, or of the method of a partition.
        changed: whether this worker brings something else than at its last call.
        dims: the largest rank of its tensors.
        problem: the length of what is wrong with them.
        mode: whether grad mode is on.
        brought: how many tensors it has, and how many integers beside them.
        length: of the value that this worker sends, in bytes.
    """

    history: int = 0
    history_least: int = 0
    identity: int = 0
    identity_least: int = 0
    changed: int = 0
    dims: int = 0
    problem: int = 0
    mode: int = 0
    mode_least: int = 0
    brought: int = 0
    brought_least: int = 0
    length: int = 0

    @property
    def alike(self) -> bool:
        """Whether all members are in the same call, after the same exchanges."""
        return self.identity == -self.identity_least and self.history == -self.history_least


FIELDS = len(Preamble._fields)
CHANGED, BROUGHT = Preamble._fields.index("changed"), Preamble._fields.index("brought")
LENGTH = FIELDS + 3 * MOST_TENSORS  # of the preamble and the derivatives, in integers


def meet(comm: Communicator, members: Group, call: str, length: int = 0, shown: str = "") -> int:
    """Find out that all members are in the same call. Every member calls it.

    Args:
        call: what the workers do, with its options.
        length: of the value that this worker will send.
        shown: what an error says of the call, if it says other than ``call``.
    Returns: the largest length.
    Raises: CommunicationError, the same on every member, if they are not; TransformError inside a transform of
        ``torch.func``, in which tensors of a message would be wrapped.
    """
    if torch._C._are_functorch_transforms_active():
        raise TransformError
    if comm.waiting is not None:
        comm.refuse_thread(shown or call)
    calls, identity = comm.calls(members), zlib.crc32(repr((call, tuple(members))).encode())
    calls.meet()
    comm.where = Meeting(members, comm.where)
    sent = np.zeros(LENGTH, dtype=np.int64)
    history = calls.history
    sent[:FIELDS] = Preamble(
        history=history, history_least=-history, identity=identity, identity_least=-identity, length=length
    )
    received = Preamble(*comm.through.all_max(members, sent)[:FIELDS].tolist())
    if not received.alike:
        raise different(comm, members, received, shown or call)
    return received.length


def different(
    comm: Communicator, members: Group, received: Preamble, call: str, options: object = ()
) -> CommunicationError:
    """The error of members that are in different calls, or that come from different exchanges. Each of them calls it.

    In the first case they may go on: all of them have raised the same error in the same place. In the second, what one
    member has sent, another has taken for something else, and this would go on: the world cannot be used any more.

    Args:
        call, options: what this worker does; its options are shown item by item where all else is the same.
    """
    calls = comm.calls(members)
    apart = received.history != -received.history_least
    mine = [
        call,
        calls.number,
        [repr(one) for one in _leaves(options)],
        list(calls.recent().items())[-_SHOWN:] if apart else [],
        str(comm.site).strip(),
    ]
    told = gathered(comm, members, encode(mine))
    names, numbers, shown, recents, sites = zip(*[decode(one) for one in told], strict=True)
    where = [f"{name} (exchange {number})" for name, number in zip(names, numbers, strict=True)]
    text = f"workers make different calls together: {_show_calls(members, where, shown)}"
    found = _first_difference(members, [dict(recent) for recent in recents]) if apart else ""
    called = f"called {by_worker(members, sites)}" if all(sites) else ""
    text = "; ".join(filter(None, (text, found, called)))
    error = CommunicationError(text + cure(text))
    return comm.poison(error) if apart else error


def gathered(comm: Communicator, members: Group, message: bytes) -> list[bytes]:
    """The messages of all members, in their order, on every member that comes here; nothing is compared before."""
    own = torch.tensor([len(message)], device="cpu")
    lengths = comm.through.all_gather(members, own).flatten().tolist()
    rows = comm.through.all_gather(members, padded(message, max(lengths)))
    return [row.numpy().tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]


def padded(message: bytes, length: int) -> torch.Tensor:
    """The message as a tensor of bytes, with zeros behind it."""
    return torch.frombuffer(bytearray(message.ljust(length, b"\0")), dtype=torch.uint8)


def by_worker(members: Group, texts: Sequence[str]) -> str:
    """``a on 0, 2; b on 1``."""
    named: dict[str, list[int]] = {}
    for worker, text in zip(members, texts, strict=True):
        named.setdefault(text, []).append(worker)
    return "; ".join(f"{text} on {', '.join(map(str, sorted(workers)))}" for text, workers in named.items())


def _first_difference(members: Group, logs: Sequence[dict[int, str]]) -> str:
    """The first exchange, of those that all members remember, that differs; empty if it lies further back."""
    first = max(min(log, default=1) for log in logs)
    last = max(max(log, default=0) for log in logs)
    for number in range(first, last + 1):
        texts = [log.get(number, "still to come") for log in logs]
        if len(set(texts)) > 1:
            return f"since exchange {number} of these workers, which was {by_worker(members, texts)}"
    return ""


def _show_calls(members: Group, names: Sequence[str], options: Sequence[list[str]]) -> str:
    """The calls; or if these are all alike, the call and those of its options that differ."""
    differ = [values for values in zip(*options, strict=False) if len(set(values)) > 1]
    if len(set(names)) > 1 or not differ:
        return by_worker(members, names)
    return f"{names[0]} has options that differ: {'; and '.join(by_worker(members, values) for values in differ)}"


def _leaves(options: object) -> list[object]:
    """Options as people read them: those of tuples and of operations item by item."""
    if is_dataclass(options):
        options = tuple(getattr(options, one.name) for one in fields(options))
    found: list[Any] = [leaf for one in options for leaf in _leaves(one)] if type(options) is tuple else [options]
    return found
