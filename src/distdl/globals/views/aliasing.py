"""Which global tensors would share memory in torch: views, and copies that stand for views.

A view whose cells have to move to other workers is such a copy.
"""

from __future__ import annotations

import weakref

import torch

from distdl.geometry.regions import Region, meet, overlaps_itself
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.graph_state import note_requires


class Memory:
    """The memory of a tensor and its views.

    Where the cells of a view have to move to other workers, the view is a copy with a memory of its own. Both memories
    form a family, with those of all further copies. A write into one member outdates the same places of the others, and
    using an outdated tensor is an error. Only the same places: q, k and v of an attention are parts of one tensor, and
    ``rearrange`` copies all three. Then ``q *= scale`` outdates neither k nor v.

    Attributes:
        family: weak references to all memories that would be one in torch; None while there is only this one.
        placed: whether the strides and offsets of the tensors here say where they lie in torch's memory.
        fixed: why nothing may be written here; empty if it may.
        buffers: the memories of buffers and parameters that were set to a tensor here (see :func:`note_stored`). The
            family refers to them weakly; this list keeps them.
        writes: how many functions have written here.
        has_plain_views: whether a view was made without gradients.
    """

    def __init__(self) -> None:
        self.family: list[weakref.ref[Memory]] | None = None
        self.placed, self.fixed = True, ""
        self.buffers: list[Memory] = []
        self.writes, self.has_plain_views = 0, False
        self._outdated: list[tuple[Region | None, str]] = []  # regions, or None for all of it; and the error to raise

    def join(self, block: torch.Tensor, source: Memory, source_block: torch.Tensor) -> None:
        """Become a member of the family of a source, of which this is a copy.

        Writes into both blocks are counted, also those that go past this library, as ``x.to_local().zero_()`` does.
        """
        if source.family is None:
            source.family = [weakref.ref(source)]
            source._watch(source_block)
        source.family[:] = [*(one for one in source.family if one() is not None), weakref.ref(self)]
        self.family = source.family
        self._watch(block)

    def check(self, x: GlobalTensor) -> None:
        """Raise RuntimeError if a write into another member has outdated x, a tensor in this memory."""
        self._find_unnoted_writes()
        own = self._region_of(x) if self._outdated else None
        for region, why in self._outdated:
            if region is None or own is None or meet(own, region):
                raise RuntimeError(why)
        if not self._outdated and len(self._members()) == 1:
            self.family = None

    def written(self, x: GlobalTensor, name: str) -> None:
        """Note that the function of this name has written into x, which lies here."""
        self._outdate_others(self._region_of(x), name)

    def _region_of(self, x: GlobalTensor) -> Region | None:
        """Return the region of torch's memory in which x lies; None if its place is not known."""
        own = x.__dict__
        at = own.get("_strides", ()), own.get("_offset", 0)
        return Region.of(tuple(x.shape), *at, x.dtype.itemsize) if self.placed else None

    def _members(self) -> list[Memory]:
        return [one for ref in self.family or () if (one := ref()) is not None]

    def _watch(self, block: torch.Tensor) -> None:
        """Count the writes into a block and its views from now on, without keeping the block's cells."""
        with torch.inference_mode(block.is_inference()):  # a tensor that is made in inference mode has no counter
            self._block = block.detach()  # shares the counter of the block, also once its data is another
            self._block.data = self._block.new_empty(0)
        self._known = count_of_writes(self._block)

    def _find_unnoted_writes(self) -> None:
        """Outdate the members beside each block that a function has written past this library."""
        for one in [one for one in self._members() if count_of_writes(one._block) != one._known]:
            one._outdate_others(None, "a function of a block (to_local) or of a buffer that was set to this tensor")

    def _outdate_others(self, region: Region | None, name: str) -> None:
        """Outdate a region of all other members; the whole of them if it is None.

        The family lists its members by age. An older one is what this memory was copied from, and the error says so.
        """
        why = _INTO_COPY
        for one in self._members():
            one._known = count_of_writes(one._block)
            if one is self:
                why = _INTO_BASE
            elif all(region != known for known, _ in one._outdated):
                one._outdated.append((region, why.format(name)))

    def __del__(self) -> None:
        if self.family is not None:
            self._find_unnoted_writes()


PRUNING = (
    'For torch.nn.utils.prune with weights="sharded", make the mask of the whole weight: '
    "w = module.weight.full_tensor(); mask = prune.L1Unstructured(0.5).compute_mask(w, torch.ones_like(w)); "
    "prune.custom_from_mask(module, 'weight', mask)"
)
"""What users can do where code of torch's, which they cannot change, writes into a view."""

_INTO_COPY = (
    "{0} has written in place into what in torch would be a view of this tensor; its cells had moved to other workers, "
    "so this tensor does not have the new values. Write into this tensor itself, or go on with the view: "
    "v = x.view(-1); v[i] = 0; x = v.view(x.shape). " + PRUNING
)
_INTO_BASE = (
    "{0} has written in place into the tensor of which this one would be a view in torch, or into another view of it; "
    "the cells of this one had moved to other workers, so it does not have the new values. Take the view again after "
    "the write, or write into a clone"
)
_SCATTERED = (
    "writes a tensor of which several elements lie in one place in torch; its cells had moved to other workers, so "
    "elements of one place would differ. Please clone() the tensor before"
)
_SETTLED = (
    "writes a tensor to which a buffer or a parameter of the model was set; the buffer is whole on every worker and "
    "would not get the new values. Write into the buffer, or set it to a clone() of the tensor"
)


def count_of_writes(x: torch.Tensor) -> int:
    """Return how often the memory of a plain tensor was written; 0 in inference mode, where torch does not count."""
    return 0 if x.is_inference() else x._version


def times_data_set(x: GlobalTensor) -> int:
    """Return how often ``x.data = ...`` has replaced the data of a tensor, which torch does not count."""
    given: int = x.__dict__.get("_given", 0)
    return given


def note_data_set(x: GlobalTensor) -> None:
    """Count that ``x.data = ...`` has replaced the data of x."""
    x.__dict__["_given"] = times_data_set(x) + 1


def memory_of(x: GlobalTensor) -> Memory:
    """Return the memory of x and its views, made at first use."""
    found: Memory | None = x.__dict__.get("_memory")
    if found is None:
        found = x._memory = Memory()
    return found


def note_copied(x: GlobalTensor, y: GlobalTensor, placed: bool = True) -> None:
    """Note that y, which torch would make a view of x, is a copy, because its cells had to move.

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


def note_stored(x: GlobalTensor, whole: torch.Tensor) -> None:
    """Note that a buffer or a parameter was set to x, and became the plain tensor ``whole``: x is read-only then."""
    source, own = memory_of(x), Memory()
    own.join(whole, source, x._block)
    source.buffers.append(own)
    source.fixed = _SETTLED


def note_new_memory(x: GlobalTensor) -> None:
    """Note that x has new memory, which it shares with no other tensor."""
    x.__dict__.pop("_memory", None)


def note_same_memory(x: GlobalTensor, y: GlobalTensor) -> None:
    """Note that x lies in the memory of y from now on."""
    x._memory = memory_of(y)


def note_view(x: GlobalTensor, y: GlobalTensor) -> None:
    """Note that y is a view of x."""
    above = x.__dict__.get("_views_of", ())
    y._views_of = (weakref.ref(x), *(one for one in above if one() is not None))
    y._memory = memory_of(x)


def base_of(x: GlobalTensor) -> GlobalTensor | None:
    """Return the tensor of which x is a view in the end, as ``x._base`` in torch; None if it is x itself.

    It is the first whose block is no view, beginning with x, then what x was taken from, and so on. If all these blocks
    are views, it is the last of these tensors that still exists.
    """
    above = [one() for one in x.__dict__.get("_views_of", ())]
    chain = [x, *(one for one in above if one is not None)]
    base = next((one for one in chain if not one._block._is_view()), chain[-1])
    return None if base is x else base


_PART_ASSIGNMENT = "an assignment to a part"  # the functions that write the part note the write themselves
_WRITE_EXPANDED = frozenset(["fill_", "zero_", "masked_fill_", _PART_ASSIGNMENT, "fill_diagonal_"])


def check_writable(x: GlobalTensor, name: str = "") -> None:
    """Raise torch's RuntimeError if a function would write into an expanded tensor. Some functions may (``fill_``).

    Torch itself raises only where a block has several elements in one place. This raises on every worker.

    Args:
        name: of the function; an empty one may not.
    """
    strides = () if name.removeprefix("_foreach_") in _WRITE_EXPANDED else x.__dict__.get("_strides", ())
    if 0 in strides and any(n > 1 and not step for n, step in zip(x.shape, strides, strict=True)) and x.numel():
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def write_back(x: GlobalTensor, y: GlobalTensor, name: str) -> GlobalTensor:
    """Copy y, the result of a function that writes into x in torch, into x. Returns x. See :func:`check_no_overlap`."""
    check_no_overlap(x, name)
    x.copy_(y)
    return x


def check_no_overlap(x: GlobalTensor, name: str) -> None:
    """Raise RuntimeError if x is made of windows that overlap, so that several of its elements lie in one place.

    Torch's function would read elements that it has written before, so its result depends on the order.
    """
    strides = x.__dict__.get("_strides", ())
    if strides and 0 not in strides and overlaps_itself(tuple(x.shape), strides):
        raise RuntimeError(
            f"{name} would write into windows that overlap, where several elements of a tensor lie in one place, and "
            "its result would depend on their order. Please clone() the tensor before"
        )


def note_written(x: GlobalTensor, name: str) -> None:
    """Note that a function has written x, or may have, for it returned x. Called after the write.

    Raises: RuntimeError if x must not be written (see :func:`check_writable` and ``Memory.fixed``). The block has the
        new values by then.
    """
    note_requires(x)
    if "_strides" in x.__dict__:
        check_writable(x, name)
    memory: Memory | None = x.__dict__.get("_memory")
    if memory is not None:
        memory.writes += 1
        if name != _PART_ASSIGNMENT and memory.family is not None:
            memory.written(x, name)
        if name != _PART_ASSIGNMENT and memory.fixed and x.numel():
            raise RuntimeError(f"{name} {memory.fixed}")
