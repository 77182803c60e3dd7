"""This worker's part of a tensor."""

from __future__ import annotations

import torch

from distdl.globals.tensor.global_tensor import GlobalTensor, check_usable, is_leaf
from distdl.globals.tensor.replicas import plain_of


def block_of(x: GlobalTensor) -> torch.Tensor:
    """This worker's block.

    Raises: RuntimeError if it is not what it seems to be (see :func:`check_usable`).
    """
    if is_leaf(x) or "_ties" in x.__dict__ or ("_memory" in x.__dict__ and x._memory.family is not None):
        check_usable(x)
    return x._block


def own_of(x: torch.Tensor) -> torch.Tensor:
    """What this worker has of a tensor: of a global one its block, of a copy the plain tensor; others as they are."""
    return block_of(x) if type(x) is GlobalTensor else plain_of(x)
