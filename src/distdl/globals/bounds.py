"""What all workers know of the values of an integer tensor, so that all raise the same error where one is no index.

An index that is out of range is seen by the worker that reads it, and by no other. But an integer tensor that enters is
agreed on anyway: then its bounds travel along, without a message of their own. They hold for what has the same values
(other shapes, layouts and integer dtypes), and until something is written in place. Of class numbers that a model
computes nothing is known: there the worker that reads a wrong one raises, and the others learn of it as of any failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from distdl.globals.tensor import GlobalTensor
from distdl.globals.ties import memory_of

MARKS = (-100, -1, 255)  # numbers that mark places to ignore: torch's own, and those that data sets use
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Bounds(NamedTuple):
    """How low and how high the values of a tensor go, with and without a number that marks places to ignore.

    Attributes:
        low, high: the lowest and the highest value.
        next_low, next_high: where those are marks, the next ones; else the same.
    """

    low: int
    next_low: int
    next_high: int
    high: int

    @classmethod
    def of(cls, x: torch.Tensor, marks: tuple[int | None, ...] = MARKS) -> Bounds | None:
        """Those of a plain tensor; None if it has no values, or no integers."""
        if x.dtype not in INTEGERS or not x.numel() or x.device.type == "meta":
            return None
        low, high = torch.stack(torch.aminmax(x)).tolist()  # (one wait for a device)
        different = low != high
        next_low = int(x[x != low].amin()) if different and low in marks else low
        next_high = int(x[x != high].amax()) if different and high in marks else high
        return cls(low, next_low, next_high, high)

    @classmethod
    def merged(cls, parts: Iterable[tuple[int, int, int, int] | None]) -> Bounds | None:
        """Those of a tensor of which the bounds of blocks are given."""
        values = sorted({value for part in parts if part is not None for value in part})
        if not values:
            return None
        low, high = values[0], values[-1]
        return cls(low, values[:2][-1] if low in MARKS else low, values[-2:][0] if high in MARKS else high, high)

    def without(self, ignored: int | None) -> tuple[int, int] | None:
        """The lowest and the highest value that is not ignored; None if these bounds do not tell, or there is none."""
        low = self.next_low if self.low == ignored else self.low
        high = self.next_high if self.high == ignored else self.high
        return None if ignored in (low, high) else (low, high)


class Known:
    """The bounds of a tensor and of its views, until something is written into the memory that they share."""

    def __init__(self, bounds: Bounds, x: GlobalTensor) -> None:
        self._bounds = bounds
        self._memory = memory_of(x)
        self._writes = self._memory.writes
        self._block, self._version = x._block, x._block._version

    def of(self, x: GlobalTensor) -> Bounds | None:
        """Those of a tensor that has noted them. None if it, or a view of it, was written, or has other memory now."""
        same = x.__dict__.get("_memory") is self._memory and self._memory.writes == self._writes
        return self._bounds if same and self._block._version == self._version else None


def know(x: GlobalTensor, bounds: Bounds | None) -> GlobalTensor:
    """Note the bounds of a global tensor. Every worker notes the same."""
    if bounds is not None and not x._block.is_inference():  # (which tells not when it is written)
        x._known = Known(bounds, x)
    return x


def bounds_of(x: GlobalTensor) -> Bounds | None:
    """The bounds that all workers know; None if they know none."""
    known: Known | None = x.__dict__.get("_known")
    return None if known is None else known.of(x)


def same_values(x: GlobalTensor, y: GlobalTensor) -> GlobalTensor:
    """Note that a tensor with memory of its own has the values of another, if its integers are long enough for them."""
    if y is x or "_known" not in x.__dict__:
        return y
    bounds = bounds_of(x)
    if bounds is not None and y.dtype is not x.dtype:
        own = torch.iinfo(y.dtype)
        bounds = bounds if own.min <= bounds.low and bounds.high <= own.max else None
    return know(y, bounds)


def share_bounds(x: GlobalTensor, view: GlobalTensor, moved: bool) -> None:
    """Note that a tensor is a view of another; or would be, had its cells not moved. It knows where its memory is.

    (Of a part nothing is known: the wrong value may be in another one.)
    """
    if view.numel() >= x.numel() and moved:
        same_values(x, view)
    elif view.numel() >= x.numel():
        view._known = x._known


def check_range(
    x: Any, first: int, stop: int, refuse: Callable[[torch.Tensor], Any], own: Any = None, ignored: int | None = None
) -> None:
    """Check that the values of a tensor are in ``range(first, stop)``.

    Args:
        refuse: torch's function of a tensor of the host that has one wrong value: it raises. (A GPU would stop.)
        own: what this worker reads of it, which is looked at where not all workers know the bounds. Not given where
            torch's own function looks at it.
        ignored: a value that is none, and right.
    Raises: what torch raises; on every worker if the bounds are known.
    """
    bounds = bounds_of(x) if type(x) is GlobalTensor else Bounds.of(x, (ignored,))
    known = None if bounds is None else bounds.without(ignored)
    if known is None and own is not None:
        bounds = Bounds.of(own, (ignored,))
        known = None if bounds is None else bounds.without(ignored)
    wrong = [value for value in known or () if not first <= value < stop]
    if wrong:
        refuse(torch.tensor(wrong[:1], device="cpu"))
