"""Weights that have come together, for as long as a forward or a backward needs them: autograd keeps no whole ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

    def __init__(
        self, gathering: Gathering, parameters: list[GlobalTensor], held: dict[int, tuple[Gathered, int]]
    ) -> None:
        self.gathering, self.parameters, self._held = gathering, parameters, held
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
                self._held[one.untyped_storage()._cdata] = (self, place)

    def release(self) -> None:
        """Let the whole tensors go."""
        for one in self._wholes or ():
            self._held.pop(one.untyped_storage()._cdata, None)
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
