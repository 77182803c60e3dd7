"""Which global tensors share cells in torch: views, and those whose cells had to move, so that here they do not."""

from __future__ import annotations

import weakref

import torch

from distdl.geometry.regions import Region, meet, overlaps_itself
from distdl.globals.tensor import GlobalTensor, note_requires


class Memory:
    """What a tensor and its views have in common: their cells.

    Attributes:
        family: all that would be the same memory in torch; None as long as there is no other.
        scattered: whether elements have places of their own here that share one in torch.
        writes: how many functions have written into it.
        has_plain_views: whether a view was made without gradients.
    """

    __slots__ = ("__weakref__", "_missed", "_placed", "family", "has_plain_views", "scattered", "writes")

    def __init__(self, source: Memory | None = None, placed: bool = True) -> None:
        """
        Args:
            source: that of which this is a copy.
            placed: whether the strides and the offset of a tensor say where in torch's memory it lies.
        """
        self._missed: list[tuple[Region | None, str]] = []  # what has been written elsewhere, and why it is not here
        self._placed = placed
        self.family: _Family | None = None
        self.scattered = False
        self.writes = 0
        self.has_plain_views = False
        if source is not None:
            source.family = source.family or _Family(source)
            self.family = source.family
            self.family.join(self)
            self._placed = placed and source._placed
            self.scattered = source.scattered

    def check(self, x: GlobalTensor) -> None:
        """Check that x, which lies here, has the values that it has in torch.

        Raises: RuntimeError.
        """
        if self.family is not None:
            self.family.look()
            if self.family.is_alone() and not self._missed:
                self.family = None
        if self._missed:
            own = self.region_of(x)
            for region, why in self._missed:
                if region is None or own is None or meet(own, region):
                    raise RuntimeError(why)

    def region_of(self, x: GlobalTensor) -> Region | None:
        """Where in torch's memory a tensor lies, as far as that is known."""
        if not self._placed:
            return None
        own = x.__dict__
        return Region.of(tuple(x.shape), own.get("_strides", ()), own.get("_offset", 0), x.dtype.itemsize)

    def miss(self, region: Region | None, why: str) -> None:
        """Take note of what has been written elsewhere."""
        if all(region != known for known, _ in self._missed):
            self._missed.append((region, why))


class _Family:
    """Memories that would be one in torch. The cells of the first one have moved, and so the others are copies.

    What is written into one of them does not reach the others, which is an error as soon as those of their cells are
    used. Who writes into a block (``x.to_local().zero_()``) tells nobody, but torch counts the writes.
    """

    def __init__(self, first: Memory) -> None:
        self._members = [weakref.ref(first)]
        self._counts: list[_Count] = []

    def join(self, copy: Memory) -> None:
        self._members = [one for one in self._members if one() is not None] + [weakref.ref(copy)]

    def count(self, x: GlobalTensor, memory: Memory, copy: Memory) -> None:
        """Count how often the block of x is written, which lies in a memory, because a copy of it has been made."""
        self._counts.append(_Count(x._block, weakref.ref(memory), weakref.ref(copy)))

    def is_alone(self) -> bool:
        """Whether only one is left."""
        return not self._counts and sum(one() is not None for one in self._members) == 1

    def look(self) -> None:
        """Find out whether blocks have been written."""
        for one in self._counts:
            if one.come():
                self._tell(one.memory(), None, "a function of a block (to_local)")
        self._counts = [one for one in self._counts if one.copy() is not None]

    def written(self, memory: Memory, region: Region | None, name: str) -> None:
        """Take note of a function that has written into one of the memories."""
        self._tell(memory, region, name)
        self.pass_over()

    def pass_over(self) -> None:
        """Take note that what torch has counted since is known."""
        for one in self._counts:
            one.come()

    def _tell(self, memory: Memory | None, region: Region | None, name: str) -> None:
        why = _INTO_COPY  # (for those that were there before)
        for ref in self._members:
            one = ref()
            if memory is not None and one is memory:
                why = _INTO_BASE
            elif one is not None:
                one.miss(region, why.format(name))


class _Count:
    """How often a block has been written, whatever becomes of it: all views of its memory count together in torch.

    Attributes:
        memory: in which it lies.
        copy: because of which that is counted.
    """

    __slots__ = ("_block", "_writes", "copy", "memory")

    def __init__(self, block: torch.Tensor, memory: weakref.ref[Memory], copy: weakref.ref[Memory]) -> None:
        self._block = block.detach()
        self._block.data = self._block.new_empty(0)  # (so that the block may go; torch counts the same writes on)
        self._writes = writes_of(self._block)
        self.memory, self.copy = memory, copy

    def come(self) -> bool:
        """Whether there were writes since this was asked last."""
        before, self._writes = self._writes, writes_of(self._block)
        return self._writes != before


PRUNING = (
    'For torch.nn.utils.prune with weights="sharded", make the mask of the whole weight: '
    "w = module.weight.full_tensor(); mask = prune.L1Unstructured(0.5).compute_mask(w, torch.ones_like(w)); "
    "prune.custom_from_mask(module, 'weight', mask)"
)
"""What users can do where a function of torch's writes into a view, which they cannot change."""

_INTO_COPY = (
    "{0} has written in place into what in torch would be a view of this tensor; its cells had moved to other workers, "
    "so this tensor does not have the new values. Write into this tensor itself, or go on with the view: "
    "v = x.view(-1); v[i] = 0; x = v.view(x.shape). " + PRUNING
)
_INTO_BASE = (
    "{0} has written in place into the tensor of which this one would be a view in torch, or into another view of it; "
    "cells had moved to other workers before, so this one does not have the new values. Take it again behind {0}, or "
    "write into a clone"
)


def writes_of(x: torch.Tensor) -> int:
    """How often the memory of a plain tensor has been written; in inference mode, torch does not count."""
    return 0 if x.is_inference() else x._version


def data_given(x: GlobalTensor) -> int:
    """How often a tensor has been given other data (``p.data = ...``), of which torch takes no note."""
    given: int = x.__dict__.get("_given", 0)
    return given


def note_given(x: GlobalTensor) -> None:
    x.__dict__["_given"] = data_given(x) + 1


def note_set(x: GlobalTensor) -> None:
    """Take note that a tensor gets other memory (``x.set_(y)``), which torch counts as a write. Nothing is written."""
    memory = x.__dict__.get("_memory")
    family = None if memory is None else memory.family
    if family is not None:
        family.look()
    if not x._block.is_inference():
        torch.autograd.graph.increment_version(x._block)
    if family is not None:
        family.pass_over()


def memory_of(x: GlobalTensor) -> Memory:
    found: Memory | None = x.__dict__.get("_memory")
    if found is None:
        found = x._memory = Memory()
    return found


def note_copied(x: GlobalTensor, y: GlobalTensor, placed: bool = True) -> None:
    """Take note that y, which in torch would be a view of x, has cells of its own, because they had to move.

    Args:
        placed: whether the strides and the offset of y say where in torch's memory it lies.
    """
    memory = memory_of(x)
    own = y._memory = Memory(memory, placed)
    strides = x.__dict__.get("_strides", ())
    own.scattered = own.scattered or bool(strides and overlaps_itself(tuple(x.shape), strides))
    for one in (*_lies_in(x), y):
        lies_in = one.__dict__.get("_memory")
        if own.family is not None and lies_in in (memory, own):
            own.family.count(one, lies_in, own)


def lies_alone(x: GlobalTensor) -> None:
    """Take note that x has memory of its own from now on."""
    x.__dict__.pop("_memory", None)


def lies_with(x: GlobalTensor, y: GlobalTensor) -> None:
    """Take note that x has the memory of y from now on."""
    x._memory = memory_of(y)


def note_scattered(y: GlobalTensor) -> None:
    """Take note that some elements of a copy lie in one place in torch."""
    memory_of(y).scattered = True


def note_view(x: GlobalTensor, y: GlobalTensor) -> None:
    """Take note of a view of x."""
    above = x.__dict__.get("_views_of", ())
    y._views_of = (weakref.ref(x), *(one for one in above if one() is not None))
    y._memory = memory_of(x)


def _lies_in(x: GlobalTensor) -> list[GlobalTensor]:
    """A tensor, what it is a view of, what that is a view of, and so on, of what is still there."""
    above = [one() for one in x.__dict__.get("_views_of", ())]
    return [x, *(one for one in above if one is not None)]


def base_of(x: GlobalTensor) -> GlobalTensor | None:
    """What a tensor is a view of, and what is no view itself, or has no graph; None if there is none."""
    above = _lies_in(x)
    base = next((one for one in above if not one._block._is_view()), above[-1])
    return None if base is x else base


_OF_PART = "an assignment to a part"  # (of which the functions that write the part have taken note)
_WRITE_EXPANDED = frozenset(["fill_", "zero_", "masked_fill_", _OF_PART, "fill_diagonal_"])


def check_written(x: GlobalTensor, name: str = "") -> None:
    """Check that a tensor that a function is to write has each element in a place of its own, as far as torch looks.

    Raises: RuntimeError, as torch does; here on every worker, also on one whose block has not several in one place.
    """
    strides = () if name.removeprefix("_foreach_") in _WRITE_EXPANDED else x.__dict__.get("_strides", ())
    if 0 in strides and any(n > 1 and not step for n, step in zip(x.shape, strides, strict=True)) and x.numel():
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def write_back(x: GlobalTensor, y: GlobalTensor, name: str) -> GlobalTensor:
    """Write into all of x what a function has made of it that writes into x in torch.

    Raises: RuntimeError; see :func:`check_apart`.
    """
    check_apart(x, name)
    x.copy_(y)
    return x


def check_apart(x: GlobalTensor, name: str) -> None:
    """Check that a function writes into no windows that overlap: torch's would read what it has written.

    Raises: RuntimeError.
    """
    strides = x.__dict__.get("_strides", ())
    if strides and 0 not in strides and overlaps_itself(tuple(x.shape), strides):
        raise RuntimeError(
            f"{name} would write into windows that overlap, where several elements of a tensor lie in one place, and "
            "its result would depend on their order. Please clone() the tensor before"
        )


def note_written(x: GlobalTensor, name: str) -> None:
    """Take note of a function that has written a global tensor in place (or may have: it returned its argument).

    Raises: RuntimeError where torch refuses to write a tensor with several elements in one place. (It sees that in the
        blocks in which there are several.)
    """
    note_requires(x)
    if "_strides" in x.__dict__:
        check_written(x, name)
    memory: Memory | None = x.__dict__.get("_memory")
    if memory is not None:
        memory.writes += 1
    if memory is not None and memory.family is not None and name != _OF_PART:
        memory.family.written(memory, memory.region_of(x), name)
        if memory.scattered and x.numel():
            raise RuntimeError(
                f"{name} writes a tensor of which several elements lie in one place in torch; their cells had moved to "
                "other workers, and others do not have the new values. Please clone() the tensor before"
            )
    if "_ties" in x.__dict__ or "_views_of" in x.__dict__:
        for one in _lies_in(x):
            for tie in one.__dict__.get("_ties", ()):
                tie.written(one, name)
