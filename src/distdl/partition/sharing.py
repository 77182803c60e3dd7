"""Values (shapes, texts, small arrays) from worker to worker, where the receivers know nothing of what will arrive.

A value that cannot be sent is the same error on every member of the group, not a wait for a message that never comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from distdl.partition.encoding import decode, encode
from distdl.transport.communicator import Communicator, Group, fold

_VALUE, _PROBLEM = b"\0", b"\1"
_Combine = Callable[[Any, Any], Any]
_REDUCTIONS: dict[str, tuple[Callable[[Iterable[int]], int], _Combine, _Combine]] = {
    # of all of Python's integers, of two of NumPy's values, of two tensors
    "sum": (sum, np.add, torch.add),
    "prod": (math.prod, np.multiply, torch.mul),
    "max": (max, np.maximum, torch.maximum),
    "min": (min, np.minimum, torch.minimum),
}


def broadcast_value(comm: Communicator, group: Group, value: Any) -> Any:
    """The value of the group's first worker, on all of its members."""
    message = _message_of(value) if comm.rank == group[0] else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([message.numel()])
    comm.through.broadcast(group, length).wait()
    if comm.rank != group[0]:
        message = torch.empty(int(length), dtype=torch.uint8)
    comm.through.broadcast(group, message).wait()
    return _value_of(comm, group[0], message)


def gather_values(comm: Communicator, group: Group, value: Any) -> list[Any]:
    """The values of all members, in the order of the group, on every member."""
    message = _message_of(value)
    lengths = comm.through.all_gather(group, torch.tensor([message.numel()])).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: message.numel()] = message
    messages = comm.through.all_gather(group, padded)
    return [_value_of(comm, w, m[:n]) for w, m, n in zip(group, messages, lengths, strict=True)]


def reduce_values(comm: Communicator, group: Group, value: Any, op: str) -> Any:
    """Combine the members' numbers, arrays or tensors: ``op`` is ``sum``, ``prod``, ``max`` or ``min``.

    Python's integers are combined as Python does it: exactly, whatever their size. NumPy's values and tensors are
    combined in their own dtype, so their integers wrap around. Sums and products take bools, of whichever kind, as
    integers (int64 where they are NumPy's or tensors): a sum counts those that are True.

    Raises: ValueError, the same on every member, for another ``op`` or if the shapes differ.
    """
    if op not in _REDUCTIONS:
        raise ValueError(f"a reduction is one of {', '.join(_REDUCTIONS)}; got {op!r}")
    values = gather_values(comm, group, value)
    shapes = [tuple(np.shape(one)) for one in values]
    if len(set(shapes)) > 1:
        raise ValueError(f"a reduction needs values of one shape on all workers; got {shapes} on workers {list(group)}")
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


def _message_of(value: Any) -> torch.Tensor:
    try:
        message = _VALUE + encode(value)
    except Exception as problem:  # whatever it is: the receivers wait and have to learn of it
        message = _PROBLEM + str(problem).encode()
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _value_of(comm: Communicator, sender: int, message: torch.Tensor) -> Any:
    content = message.numpy().tobytes()
    if content[:1] == _PROBLEM:
        raise ValueError(f"worker {sender}: {content[1:].decode()}")
    return decode(content[1:])
