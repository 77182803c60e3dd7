"""Autograd functions of a user's own that take plain tensors and give global ones: torch makes their node.

So do checkpoints with re-entry of a distributed model that takes a plain tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distdl.globals.context import KnownLayout
from distdl.globals.operands import whole
from distdl.globals.tensor import GlobalTensor
from distdl.tensors.function import Function


class _OfBlocks(Function):
    """The node of blocks in the place of that of global tensors, which a function has made of plain ones."""

    @staticmethod
    def forward(
        ctx: Any, node: Any, layouts: Sequence[KnownLayout | None], blocks: Sequence[torch.Tensor], *inputs: Any
    ) -> Any:
        ctx.node, ctx.layouts = node, layouts
        ctx.save_for_backward(torch.empty(0))
        return tuple([block.detach() for block in blocks])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # before any message: this is where a checkpoint recomputes its forward
        node = ctx.node
        given = iter(gradients)  # (of what is no tensor there is none, and it has its place among the arguments)
        found = node.apply(
            *(None if layout is None else GlobalTensor._of(next(given), layout) for layout in ctx.layouts)
        )
        found = found if isinstance(found, tuple) else (found,)
        return None, None, None, *(whole(one) if isinstance(one, torch.Tensor) else None for one in found)


def given_blocks(function: Any, args: tuple[Any, ...], y: Any) -> Any:
    """What an autograd function gives that has made global tensors of plain ones, with a graph of blocks.

    Raises: RuntimeError if it gives plain tensors that have a gradient, too.
    """
    results = list(y) if isinstance(y, tuple) else [y]
    with torch._C.DisableTorchFunctionSubclass():
        curved = [one for one in results if isinstance(one, torch.Tensor) and one.grad_fn is not None]
        node = curved[0].grad_fn if curved else None
    if node is None:
        return y
    if any(type(one) is not GlobalTensor for one in results if isinstance(one, torch.Tensor)):
        raise RuntimeError(
            f"the autograd function {function.__name__} takes plain tensors and gives plain and global ones; give it a "
            "global tensor, as distdl.distribute_tensor makes one"
        )
    places = [place for place, one in enumerate(results) if type(one) is GlobalTensor]
    layouts = [one._layout if type(one) is GlobalTensor else None for one in results]
    blocks = [results[place]._block for place in places]
    for place, block in zip(places, _OfBlocks.apply(node, layouts, blocks, *args), strict=True):
        results[place] = GlobalTensor._of(block, results[place]._layout)
    return tuple(results) if isinstance(y, tuple) else results[0]
