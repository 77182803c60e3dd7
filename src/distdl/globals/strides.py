"""The strides that a whole tensor would have in torch: whether torch would copy it to give it another shape.

No worker has the whole tensor, and a block tells nothing: one row of a slice is contiguous, the slice is not. What
torch copies may be written in place without a change to what it was copied from. So views take note of their strides,
which are those of a view of a tensor without memory, and what torch would copy is copied here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

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


def keep_strides(x: GlobalTensor, y: GlobalTensor, function: Callable[..., Any]) -> None:
    """Take note of those of a new tensor that a function of torch's makes as x is, but without gaps."""
    if "_strides" in x.__dict__ and getattr(function, "__name__", "") not in _CONTIGUOUS:
        note_strides(x, y, _LIKE)


def note_format(x: GlobalTensor, y: GlobalTensor, wanted: torch.memory_format) -> None:
    """Take note of those of a new tensor in an order of memory."""
    if wanted is not torch.contiguous_format:
        note_strides(x, y, View(("format", wanted), lambda whole: torch.empty_like(whole, memory_format=wanted)))


def lies_in(x: GlobalTensor, wanted: torch.memory_format, function: Callable[..., Any]) -> bool:
    """Whether torch's x lies in an order of memory, so that a function that gives it in this one returns x itself."""
    strides = strides_of(x)
    name = "contiguous" if function.__name__ == "contiguous" else "to"

    def try_it() -> bool:
        whole = _without_memory(x.shape, strides)
        return getattr(whole, name)(memory_format=wanted) is whole

    if not strides and wanted is torch.contiguous_format:
        return True
    return x._context.keep(("lies in", x.shape, strides, wanted, name), try_it)


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
_CONTIGUOUS = frozenset(["log_sigmoid", "mvlgamma", "special_multigammaln", "angle"])  # (that make no tensor like x)
