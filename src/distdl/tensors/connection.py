"""Connection: how the autograd graph of a worker stays connected where it has nothing to compute.

Every member of a movement takes part in its backward. So what a worker returns depends on the same arguments through
the same operators on every worker, also where a block is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def zeros_on(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of some shape that depend on a tensor in the autograd graph, whatever its own shape."""
    # (not by torch.cat: its derivative cuts the graph at tensors of zero volume)
    return tensor.new_zeros(tuple(shape)) + tensor.reshape(-1)[:0].sum(dtype=tensor.dtype)


def local(
    operator: Callable[..., torch.Tensor],
    shape: Sequence[int],
    *operands: tuple[torch.Tensor | None, Sequence[int]],
) -> torch.Tensor:
    """Apply a torch operator to this worker's blocks, also where there is nothing to compute.

    Where an operand or the result has no volume, the operator runs on the smallest operands that it accepts, made of
    zeros, and the result is zeros. So the result depends on the same arguments through the same operator on every
    worker, and whatever is differentiated, and however often, all workers come past the same exchanges.

    Args:
        operator: takes the operands' tensors.
        shape: of the result on this worker, in elements.
        operands: each a tensor (None is passed on) and the smallest shape that the operator accepts.
    """
    if 0 not in shape and all(tensor is None or tensor.numel() for tensor, _ in operands):
        return operator(*(tensor for tensor, _ in operands))
    smallest = (None if tensor is None else zeros_on(tensor, least) for tensor, least in operands)
    return zeros_on(operator(*smallest), shape)
