"""Which tensors of a step hold the same values in each call, because the step makes them of numbers alone.

A step may read these: ``torch.arange(2, x.dim()).tolist()`` is the same list in every replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distdl.programs.memory import storage_of

# operators that make a tensor of numbers; lift_fresh stands behind torch.tensor
_MAKERS = frozenset(["arange", "eye", "full", "lift_fresh", "linspace", "logspace", "ones", "scalar_tensor", "zeros"])
_UNSET = ("empty", "new_empty")


class Constants:
    """The memory of such tensors. It counts as a whole: a view of a constant is one."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all of these tensors are constants; False for none at all."""
        return bool(tensors) and all(storage_of(one) in self._storages for one in tensors)

    def note(self, func: Any, given: Sequence[torch.Tensor], results: Any) -> None:
        """Note what an operator of torch does to them.

        Args:
            given: the tensors that it has taken.
            results: what it has given.
        """
        name = func._schema.name.removeprefix("aten::")
        if name in _MAKERS or (self.hold(given) and not self._is_unknown(func, name)):
            every = results if isinstance(results, (tuple, list)) else (results,)
            found = {storage_of(one) for one in every if isinstance(one, torch.Tensor)}
            self._storages |= found - {0}
        elif func._schema.is_mutable:
            self.forget(given)

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that these tensors may hold something else from now on."""
        if self._storages:
            self._storages.difference_update(map(storage_of, tensors))

    @staticmethod
    def _is_unknown(func: Any, name: str) -> bool:
        """Whether an operator's result does not follow from what it takes."""
        return torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_UNSET)
