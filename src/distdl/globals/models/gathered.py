"""Weights that have come together, for as long as a forward or a backward needs them: autograd keeps no whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from distdl.globals.models.gathering import Gather, Gathering, gather_each, state_of, that_come_along
from distdl.globals.tensor.global_tensor import GlobalTensor


class Gathered:
    """Parameters that have come together, for as long as they are needed; they can come together again.

    Attributes:
        ready: the whole tensors, if they have come along with others in a backward.
        recorded: whether what they have come together to depends on them.
        before: those of the module whose forward ended before.
        first: a number before those of the autograd nodes that read them.
        parameters: which they are.
    """

    def __init__(self, gathering: Gathering, parameters: list[GlobalTensor], keep: Keep) -> None:
        self.gathering, self.parameters, self._keep = gathering, parameters, keep
        self._states = [state_of(one) for one in parameters]
        self._wholes: tuple[torch.Tensor, ...] | None = None
        self.ready: tuple[torch.Tensor, ...] | None = None
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
        self._wholes = tuple(one.detach() for one in copies)
        for place, one in enumerate(self._wholes):
            if one.numel():
                self._keep.held[one.untyped_storage()._cdata] = (self, place)

    def release(self) -> None:
        """Let the whole tensors go."""
        for one in self._wholes or ():
            self._keep.held.pop(one.untyped_storage()._cdata, None)
        self._wholes, self.ready = None, None

    def is_there(self) -> bool:
        """Whether the whole tensors are there, or have come along."""
        return self._wholes is not None or self.ready is not None

    def is_to_come(self) -> bool:
        """Whether they have gone, and can come together again."""
        return not self.is_there() and not self.is_outdated()

    def is_outdated(self) -> bool:
        """Whether parameters have been written, or given other data, since."""
        return [state_of(one) for one in self.parameters] != self._states

    def wholes(self) -> tuple[torch.Tensor, ...]:
        """The whole tensors; they come together if they have gone.

        Raises: RuntimeError if parameters have been written since.
        """
        if self._wholes is None:
            if self.is_outdated():
                raise RuntimeError(
                    "a weight that backward needs has been modified by an inplace operation, or given other data "
                    "(p.data = ...), since the forward; call backward before, as before optimizer.step()"
                )
            self._wholes, self.ready = self.ready, None
            if self._wholes is None:
                with torch.no_grad():
                    self._wholes = self.gathering.gather([one._block for one in self.parameters])
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
    each = that_come_along(to_come())
    if len(each) < 2:
        return []
    for one, wholes in zip(each, gather_each(each), strict=True):
        one.ready = wholes
    return each


class _Again(NamedTuple):
    """What is kept in the place of a tensor that lies in the memory of a gathered weight."""

    gathered: Gathered
    place: int
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
        self.held: dict[int, tuple[Gathered, int]] = {}  # by the memory
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
        if not torch.is_grad_enabled():  # (else the backward of this one may read them, and not come by here)
            self._again[backward] += [(one, first) for one in gathered]

    def settle(self) -> None:
        """Let go what backwards have left that failed."""
        if torch._C._current_graph_task_id() == -1:
            for backward in list(self._again):
                self._release(backward)

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
            found = self.held.get(x.untyped_storage()._cdata)
        if found is not None and x.dtype is found[0].gathering.dtype and not (x.is_conj() or x.is_neg()):
            return _Again(*found, x.size(), x.stride(), int(x.storage_offset()))
        if self.counted is not None:
            self.counted(x)
        return _Kept(x.detach(), x._version) if plain else x


def restore(kept: Any) -> torch.Tensor:
    if isinstance(kept, _Again):
        return kept.gathered.wholes()[kept.place].as_strided(kept.shape, kept.strides, kept.offset)
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
