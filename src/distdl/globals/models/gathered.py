"""Gathered weights: present only while a forward or a backward needs them, and gathered again for a backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from distdl.globals.models.gathering import Gather, Gathering, fit_one_message, gather_steps, share_version
from distdl.globals.tensor.global_tensor import GlobalTensor


class Gathered:
    """Parameters that one module has gathered at once.

    Args:
        held: the table of whole tensors that autograd is not to keep, by their memory: the gathered parameters that
            keep them instead, and the place among these. Entries are made and removed here.
    Attributes:
        parameters: the sharded parameters.
        prefetched: the whole tensors, if a backward has gathered them before it needs them.
        recorded: whether the whole tensors depend on the shares in a graph.
        previous: what the module gathered whose forward ended before. A backward needs that next.
        first_node: a sequence number of autograd before those of the nodes that read the whole tensors.
    """

    def __init__(
        self, gathering: Gathering, parameters: list[GlobalTensor], held: dict[int, tuple[Gathered, int]]
    ) -> None:
        self.gathering, self.parameters, self._held = gathering, parameters, held
        self._versions = [share_version(one) for one in parameters]
        self._values: tuple[torch.Tensor, ...] | None = None
        self.prefetched: tuple[torch.Tensor, ...] | None = None
        self.recorded = False
        self.previous: Sequence[Gathered] = ()
        self.first_node = 0

    def connected(self, values: tuple[torch.Tensor, ...] | None = None) -> tuple[torch.Tensor, ...]:
        """The whole tensors as results of an autograd node, which depend on the shares.

        Args:
            values: their values, if they were gathered already; else they are gathered now.
        """
        blocks = [one._block for one in self.parameters]
        found: tuple[torch.Tensor, ...] = Gather.apply(self.gathering, values, self.release, *blocks)
        return found

    def hold(self, whole: Sequence[torch.Tensor]) -> None:
        """Keep the whole tensors here, so that autograd need not keep them."""
        self._values = tuple(one.detach() for one in whole)
        for place, one in enumerate(self._values):
            if one.numel():
                self._held[one.untyped_storage()._cdata] = (self, place)

    def release(self) -> None:
        """Free the whole tensors."""
        for one in self._values or ():
            self._held.pop(one.untyped_storage()._cdata, None)
        self._values, self.prefetched = None, None

    def is_present(self) -> bool:
        """Whether the whole tensors are here."""
        return self._values is not None or self.prefetched is not None

    def is_missing(self) -> bool:
        """Whether the whole tensors have been freed, and can be gathered again."""
        return not self.is_present() and not self.is_outdated()

    def is_outdated(self) -> bool:
        """Whether a parameter was written or got other data since it was gathered first."""
        return [share_version(one) for one in self.parameters] != self._versions

    def values(self) -> tuple[torch.Tensor, ...]:
        """The whole tensors; they are gathered again if they have been freed.

        Raises: RuntimeError if they have, and a parameter was written since the forward.
        """
        if self._values is None:
            if self.is_outdated():
                raise RuntimeError(
                    "a weight that backward needs has been modified by an inplace operation, or given other data "
                    "(p.data = ...), since the forward; call backward before, as before optimizer.step()"
                )
            self._values, self.prefetched = self.prefetched, None
            if self._values is None:
                with torch.no_grad():
                    self._values = self.gathering.gather([one._block for one in self.parameters])
        return self._values


def prefetch_backward(needed: Sequence[Gathered]) -> list[Gathered]:
    """Gather again what a backward needs now, and with it what it will most likely need next, by one message.

    Args:
        needed: what one module has gathered.
    Returns: all that was gathered; nothing if that would be only one, which is left to :meth:`Gathered.values`.
    """

    def missing() -> Iterator[Gathered]:
        some = needed
        while some and all(one.is_missing() or one.is_present() for one in some):
            yield from (one for one in some if one.is_missing())
            some = some[0].previous

    if not any(one.is_missing() for one in needed):
        return []
    each = fit_one_message(missing())
    if len(each) < 2:
        return []
    for one, values in zip(each, gather_steps(each), strict=True):
        one.prefetched = values
    return each
