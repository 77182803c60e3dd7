"""The rule for functions that need some dims whole: the other dims are split over more workers instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl.globals.layouts.context import KnownLayout
from distdl.globals.layouts.spreading import pencils
from distdl.globals.moving.alignment import block_in
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import map_tensors
from distdl.tensors.connection import no_view, zeros_on


def along_whole(func: Callable[[torch.Tensor], Any], x: GlobalTensor, dims: Sequence[int], name: str) -> Any:
    """Redistribute x so that some dims are whole, and apply a function to the blocks.

    A worker whose block has no cells computes with zeros, so it raises the same errors and has the same graph.

    Args:
        func: returns one tensor, or a tuple of them, with as many dims as its block. Along ``dims`` the result may have
            any extent, along the other dims it has that of the block.
    """
    layout = pencils(x._layout, dims)
    context, block = layout.context, block_in(x, layout, name)
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
