"""Values (shapes, texts, small arrays) from worker to worker, where the receivers know nothing of what will arrive.

A value that cannot be sent is the same error on every member of the group, not a wait for a message that never comes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from distdl.partition.encoding import decode, encode
from distdl.partition.meeting import meet, padded
from distdl.tensors.modes import hidden
from distdl.transport.communicator import Communicator, Group
from distdl.transport.folding import fold

_VALUE, _PROBLEM = b"\0", b"\1"
_Combine = Callable[[Any, Any], Any]
_REDUCTIONS: dict[str, tuple[Callable[[Iterable[int]], int], _Combine, _Combine]] = {
    # of all of Python's integers, of two of NumPy's values, of two tensors
    "sum": (sum, np.add, torch.add),
    "prod": (math.prod, np.multiply, torch.mul),
    "max": (max, np.maximum, torch.maximum),
    "min": (min, np.minimum, torch.minimum),
}


@hidden
def broadcast_value(comm: Communicator, members: Group, call: str, root: int, value: Any, shown: str = "") -> Any:
    """The value of one of the members, on all of them.

    Args:
        call: what the workers do, the same text on all members.
        shown: what an error says of the call, if it says other than ``call``.
        root: the worker whose value it is; the others pass any value.
    Raises: CommunicationError, the same on every member, if they are in different calls; ValueError, likewise, for a
        value that cannot be sent.
    """
    message = _message_of(value) if comm.rank == root else b""
    sender = f"from worker {root}"
    length = meet(comm, members, f"{call} {sender}", len(message), f"{shown or call} {sender}")
    content = padded(message, length)
    comm.through.broadcast((root, *(worker for worker in members if worker != root)), content).wait()
    return _value_of(root, content.numpy().tobytes())


@hidden
def gather_values(comm: Communicator, members: Group, call: str, value: Any, shown: str = "") -> list[Any]:
    """The values of all members, in their order, on every member.

    Args:
        call, shown: as of :func:`distdl.partition.meeting.meet`.
    Raises: as :func:`broadcast_value`.
    """
    message = _message_of(value)
    message = struct.pack("<Q", len(message)) + message
    rows = comm.through.all_gather(members, padded(message, meet(comm, members, call, len(message), shown)))
    contents = [row.numpy().tobytes() for row in rows]
    lengths = [struct.unpack_from("<Q", content)[0] for content in contents]
    return [
        _value_of(worker, content[8 : 8 + length])
        for worker, content, length in zip(members, contents, lengths, strict=True)
    ]


def reduce_values(comm: Communicator, members: Group, call: str, value: Any, op: str) -> Any:
    """Combine the members' numbers, arrays or tensors: ``op`` is ``sum``, ``prod``, ``max`` or ``min``.

    Python's integers are combined as Python does it: exactly, whatever their size. NumPy's values and tensors are
    combined in their own dtype, so their integers wrap around. Sums and products take bools, of whichever kind, as
    integers (int64 where they are NumPy's or tensors): a sum counts those that are True.

    Raises: ValueError, the same on every member, for another ``op`` or if the shapes differ.
    """
    values = gather_values(comm, members, f"{call}, op={op!r}", value)
    if op not in _REDUCTIONS:  # raised after the exchange, in which the others would wait for this worker
        raise ValueError(f"a reduction is one of {', '.join(_REDUCTIONS)}; got {op!r}")
    shapes = [tuple(np.shape(one)) for one in values]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"a reduction needs values of one shape on all workers; got {shapes} on workers {list(members)}"
        )
    of_integers, of_arrays, of_tensors = _REDUCTIONS[op]
    if all(isinstance(one, int) for one in values):  # a bool is one, too
        return of_integers(values)
    if op in ("sum", "prod"):
        values = [_counted(one) for one in values]
    return fold(values, of_tensors if isinstance(values[0], torch.Tensor) else of_arrays)


def _counted(value: Any) -> Any:
    """A value that can be added up: bools as integers, as ``np.sum`` and ``torch.sum`` take them."""
    if isinstance(value, torch.Tensor):
        return value.long() if value.dtype is torch.bool else value
    return value.astype(np.int64) if getattr(value, "dtype", None) == np.bool_ else value


def _message_of(value: Any) -> bytes:
    try:
        return _VALUE + encode(value)
    except Exception as problem:  # whatever it is: the receivers wait and have to learn of it
        return _PROBLEM + str(problem).encode()


def _value_of(sender: int, content: bytes) -> Any:
    if content[:1] == _PROBLEM:
        raise ValueError(f"worker {sender}: {content[1:].decode()}")
    return decode(content[1:])
