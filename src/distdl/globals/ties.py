"""Which global tensors share cells in torch: views, and those whose cells had to move, so that here they do not."""

from __future__ import annotations

import weakref

import torch

from distdl.globals.tensor import GlobalTensor, note_requires


class _Moved:
    """A tensor, and one that in torch would be a view of it, and has cells of its own, because they had to move.

    What is written into one of them does not reach the other, which is an error as soon as that is used. Who writes
    into a block (``x.to_local().zero_()``) tells nobody, but torch counts the writes.
    """

    __slots__ = ("_base", "_base_writes", "_copy", "_copy_writes", "_why_base", "_why_copy")

    def __init__(self, base: GlobalTensor, copy: GlobalTensor) -> None:
        self._base, self._base_writes = weakref.ref(base), writes_of(base._block)
        self._copy, self._copy_writes = weakref.ref(copy), writes_of(copy._block)
        self._why_base = self._why_copy = ""

    def holds(self) -> bool:
        """Whether both are still there, or the one that is does not have the values that it should."""
        base, copy = self._base(), self._copy()
        return (base is not None and (copy is not None or bool(self._why_base))) or (
            copy is not None and bool(self._why_copy)
        )

    def base_of(self, x: GlobalTensor) -> GlobalTensor | None:
        """What a tensor should be a view of, if it is the one that should."""
        return self._base() if x is self._copy() else None

    def written(self, x: GlobalTensor, name: str) -> None:
        """Take note of a function that has written one of them."""
        if x is self._copy():
            self._why_base = (
                f"{name} has written in place into what in torch would be a view of this tensor; its cells had moved "
                f"to other workers, so this tensor does not have the new values. Use the result of {name} instead, or "
                "a clone before it"
            )
        else:
            self._why_copy = (
                f"{name} has written in place into the tensor of which this one would be a view in torch; the cells of "
                "this one had moved to other workers before, so it does not have the new values. Take it again behind "
                f"{name}, or write into a clone"
            )

    def check(self, x: GlobalTensor) -> None:
        """Check that the other one has not been written.

        Raises: RuntimeError.
        """
        base, copy = self._base(), self._copy()
        if x is copy:
            if not self._why_copy and base is not None and writes_of(base._block) != self._base_writes:
                self.written(base, "a function of a block (to_local)")
            why = self._why_copy
        else:
            if not self._why_base and copy is not None and writes_of(copy._block) != self._copy_writes:
                self.written(copy, "a function of a block (to_local)")
            why = self._why_base
        if why:
            raise RuntimeError(why)


def writes_of(x: torch.Tensor) -> int:
    """How often the memory of a plain tensor has been written; in inference mode, torch does not count."""
    return 0 if x.is_inference() else x._version


def note_copied(x: GlobalTensor, y: GlobalTensor) -> None:
    """Take note that y, which in torch would be a view of x, has cells of its own, because they had to move."""
    above = _lies_in(x)
    # (what is a copy of a copy should be a view of what the first one is a copy of)
    above += [base for one in above for tie in one.__dict__.get("_ties", ()) if (base := tie.base_of(one)) is not None]
    for base in reversed(above):
        _tie(base, y)


def note_view(x: GlobalTensor, y: GlobalTensor) -> None:
    """Take note of a view of x; if x should be a view of another tensor, too, so should y."""
    above = x.__dict__.get("_views_of", ())
    y._views_of = (weakref.ref(x), *(one for one in above if one() is not None))
    for tie in x.__dict__.get("_ties", ()):
        base = tie.base_of(x)
        if base is not None:
            _tie(base, y)


def _lies_in(x: GlobalTensor) -> list[GlobalTensor]:
    """A tensor, what it is a view of, what that is a view of, and so on, of what is still there."""
    above = [one() for one in x.__dict__.get("_views_of", ())]
    return [x, *(one for one in above if one is not None)]


def base_of(x: GlobalTensor) -> GlobalTensor | None:
    """What a tensor is a view of, and what is no view itself, or has no graph; None if there is none."""
    above = _lies_in(x)
    base = next((one for one in above if not one._block._is_view()), above[-1])
    return None if base is x else base


def _tie(base: GlobalTensor, copy: GlobalTensor) -> None:
    tie = _Moved(base, copy)
    for one in (base, copy):
        one._ties = [*(other for other in one.__dict__.get("_ties", ()) if other.holds()), tie]


_WRITE_EXPANDED = frozenset(["fill_", "zero_", "masked_fill_", "an assignment to a part", "fill_diagonal_"])


def check_written(x: GlobalTensor, name: str = "") -> None:
    """Check that a tensor that a function is to write has each element in a place of its own, as far as torch looks.

    Raises: RuntimeError, as torch does; here on every worker, also on one whose block has not several in one place.
    """
    strides = () if name in _WRITE_EXPANDED else x.__dict__.get("_strides", ())
    if 0 in strides and any(n > 1 and not step for n, step in zip(x.shape, strides, strict=True)) and x.numel():
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def note_written(x: GlobalTensor, name: str) -> None:
    """Take note of a function that has written a global tensor in place (or may have: it returned its argument).

    Raises: RuntimeError where torch refuses to write a tensor with several elements in one place. (It sees that in the
        blocks in which there are several.)
    """
    note_requires(x)
    if "_strides" in x.__dict__:
        check_written(x, name)
    if "_known" in x.__dict__:
        x._known.written()
    if "_ties" in x.__dict__ or "_views_of" in x.__dict__:
        for one in _lies_in(x):
            for tie in one.__dict__.get("_ties", ()):
                tie.written(one, name)
