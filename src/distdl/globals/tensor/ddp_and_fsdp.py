"""An error for models in torch's own wrappers, DistributedDataParallel and FSDP: they need plain parameters."""

from __future__ import annotations

import sys

_WRAPPERS = ("torch.nn.parallel.distributed", "torch.distributed.fsdp", "torch.distributed.utils")
_DEPTH = 8  # calls between a wrapper and this file, at most


def check_unwrapped() -> None:
    """Check that no wrapper has called the operator that has reached a global tensor.

    A wrapper calls one on each parameter before it changes any. Without an error it would split sharded weights once
    more, or send a block as if it were the whole weight.

    Raises: TypeError if one has.
    """
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame.f_globals.get("__name__", "").startswith(_WRAPPERS):
            raise TypeError(
                "DistributedDataParallel and FSDP need parameters that are plain tensors; those of a model that "
                'distdl.distribute(..., weights="sharded") returns are global ones. Wrap nothing around it: it adds up '
                "gradients over the workers and keeps its weights in shares by itself"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back
