"""Published helpers for tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from distdl.partition.arguments import checks_arguments


class TensorStructure:
    """What one has to know of a tensor to make one like it.

    Attributes:
        shape, dtype, requires_grad: of the tensor; None without one.
    """

    @checks_arguments
    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.shape: Any = None
        self.dtype: torch.dtype | None = None
        self.requires_grad: bool | None = None
        if tensor is not None:
            self.fill_from_tensor(tensor)

    def fill_from_tensor(self, tensor: torch.Tensor) -> None:
        """Describe this tensor."""
        self.shape, self.dtype, self.requires_grad = tensor.shape, tensor.dtype, tensor.requires_grad

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorStructure) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"TensorStructure(shape={self.shape}, dtype={self.dtype}, requires_grad={self.requires_grad})"


@checks_arguments
def zero_volume_tensor(
    b: Any = None, dtype: torch.dtype | None = None, requires_grad: bool = False, device: Any = None
) -> torch.Tensor:
    """A tensor without elements: what a worker passes that has no part of a global tensor.

    Args:
        b: batch size; the shape is ``(b, 0)`` with it, ``(0,)`` without.
        dtype: torch's default dtype if None.
    """
    shape = (0,) if b is None else (int(b), 0)
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad, device=device)


@checks_arguments
def distdl_padding_to_torch_padding(pad: ArrayLike) -> tuple[int, ...]:
    """Padding of shape ``(dim, 2)``, first dim first, as the flat tuple that ``F.pad`` takes, last dim first."""
    widths = np.asarray(pad)
    if widths.ndim != 2 or widths.shape[1] != 2:
        raise ValueError(f"padding needs the shape (dim, 2); got {pad!r}")
    return tuple(int(width) for width in widths[::-1].reshape(-1))
