"""What was set in a distributed model since its last forward: nobody knows yet whether it is equal on the workers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distdl.globals.consistency.equality import whole_of
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.views.aliasing import writes_of
from distdl.tensors.derivatives import is_recomputed


class Additions:
    """Whether tensors and modules were set in a distributed model outside of its forward.

    Workers may have drawn other weights for them, so they are made equal before the next forward. Before the first one,
    so are weights that have been written since the model was distributed, as ``model.apply(init)`` does.

    Attributes:
        open: whether there may be any.
    """

    def __init__(self) -> None:
        self.open = False
        self._equal = WeakIdKeyDictionary()  # what is equal on the workers: modules, parameters and buffers
        self._begun = WeakIdKeyDictionary()  # how often each tensor had been written then, until the first forward

    def begin(self, module: torch.nn.Module) -> None:
        """Take note that a model has been distributed."""
        self.settle(module)
        for _, one in whole_of(module):
            self._begun[one] = writes_of(one)
        self.open = True

    def note(self, value: Any, running: int) -> None:
        """Take note of a value that was set, unless the forward itself has set it."""
        if value is None or type(value) is GlobalTensor or value in self._equal or running or is_recomputed():
            return
        self.open = True

    def unknown(self, module: torch.nn.Module) -> set[int]:
        """The ids of the parameters and buffers of which nobody knows whether they are equal: all of new modules."""
        new = [child for child in module.modules() if child not in self._equal]
        inside = {id(one) for child in new for one in (*child.parameters(), *child.buffers())}
        inside |= {id(one) for one, writes in self._begun.items() if writes_of(one) != writes}
        return {id(one) for _, one in whole_of(module) if id(one) in inside or one not in self._equal}

    def settle(self, module: torch.nn.Module) -> None:
        """Take note that all of a module is equal on the workers."""
        for one in (*module.modules(), *module.parameters(), *module.buffers()):
            self._equal[one] = True

    def close(self, module: torch.nn.Module) -> None:
        """Take note that all of the model is."""
        self.settle(module)
        self.open = False
        self._begun = WeakIdKeyDictionary()
