"""Packing: several tensors as one vector, so that they move as one message."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from distdl.geometry.boxes import Shape

Tensors = tuple[torch.Tensor, ...]


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of all tensors, in their order, as one vector. It is a view if only one tensor has elements."""
    full = [tensor for tensor in tensors if tensor.numel()]
    if len(full) > 1:
        vector: torch.Tensor = torch._C._nn.flatten_dense_tensors(full)  # takes half the time of reshape and cat
        return vector
    return (full or tensors)[0].reshape(-1)


def unpack(vector: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """The tensors of these shapes of which a vector was packed: views of it."""
    sizes = [prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]


class Packing:
    """How the tensors of one worker move as one: worked out once, for their shapes.

    Args:
        shapes: of the tensors.
        planned: the shape in which they move, as the plan has it. None if the plan has none for this worker: then the
            tensors stand in for it.
    Attributes:
        shape: the shape in which they move.
        plain: there is one tensor, and it moves as it is.
    """

    def __init__(self, shapes: Sequence[Shape], planned: Shape | None) -> None:
        own = shapes[0] if len(shapes) == 1 else (sum(map(prod, shapes)),)
        self.shape = own if planned is None else planned
        self.plain = tuple(shapes) == (self.shape,)
        if not self.plain and prod(own) != prod(self.shape):
            raise ValueError(
                f"an Operator needs tensors of as many elements as its plan moves; they are of the shapes "
                f"{list(map(list, shapes))}, and the plan has {list(self.shape)} for this worker"
            )
        # numbers are stacked and unbound, which takes torch half the time of the general way
        self._numbers = not any(shapes) and self.shape == (len(shapes),)
        self._pieces = [] if self.plain or self._numbers else _pieces(shapes)

    def pack(self, tensors: Tensors) -> torch.Tensor:
        """The tensors as the one that moves."""
        if self.plain:
            return tensors[0]
        return torch.stack(tensors) if self._numbers else pack(tensors).reshape(self.shape)

    def unpack(self, moved: torch.Tensor) -> Tensors:
        """The tensors, as views of the one that moved, which begins its memory."""
        if self.plain:
            return (moved,)
        return moved.unbind() if self._numbers else tuple([moved.as_strided(*piece) for piece in self._pieces])


def _pieces(shapes: Sequence[Shape]) -> list[tuple[Shape, tuple[int, ...], int]]:
    """Shape, strides and offset of each of the tensors of which a vector is packed."""
    pieces, start = [], 0
    for shape in shapes:
        pieces.append((shape, torch.empty(shape, device="meta").stride(), start))
        start += prod(shape)
    return pieces
