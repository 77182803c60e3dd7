"""The strides that a whole tensor would have in torch: whether torch would copy it to give it another shape.

No worker has the whole tensor, and a block tells nothing: one row of a slice is contiguous, the slice is not. What
torch copies may be written in place without a change to what it was copied from. So views take note of their strides,
which are those of a view of a tensor without memory, and what torch would copy is copied here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from distdl.geometry.boxes import Shape
from distdl.globals.tensor import GlobalTensor


class View(NamedTuple):
    """How a view is taken: of a tensor without memory, and a key that tells it from other ways."""

    key: Hashable
    of: Callable[[torch.Tensor], torch.Tensor]


def strides_of(x: GlobalTensor) -> Shape:
    """Those of the whole tensor; none if it is contiguous."""
    strides: Shape = x.__dict__.get("_strides", ())
    return strides


def note_strides(x: GlobalTensor, y: GlobalTensor, view: View) -> None:
    """Take note of those of a tensor that torch makes with the strides of a view of x."""
    before = strides_of(x)

    def after() -> Shape:
        seen = view.of(_without_memory(x.shape, before))
        return () if seen.is_contiguous() else seen.stride()

    strides = x._context.keep(("strides", x.shape, before, view.key), after)
    if strides:
        y._strides = strides


def same_strides(x: GlobalTensor, y: GlobalTensor) -> None:
    """Take note of those of a view of all of x."""
    if "_strides" in x.__dict__:
        y._strides = x._strides


def keep_strides(x: GlobalTensor, y: GlobalTensor) -> None:
    """Take note of those of a new tensor that torch makes as x is, but without gaps."""
    if "_strides" in x.__dict__:
        note_strides(x, y, _LIKE)


def is_copied(x: GlobalTensor, shape: Shape) -> bool:
    """Whether torch copies x to give it another shape."""
    strides = strides_of(x)

    def try_it() -> bool:
        try:
            _without_memory(x.shape, strides).view(shape)
        except RuntimeError:
            return True
        return False

    return bool(strides) and x._context.keep(("copied", x.shape, strides, shape), try_it)


def _without_memory(shape: Shape, strides: Shape) -> torch.Tensor:
    if not strides:
        return torch.empty(shape, device="meta")
    return torch.empty_strided(shape, strides, device="meta")


_LIKE = View("like", torch.empty_like)
