"""Which global tensors share cells in torch: views, and those whose cells had to move, so that here they do not."""

from __future__ import annotations

import weakref

import torch

from distdl.geometry.regions import Region, meet, overlaps_itself
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.graph_state import note_requires


class Memory:
    """What a tensor and its views have in common: their cells.

    Where the cells of a view have to move to other workers, the view is a copy with a memory of its own. The two form a
    family, with all further copies of either. A write into one member makes what lies in the same places of the others
    outdated, and using that is an error. Heads of attention need the places, not only the members: q, k and v are
    parts of one tensor, all three are copied by ``rearrange``, and then ``q *= scale`` writes into one of them.

    Attributes:
        family: weak references to all that would be the same memory in torch; None as long as there is no other.
        placed: whether the strides and offsets of the tensors here say where they lie in torch's memory.
        fixed: why nothing may be written here, or nothing.
        buffers: those of the family that are buffers or parameters of a model; see :func:`note_settled`.
        writes: how many functions have written here.
        has_plain_views: whether a view was made without gradients.
    """

    def __init__(self) -> None:
        self.family: list[weakref.ref[Memory]] | None = None
        self.placed, self.fixed = True, ""
        self.buffers: list[Memory] = []
        self.writes, self.has_plain_views = 0, False
        self._outdated: list[tuple[Region | None, str]] = []  # the places, or None for all, and why

    def join(self, block: torch.Tensor, source: Memory, source_block: torch.Tensor) -> None:
        """Become a member of the family of a source, of which this is a copy.

        Args:
            block, source_block: what lies here and in the source. Torch counts all writes into them, also those of
                which nobody tells us (``x.to_local().zero_()``).
        """
        if source.family is None:
            source.family = [weakref.ref(source)]
            source._count(source_block)
        source.family[:] = [*(one for one in source.family if one() is not None), weakref.ref(self)]
        self.family = source.family
        self._count(block)

    def check(self, x: GlobalTensor) -> None:
        """Check that x, which lies here, has the values that it has in torch.

        Raises: RuntimeError.
        """
        self._look()
        own = self._region_of(x) if self._outdated else None
        for region, why in self._outdated:
            if region is None or own is None or meet(own, region):
                raise RuntimeError(why)
        if not self._outdated and len(self._members()) == 1:
            self.family = None

    def written(self, x: GlobalTensor, name: str) -> None:
        """Take note of a function that has written into x, which lies here."""
        self._tell(self._region_of(x), name)

    def _region_of(self, x: GlobalTensor) -> Region | None:
        """Where in torch's memory a tensor lies, as far as that is known."""
        own = x.__dict__
        at = own.get("_strides", ()), own.get("_offset", 0)
        return Region.of(tuple(x.shape), *at, x.dtype.itemsize) if self.placed else None

    def _members(self) -> list[Memory]:
        return [one for ref in self.family or () if (one := ref()) is not None]

    def _count(self, block: torch.Tensor) -> None:
        """Count the writes into a block and its views from now on. The block itself may go."""
        with torch.inference_mode(block.is_inference()):  # a tensor that is made in inference mode has no counter
            self._block = block.detach()
            self._block.data = self._block.new_empty(0)  # (it shares the counter)
        self._known = writes_of(self._block)

    def _look(self) -> None:
        """Find out which blocks have been written by functions that have not told us."""
        for one in [one for one in self._members() if writes_of(one._block) != one._known]:
            one._tell(None, "a function of a block (to_local) or of a buffer that was set to this tensor")

    def _tell(self, region: Region | None, name: str) -> None:
        """Let the other members know what has been written here."""
        why = _INTO_COPY  # (for the members that are older)
        for one in self._members():
            one._known = writes_of(one._block)
            if one is self:
                why = _INTO_BASE
            elif all(region != known for known, _ in one._outdated):
                one._outdated.append((region, why.format(name)))

    def __del__(self) -> None:
        if self.family is not None:
            self._look()


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
    "cells had moved to other workers before, so this one does not have the new values. Take it again after that, or "
    "write into a clone"
)
_SCATTERED = (
    "writes a tensor of which several elements lie in one place in torch; their cells had moved to other workers, and "
    "others do not have the new values. Please clone() the tensor before"
)
_SETTLED = (
    "writes a tensor to which a buffer or a parameter of the model was set, which is whole on every worker and does "
    "not have the new values. Write into the buffer, or set it to a clone() of the tensor"
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
    source, own = memory_of(x), Memory()
    own.placed = placed and source.placed
    strides = y.__dict__.get("_strides", ())
    if strides and overlaps_itself(tuple(y.shape), strides):
        own.fixed = _SCATTERED
    own.join(y._block, source, x._block)
    y._memory = own


def note_settled(x: GlobalTensor, whole: torch.Tensor) -> None:
    """Take note that a buffer or a parameter of a model has been set to x: in torch, they are one.

    Args:
        whole: the plain tensor that it has become.
    """
    source, own = memory_of(x), Memory()
    own.join(whole, source, x._block)
    source.buffers.append(own)
    source.fixed = _SETTLED


def lies_alone(x: GlobalTensor) -> None:
    """Take note that x has memory of its own from now on."""
    x.__dict__.pop("_memory", None)


def lies_with(x: GlobalTensor, y: GlobalTensor) -> None:
    """Take note that x has the memory of y from now on."""
    x._memory = memory_of(y)


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
        if name != _OF_PART and memory.family is not None:
            memory.written(x, name)
        if name != _OF_PART and memory.fixed and x.numel():
            raise RuntimeError(f"{name} {memory.fixed}")
