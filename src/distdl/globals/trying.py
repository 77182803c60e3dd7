"""Trying out, without memory, what torch makes of the whole operands of a function, and of a worker's parts of them.

Some functions copy an operand to give it another shape, and save the copy for backward: then the operand may be written
afterwards. Where a worker's part needs no copy, as of dims of one cell, the part itself would be saved, and that worker
alone would find it written. So there it is copied first. And some give results whose elements lie in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from distdl.geometry.boxes import Shape
from distdl.globals.replicas import plain_of
from distdl.globals.strides import blank, strides_if, strides_of
from distdl.globals.tensor import GlobalTensor


@dataclass(frozen=True)
class Tried:
    """What was found.

    Attributes:
        strides: of the whole result in torch; none if it is contiguous.
        places: of the operands that torch does not save themselves, and of whose part the function would.
    """

    strides: Shape
    places: frozenset[int]

    def copied(self, operands: Sequence[Any]) -> list[Any]:
        """The operands, with copies where the function would save a part itself."""
        if not torch.is_grad_enabled():
            return list(operands)
        return [
            one.clone(memory_format=torch.contiguous_format) if place in self.places else one
            for place, one in enumerate(operands)
        ]


def try_out(
    func: Callable[..., torch.Tensor], key: Hashable, operands: Sequence[Any], shapes: Sequence[Shape]
) -> Tried:
    """Try a function of tensors out, once for operands that lie alike.

    Args:
        key: that tells functions apart.
        shapes: of what this worker reads of each operand. (It is taken to lie as the block does, if that has its dims.)
    """
    context = next(one._context for one in operands if type(one) is GlobalTensor)
    wholes, parts = [], []
    for one, shape in zip(operands, shapes, strict=True):
        block = one._block if type(one) is GlobalTensor else plain_of(one)
        strides = strides_of(one) if type(one) is GlobalTensor else block.stride()
        wholes.append((tuple(one.shape), strides, one.dtype))
        parts.append((shape, block.stride() if block.shape == shape else (), one.dtype))

    def find() -> Tried:
        y, kept = _of_described(func, wholes)
        own = kept if any(0 in shape for shape in shapes) else _of_described(func, parts)[1]
        return Tried(() if y is None else strides_if(y), frozenset(own - kept))

    return context.keep(("tried", key, *wholes, *parts), find)


def _of_described(func: Callable[..., torch.Tensor], described: Sequence[Any]) -> tuple[torch.Tensor | None, set[int]]:
    """What a function gives for tensors without memory, and the places of those that it saves, or views of them.

    None, and no places, where torch has no such function of them.
    """
    memory: set[int] = set()
    with torch.inference_mode(False), torch.enable_grad():
        tensors = [blank(*one) for one in described]
        for one in tensors:
            one.requires_grad_(one.is_floating_point() or one.is_complex())
        try:
            with saved_tensors_hooks(lambda x: memory.add(x.untyped_storage()._cdata), lambda x: x):
                y = func(*tensors)
        except RuntimeError:
            return None, set()
    return y, {place for place, one in enumerate(tensors) if one.untyped_storage()._cdata in memory}
