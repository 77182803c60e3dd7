"""What a window keeps for backward: its margins, for the rest of it is the block that it was made of.

A convolution saves its input for backward. Where that is a window (a block, and around it cells of other workers), it
would be a second copy of the block, which is saved already by what computed it::

    window   [ m | block | m ]      saved: the margins m, and the block itself; put together again in backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from distdl.exchange import Operator
from distdl.geometry.boxes import around, slices, volume, whole

Index = tuple[slice, ...]

_NOTHING = nullcontext()
WORTH = 1 << 17  # bytes of a window; below, to save it whole takes less time, and memory that does not count


class Place(NamedTuple):
    """Which box of a block is which box of the window, as indices.

    Attributes:
        margins: boxes that cover the rest of the window.
    """

    source: Index
    target: Index
    margins: list[Index]

    @classmethod
    def of(cls, operators: Sequence[Operator], block: torch.Tensor, window: torch.Tensor) -> Place | None:
        """None if the block is less than half of the window.

        Args:
            operators: those that the block passes to become the window.
        """
        moving = [op for op in operators if not op.still]
        if len(moving) != 1 or block.dim() != window.dim():
            return None
        plan, me = moving[0].plan, moving[0].comm.rank
        if plan.outputs.get(me) != tuple(window.shape) or plan.inputs.get(me) != tuple(block.shape):
            return None
        own = [move for move in plan.moves if move.source == me == move.target]
        if len(own) != 1 or 2 * volume(own[0].dst) < window.numel():
            return None
        margins = [slices(box) for box in around(own[0].dst, whole(window.shape))]
        return cls(slices(own[0].src), slices(own[0].dst), margins)

    def cut(self, window: torch.Tensor) -> list[torch.Tensor]:
        """The margins, in memory of their own."""
        return [window[box].clone() for box in self.margins]

    def join(self, window: torch.Tensor, block: torch.Tensor, margins: Sequence[torch.Tensor]) -> torch.Tensor:
        """The window, written into an empty one."""
        window[self.target] = block[self.source]
        for box, margin in zip(self.margins, margins, strict=True):
            window[box] = margin
        return window


def keeping(
    place: Callable[[torch.Tensor, torch.Tensor], Place | None], block: torch.Tensor, window: torch.Tensor
) -> AbstractContextManager[Any]:
    """Inside, what autograd saves of a window is kept as its margins and the block."""
    if not torch.is_grad_enabled() or window.nbytes < WORTH or window.dtype is not block.dtype:
        return _NOTHING
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    counts = None if hooks is None else getattr(hooks[0], "counts", None)
    if hooks is not None and counts is None:
        return _NOTHING  # a checkpoint, which keeps nothing
    found = place(block, window)
    if found is None:
        return _NOTHING
    kept = _Kept(block.detach(), block, window, found, counts)
    return torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack)


class _Kept:
    def __init__(
        self, block: torch.Tensor, written: torch.Tensor, window: torch.Tensor, place: Place, counts: Any
    ) -> None:
        self._counts = counts
        self._block, self._written, self._version = block, written, written._version
        self._shape, self._strides = window.shape, window.stride()
        self._memory = window.untyped_storage()._cdata
        self._place = place
        self._margins: list[torch.Tensor] | None = None

    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage()._cdata != self._memory or tensor.shape != self._shape:
            return tensor
        if self._margins is None:
            self._margins = self._place.cut(tensor)
            for one in (self._block, *self._margins) if self._counts is not None else ():
                self._counts(one)
        return self

    def unpack(self, saved: Any) -> torch.Tensor:
        if saved is not self:
            found: torch.Tensor = saved
            return found
        if self._written._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"block of shape {list(self._block.shape)} is at version {self._written._version}; expected version "
                f"{self._version} instead"
            )
        assert self._margins is not None
        window = torch.empty_strided(self._shape, self._strides, dtype=self._block.dtype, device=self._block.device)
        joined: torch.Tensor = self._place.join(window, self._block, self._margins)
        return joined
