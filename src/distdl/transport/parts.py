"""Collectives of large tensors by messages: in parts, so that no worker sends or receives much more than one tensor.

broadcast:  the root sends each other member a part, which that sends on to the rest
sum:        its adjoint: each other member adds up a part of what the others have, and sends it to the root
"""

from __future__ import annotations

import torch

from distdl.geometry.boxes import balanced
from distdl.transport.communicator import Communicator, Group, Pending, contiguous, deliver, empty
from distdl.transport.folding import fold_into


def _parts(group: Group, tensor: torch.Tensor) -> dict[int, slice]:
    """Which part of a vector each member but the root takes care of."""
    parts = balanced(tensor.numel(), len(group) - 1)
    return {worker: slice(*part) for worker, part in zip(group[1:], parts, strict=True) if part[0] < part[1]}


def broadcast(comm: Communicator, group: Group, tensor: torch.Tensor, tag: int) -> Pending:
    """As :meth:`Communicator.broadcast`."""
    root = group[0]
    if comm.rank == root:
        vector = contiguous(tensor).view(-1)
        return comm.through.exchange([(to, vector[part]) for to, part in _parts(group, vector).items()], [], tag)
    whole = tensor if tensor.is_contiguous() else empty(tensor.shape, tensor.dtype, tensor)
    vector = whole.view(-1)
    parts = _parts(group, vector)
    own = parts.get(comm.rank)
    first = comm.through.exchange([], [] if own is None else [(root, vector[own])], tag)

    def finish() -> None:
        first.wait()
        others = [worker for worker in group[1:] if worker != comm.rank]
        sends = [] if own is None else [(worker, vector[own]) for worker in others]
        receives = [(worker, vector[parts[worker]]) for worker in others if worker in parts]
        comm.through.exchange(sends, receives, tag).wait()
        deliver(tensor, whole)

    return Pending(finish)


def add_up(comm: Communicator, group: Group, x: torch.Tensor | None, y: torch.Tensor | None, tag: int) -> Pending:
    """As :meth:`Communicator.sum`."""
    root = group[0]
    if comm.rank == root:
        assert y is not None
        return _gathered(comm, group, x, y, tag)
    assert x is not None
    vector = contiguous(x).view(-1)
    parts, others = _parts(group, vector), [worker for worker in group[1:] if worker != comm.rank]
    own = parts.get(comm.rank)
    terms = {} if own is None else {worker: empty(vector[own].shape, x.dtype, x) for worker in others}
    sends = [(worker, vector[parts[worker]]) for worker in others if worker in parts]
    first = comm.through.exchange(sends, list(terms.items()), tag)

    def finish() -> None:
        first.wait()
        if own is not None:
            total = empty(vector[own].shape, x.dtype, x)
            fold_into(total, [vector[own] if worker == comm.rank else terms[worker] for worker in group[1:]])
            comm.through.exchange([(root, total)], [], tag).wait()

    return Pending(finish)


def _gathered(comm: Communicator, group: Group, x: torch.Tensor | None, y: torch.Tensor, tag: int) -> Pending:
    """The root's share of a sum."""
    others = y if x is None and y.is_contiguous() else empty(y.shape, y.dtype, y)
    vector = others.view(-1)
    arriving = comm.through.exchange([], [(of, vector[part]) for of, part in _parts(group, vector).items()], tag)

    def finish() -> None:
        arriving.wait()
        if x is None:
            deliver(y, others)
        else:
            torch.add(x, others, out=y)

    return Pending(finish)
