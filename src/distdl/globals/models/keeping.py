"""Weights that have come together, for as long as a forward or a backward needs them: autograd keeps no whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, tee
from typing import Any, NamedTuple

import torch

from distdl.globals.models.gathering import Gather, Gathering, gather_each, state_of, that_come_along
from distdl.globals.tensor import GlobalTensor
from distdl.globals.ties import data_given


class Gathered:
    """Parameters that have come together, for as long as they are needed; they can come together again.

    One that is given other data since (``p.data = ...``) has two wholes: what torch has saved itself reads in backward
    what its data is by then, and a view what it was. So the shares of what it was stay as long as the graph does.

    Attributes:
        ready: the whole tensors, if they have come along with others in a backward.
        recorded: whether what they have come together to depends on them.
        before: those of the module whose forward ended before.
        first: a number before those of the autograd nodes that read them.
        parameters: which they are.
    """

    def __init__(self, gathering: Gathering, parameters: list[GlobalTensor], keep: Keep) -> None:
        self.gathering, self.parameters, self._keep = gathering, parameters, keep
        self._blocks = [one._block for one in parameters]
        self._shares = [one.detach() for one in self._blocks]  # (other data goes past these; torch counts writes on)
        self._versions = [one._version for one in self._shares]
        self._given = [data_given(one) for one in parameters]
        self._wholes: tuple[torch.Tensor, ...] | None = None
        self._former: tuple[torch.Tensor, ...] | None = None
        self._copies: Sequence[torch.Tensor] = ()  # as long as the forward goes on
        self.ready: tuple[torch.Tensor, ...] | None = None
        self._states: list[tuple[int, ...]] = []  # when they came along
        self.recorded = False
        self.before: Sequence[Gathered] = ()
        self.first = 0

    def copies(self, wholes: tuple[torch.Tensor, ...] | None = None) -> tuple[torch.Tensor, ...]:
        """The whole tensors, which depend on the shares.

        Args:
            wholes: their values, if they have come along with others.
        """
        blocks = [one._block for one in self.parameters]
        copies: tuple[torch.Tensor, ...] = Gather.apply(self.gathering, wholes, self.release, *blocks)
        return copies

    def hold(self, copies: Sequence[torch.Tensor]) -> None:
        """From here on, autograd does not keep these tensors, but this object."""
        self._wholes, self._copies = tuple(one.detach() for one in copies), copies
        for place, (one, copy) in enumerate(zip(self._wholes, copies, strict=True)):
            if one.numel():
                self._keep.held[one.untyped_storage()._cdata] = self._keep.held[id(copy)] = (self, place)

    def release(self) -> None:
        """Let the whole tensors go."""
        for address in (*(one.untyped_storage()._cdata for one in self._wholes or ()), *map(id, self._copies)):
            self._keep.held.pop(address, None)
        self._wholes, self._former, self._copies, self.ready = None, None, (), None

    def bring(self, wholes: tuple[torch.Tensor, ...]) -> None:
        """Keep the whole tensors, which have come along in a backward, until it needs them."""
        self.ready, self._states = wholes, [state_of(one) for one in self.parameters]

    def _is_as_it_was(self) -> bool:
        return [data_given(one) for one in self.parameters] == self._given

    def is_there(self) -> bool:
        """Whether the whole tensors are there, or have come along."""
        return self._wholes is not None or self.ready is not None

    def is_to_come(self) -> bool:
        """Whether they have gone, and can come together again."""
        return not self.is_there() and self._is_as_it_was() and not self.is_outdated()

    def is_itself(self, x: torch.Tensor, place: int) -> bool:
        """Whether what is saved is a weight itself, and no view of it: then backward reads what its data is by then."""
        return x is self._copies[place]  # (a view of all of it has its shape and strides, too)

    def former(self, place: int) -> torch.Tensor:
        """The memory that a weight had in the forward.

        Raises: RuntimeError if parameters have been written since.
        """
        wholes = self.wholes()
        if not self._copies:  # (as long as the forward goes on, these are what they were)
            self.gather_former()
        return wholes[place] if self._former is None else self._former[place]

    def gather_former(self) -> None:
        """Let what they were come together, too, if one of them has been given other data since."""
        if self._former is None and not self._is_as_it_was():
            with torch.no_grad():
                self._former = self.gathering.gather(self._shares)

    def _gather_now(self) -> tuple[torch.Tensor, ...]:
        """What they are now: other data may have another dtype, and that without a gradient another layout."""
        now = self.parameters
        together = [now] if len({one.dtype for one in now}) == 1 else [[one] for one in now]
        return tuple(whole for some in together for whole in Gathering.of(some).gather([one._block for one in some]))

    def is_outdated(self) -> bool:
        """Whether parameters have been written since. (One without a gradient gets another block with other data.)"""
        if [one._version for one in self._shares] != self._versions:
            return True
        now = [one._block for one in self.parameters]
        return any(one is not block and one._version for one, block in zip(now, self._blocks, strict=True))

    def wholes(self) -> tuple[torch.Tensor, ...]:
        """The whole tensors; they come together if they have gone.

        Raises: RuntimeError if parameters have been written since.
        """
        if self._wholes is None:
            if self.is_outdated():
                raise RuntimeError(
                    "a weight that backward needs has been modified by an inplace operation since the forward; call "
                    "backward before optimizer.step()"
                )
            ready, self.ready = self.ready, None
            holds = [state_of(one) for one in self.parameters] == self._states
            with torch.no_grad():  # (a write by ``data`` is no error: backward reads what they are by then)
                self._wholes = ready if ready is not None and holds else self._gather_now()
        return self._wholes


def come_along(gathered: Sequence[Gathered]) -> list[Gathered]:
    """Let those that a backward needs now come together, and with them those that it will most likely need next.

    Returns: which have, if they are several.
    """

    def to_come() -> Iterator[Gathered]:
        some = gathered
        while some and all(one.is_to_come() or one.is_there() for one in some):
            yield from (one for one in some if one.is_to_come())
            some = some[0].before

    if not any(one.is_to_come() for one in gathered):
        return []
    first, rest = next(to_come(), None), islice(to_come(), 1, None)
    if first is None:
        return []
    others, known = tee(rest)
    along = that_come_along(first.parameters, (one.parameters for one in known))
    each = [first, *(one for one, _ in zip(others, along, strict=False))]
    if len(each) < 2:
        return []
    for one, wholes in zip(each, gather_each([one.parameters for one in each]), strict=True):
        one.bring(wholes)
    return each


class _Again(NamedTuple):
    """What is kept in the place of a tensor that lies in the memory of a gathered weight."""

    gathered: Gathered
    place: int
    itself: bool
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """A tensor that is kept, and how often it had been written by then: torch compares that only where it keeps."""

    tensor: torch.Tensor
    version: int


class Keep:
    """What is kept of a tensor that autograd saves: of a gathered weight, only where to gather it again.

    Attributes:
        counted: what counts the tensors that are kept, if anything does.
    """

    def __init__(self) -> None:
        self.counted: Callable[[torch.Tensor], Any] | None = None
        self.held: dict[int, tuple[Gathered, int]] = {}  # by the memory, and by the tensor, of other data by then
        # what has come together again, and a number before those of the nodes that read it, by the backward
        self._again: dict[int, list[tuple[Gathered, int]]] = {}

    def gather_again(self, gathered: Sequence[Gathered], first: int, number: int, gradients: Any) -> None:
        """Let weights come together for a backward, and those go that it reads no more.

        Those that get a gradient go with it; others do not, and nor do those of which a backward asks for none. A
        backward runs its nodes from the latest to the first, so it has left a module of which all were made later.

        Args:
            first: a number before those of the nodes that read them.
            number: that of the node that is to run.
            gradients: that it gets.
        """
        backward = torch._C._current_graph_task_id()
        if backward not in self._again:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._release(backward))
        self._release(backward, number)
        if not torch.is_grad_enabled():
            self._again[backward] += [(one, one.first) for one in come_along(gathered)]
        for one in gathered:
            one.wholes()
            one.gather_former()
        if not torch.is_grad_enabled():  # (else the backward of this one may read them, and not come by here)
            self._again[backward] += [(one, first) for one in gathered]

    def settle(self) -> None:
        """Let go what backwards have left that failed."""
        if torch._C._current_graph_task_id() == -1:
            for backward in list(self._again):
                self._release(backward)

    def forget(self) -> None:
        """Let go what has come along with others and was not needed yet."""
        for waiting in self._again.values():
            for one, _ in waiting:
                one.ready = None

    def _release(self, backward: int, number: int = -1) -> None:
        """Let go what nodes behind a number have read in a backward; without one, all."""
        waiting = self._again.pop(backward, [])
        for one, first in waiting:
            if first > number:
                one.release()
        if number >= 0:
            self._again[backward] = [each for each in waiting if each[1] <= number]

    def __call__(self, x: torch.Tensor) -> Any:
        plain = type(x) is not GlobalTensor and x.layout is torch.strided
        found = None
        if plain and self.held:
            found = self.held.get(id(x)) or self.held.get(x.untyped_storage()._cdata)
        if found is not None and x.dtype is found[0].gathering.dtype and not (x.is_conj() or x.is_neg()):
            return _Again(*found, found[0].is_itself(x, found[1]), x.size(), x.stride(), int(x.storage_offset()))
        if self.counted is not None:
            self.counted(x)
        return _Kept(x.detach(), x._version) if plain else x


def restore(kept: Any) -> torch.Tensor:
    if isinstance(kept, _Again):
        if kept.itself:
            return kept.gathered.wholes()[kept.place]
        return kept.gathered.former(kept.place).as_strided(kept.shape, kept.strides, kept.offset)
    if isinstance(kept, _Kept):
        if kept.tensor._version != kept.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(kept.tensor.shape)} is at version {kept.tensor._version}; expected version "
                f"{kept.version}"
            )
        return kept.tensor
    found: torch.Tensor = kept
    return found
