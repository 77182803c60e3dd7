"""Collectives of large tensors by messages: in parts, so that no worker sends or receives much more than one tensor.

broadcast:  the root sends each other member a part, which that sends on to the rest
sum:        its adjoint: each other member adds up a part of what the others have, and sends it to the root
"""

from __future__ import annotations

from functools import partial

import torch

from distdl.geometry.boxes import balanced
from distdl.transport.communicator import Communicator, Group, Pending, empty
from distdl.transport.folding import fold_into


def _parts(group: Group, tensor: torch.Tensor) -> dict[int, slice]:
    """Which part of a vector each member but the root takes care of."""
    parts = balanced(tensor.numel(), len(group) - 1)
    return {worker: slice(*part) for worker, part in zip(group[1:], parts, strict=True) if part[0] < part[1]}


def broadcast(comm: Communicator, group: Group, tensor: torch.Tensor, tag: int) -> Pending:
    """As :meth:`Communicator.broadcast`."""
    root, vector = group[0], tensor.view(-1)
    parts = _parts(group, vector)
    if comm.rank == root:
        return comm.through.exchange([(worker, vector[part]) for worker, part in parts.items()], [], tag)
    own = parts.get(comm.rank)
    first = comm.through.exchange([], [] if own is None else [(root, vector[own])], tag)

    def finish() -> None:
        first.wait()
        others = [worker for worker in group[1:] if worker != comm.rank]
        sends = [] if own is None else [(worker, vector[own]) for worker in others]
        receives = [(worker, vector[parts[worker]]) for worker in others if worker in parts]
        comm.through.exchange(sends, receives, tag).wait()

    return Pending(finish)


def add_up(comm: Communicator, group: Group, x: torch.Tensor | None, y: torch.Tensor | None, tag: int) -> Pending:
    """As :meth:`Communicator.sum`."""
    root = group[0]
    if comm.rank == root:
        assert y is not None
        return _gathered(comm, group, x, y, tag)
    assert x is not None
    vector = x.view(-1)
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
    total = y.view(-1) if x is None else empty((y.numel(),), y.dtype, y)
    parts = _parts(group, total)
    arriving = comm.through.exchange([], [(worker, total[part]) for worker, part in parts.items()], tag)
    return arriving if x is None else Pending(partial(_finish, arriving, x, total, y))


def _finish(arriving: Pending, x: torch.Tensor, total: torch.Tensor, y: torch.Tensor) -> None:
    arriving.wait()
    torch.add(x.view(-1), total, out=y.view(-1))
