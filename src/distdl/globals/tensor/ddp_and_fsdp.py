"""Torch's own wrappers of models, DistributedDataParallel and FSDP: they take parameters for plain tensors."""

from __future__ import annotations

import sys

_WRAPPERS = ("torch.nn.parallel.distributed", "torch.distributed.fsdp", "torch.distributed.utils")
_DEPTH = 8  # calls between one of them and us, at most


def check_unwrapped() -> None:
    """Check that none of them asks what we are asked for: they ask it of parameters, before they change any.

    (Without a word they would cut up shares once more, or send them as if they were whole.)

    Raises: TypeError.
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
