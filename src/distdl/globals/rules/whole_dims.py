"""A rule: functions that compute along whole dims. Other dims are split further instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl.globals.layouts.context import KnownLayout
from distdl.globals.layouts.spreading import pencils
from distdl.globals.moving.alignment import moved
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import map_tensors
from distdl.tensors.connection import no_view, zeros_on


def along_whole(func: Callable[[torch.Tensor], Any], x: GlobalTensor, dims: Sequence[int], name: str) -> Any:
    """Apply a function to blocks in which some dims are whole.

    A worker whose block has no cells computes with zeros, so it raises the same errors and has the same graph.

    Args:
        func: gives a tensor, or a tuple of several, of as many dims. Along the dims they may have any extent, and along
            the others they have those of the block.
    """
    layout = pencils(x._layout, dims)
    context, block = layout.context, moved(x, layout, name)
    filled = block.numel() > 0
    if not filled:
        block = zeros_on(block, [n if dim in dims else 1 for dim, n in enumerate(layout.extents)])

    def placed(one: torch.Tensor) -> GlobalTensor:
        extents = tuple([one.shape[dim] for dim in dims])

        def make() -> KnownLayout:
            along = list(layout.intervals)
            for dim, n in zip(dims, extents, strict=True):
                along[dim] = ((0, n),)
            return context.layout(layout.partition.workers, along)

        target = context.keep(("along whole", layout, tuple(dims), extents), make)
        return GlobalTensor._of(no_view(one, block) if filled else zeros_on(one, target.local), target)

    return map_tensors(func(block), placed)
