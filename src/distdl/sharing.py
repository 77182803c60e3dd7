"""Values (shapes, texts, small arrays) from worker to worker, where the receivers know nothing of what will arrive.

A value that cannot be sent is the same error on every member of the group, not a wait for a message that never comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from distdl.comm import Communicator, Group, fold
from distdl.encoding import decode, encode

_VALUE, _PROBLEM = b"\0", b"\1"
_REDUCTIONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "sum": (np.add, torch.add),
    "prod": (np.multiply, torch.mul),
    "max": (np.maximum, torch.maximum),
    "min": (np.minimum, torch.minimum),
}


def broadcast_value(comm: Communicator, group: Group, value: Any) -> Any:
    """The value of the group's first worker, on all of its members."""
    message = _pack(value) if comm.rank == group[0] else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([message.numel()])
    comm.broadcast(group, length).wait()
    if comm.rank != group[0]:
        message = torch.empty(int(length), dtype=torch.uint8)
    comm.broadcast(group, message).wait()
    return _unpack(comm, group[0], message)


def gather_values(comm: Communicator, group: Group, value: Any) -> list[Any]:
    """The values of all members, in the order of the group, on every member."""
    message = _pack(value)
    lengths = comm.all_gather(group, torch.tensor([message.numel()])).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: message.numel()] = message
    messages = comm.all_gather(group, padded)
    return [_unpack(comm, w, m[:n]) for w, m, n in zip(group, messages, lengths, strict=True)]


def reduce_values(comm: Communicator, group: Group, value: Any, op: str) -> Any:
    """Combine the members' numbers, arrays or tensors: ``op`` is ``sum``, ``prod``, ``max`` or ``min``.

    Raises: ValueError, the same on every member, for another ``op`` or if the shapes differ.
    """
    if op not in _REDUCTIONS:
        raise ValueError(f"a reduction is one of {', '.join(_REDUCTIONS)}; got {op!r}")
    values = gather_values(comm, group, value)
    shapes = [tuple(np.shape(one)) for one in values]
    if len(set(shapes)) > 1:
        raise ValueError(f"a reduction needs values of one shape on all workers; got {shapes} on workers {list(group)}")
    return fold(values, _REDUCTIONS[op][isinstance(values[0], torch.Tensor)])


def _pack(value: Any) -> torch.Tensor:
    try:
        message = _VALUE + encode(value)
    except Exception as problem:  # whatever it is: the receivers wait and must hear of it
        message = _PROBLEM + str(problem).encode()
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _unpack(comm: Communicator, sender: int, message: torch.Tensor) -> Any:
    content = message.numpy().tobytes()
    if content[:1] == _PROBLEM:
        raise ValueError(f"worker {sender}: {content[1:].decode()}")
    return decode(content[1:])
