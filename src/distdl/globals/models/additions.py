"""Additions: tensors and modules that were set in a distributed model, and that may differ between workers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distdl.globals.consistency.equality import whole_of
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.views.aliasing import count_of_writes
from distdl.tensors.derivatives import is_recomputed


class Additions:
    """What was set in a distributed model outside of its forward.

    Workers may have drawn other weights for it, so these are made equal before the next forward. Before the first
    forward, so are weights that were written since the model was distributed, as ``model.apply(init)`` does.

    Attributes:
        pending: whether anything may differ between workers.
    """

    def __init__(self) -> None:
        self.pending = False
        self._equal = WeakIdKeyDictionary()  # modules, parameters and buffers that are equal on all workers
        self._first_writes = WeakIdKeyDictionary()  # until the first forward: writes of each tensor when distributed

    def note_distributed(self, module: torch.nn.Module) -> None:
        """Take note that a model has just been distributed: all of it is equal now."""
        self.note_equal(module)
        for _, one in whole_of(module):
            self._first_writes[one] = count_of_writes(one)
        self.pending = True

    def note_set(self, value: Any, in_forward: bool) -> None:
        """Take note of a module or tensor that was set in the model, unless the forward itself has set it."""
        if value is None or type(value) is GlobalTensor or value in self._equal or in_forward or is_recomputed():
            return
        self.pending = True

    def unverified(self, module: torch.nn.Module) -> set[int]:
        """The ids of the parameters and buffers of a model that may differ: all of new modules, and what was set."""
        new = [child for child in module.modules() if child not in self._equal]
        ids = {id(one) for child in new for one in (*child.parameters(), *child.buffers())}
        ids |= {id(one) for one, writes in self._first_writes.items() if count_of_writes(one) != writes}
        return {id(one) for _, one in whole_of(module) if id(one) in ids or one not in self._equal}

    def note_equal(self, module: torch.nn.Module) -> None:
        """Take note that a module, and all in it, is equal on all workers."""
        for one in (*module.modules(), *module.parameters(), *module.buffers()):
            self._equal[one] = True

    def close(self, module: torch.nn.Module) -> None:
        """Take note that the whole model is equal, and that its first forward begins."""
        self.note_equal(module)
        self.pending = False
        self._first_writes = WeakIdKeyDictionary()
