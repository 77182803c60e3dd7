"""How plain tensors and replicas meet the blocks of global tensors: as this worker's own copies, which have entered."""

from __future__ import annotations

from typing import Any

import torch

from distdl.globals.layouts.context import Context
from distdl.globals.tensor.gradient_sums import enter
from distdl.globals.tensor.observers import COMPARING, note_plain
from distdl.globals.tensor.provenance import has_entered
from distdl.globals.tensor.replicas import Replica, copy_of, plain_of
from distdl.globals.tensor.stale import current
from distdl.globals.tensor.structures import map_tensors, tensors_in


def entered(tensor: torch.Tensor, context: Context, strict: bool = True) -> torch.Tensor:
    """This worker's own copy of a plain tensor, whose gradient adds up over all workers; the plain tensor of a replica.

    A tensor without a gradient needs no copy, and neither does one that has entered: they are returned.

    Args:
        strict: whether the tensor stands beside a global tensor; then the workers compare it.
    Raises: RuntimeError for a tensor that follows from a weight by code that hides it.
    """
    if type(tensor) is Replica:
        return copy_of(tensor)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    if has_entered(tensor, context):
        return tensor
    if not strict:
        return enter(context, [tensor])[0]
    if type(tensor) is torch.nn.Parameter:
        note_plain(context, tensor)
    return enter(context, [tensor], COMPARING[0](context) if COMPARING else None)[0]


def without_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function of a global tensor, with plain tensors for replicas without a gradient.

    Indices and statistics are such. The first argument stays a replica, as the function may write into it. For a stale
    replica, its parameter is read again.
    """
    replicas = [one for one in tensors_in((args, kwargs)) if type(one) is Replica]
    if any(current(one) is not one for one in replicas):
        args, kwargs = map_tensors((args, kwargs), current)
    elif all(one._plain.requires_grad for one in replicas):
        return args, kwargs

    def plain(value: torch.Tensor) -> torch.Tensor:
        return plain_of(value) if type(value) is Replica and not value._plain.requires_grad else value

    rest, named = map_tensors((args[1:], kwargs), plain)
    return (*args[:1], *rest), named
