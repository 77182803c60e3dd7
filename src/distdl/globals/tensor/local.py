"""What this worker has of a tensor: its block of a global one, its own copy of a replicated one."""

from __future__ import annotations

import torch

from distdl.globals.tensor.block import as_block
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.graph_state import check_usable, is_leaf
from distdl.globals.tensor.provenance import note_local
from distdl.globals.tensor.replicas import plain_of
from distdl.globals.tensor.table import METHODS


def block_of(x: GlobalTensor) -> torch.Tensor:
    """This worker's block of a global tensor.

    Raises: RuntimeError if the block may not be used; see :func:`check_usable`.
    """
    if is_leaf(x) or x._ties or (x._memory is not None and x._memory.family is not None):
        check_usable(x)
    return x._block


def own_of(x: torch.Tensor) -> torch.Tensor:
    """The block of a global tensor, or the plain tensor of a replica or block. A plain tensor is returned itself."""
    return block_of(x) if type(x) is GlobalTensor else plain_of(x)


def _to_local(x: GlobalTensor) -> torch.Tensor:
    """See :meth:`GlobalTensor.to_local`."""
    check_usable(x)
    note_local(x._block)
    return as_block(x._block)


def _copy(x: GlobalTensor) -> GlobalTensor:
    """A view of all of x, which requires a gradient as x does: what ``copy.copy(x)`` gives."""
    check_usable(x)
    view: GlobalTensor = METHODS["whole_view"](x, x._block.detach().requires_grad_(x._block.requires_grad))
    return view


METHODS.update(to_local=_to_local, copy=_copy)
