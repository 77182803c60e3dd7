"""Parameters and buffers that a model writes global tensors into: running statistics, weights set by the first batch.

They are the same on every worker, and stay so: what is written comes to all workers, and each writes all of it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch

from distdl.globals.paths import distributed_models
from distdl.globals.replicas import map_tensors, plain_of
from distdl.globals.tensor import GlobalTensor, writes_of


def is_of_model(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is a parameter or a buffer of a distributed model, or shares memory with one."""
    models: WeakSet[torch.nn.Module] = distributed_models()
    if not models:
        return False
    plain = plain_of(tensor)
    storage = plain.untyped_storage()._cdata
    # (one reference is the tensor's, one is ours: it can be a buffer, but share memory with none)
    alone = type(tensor) is torch.Tensor and torch._C._storage_Use_Count(storage) <= 2 and not plain._is_view()
    for model in models:
        for child in model.modules():
            for one in child._buffers.values():
                if one is plain:
                    return True
            if not alone:
                for one in (*child._buffers.values(), *child._parameters.values()):
                    if one is not None and type(one) is not GlobalTensor and one.untyped_storage()._cdata == storage:
                        return True
    return False


def stand_in(target: torch.Tensor, made: GlobalTensor, beside: Any, name: str) -> GlobalTensor:
    """Let a global tensor stand for a parameter or a buffer: whatever is written into it reaches that on every worker.

    Args:
        made: the same cells as a global tensor, with memory of its own.
        beside: what will be written into it.
        name: of the function that writes.
    Raises: TypeError if what is written has a gradient, for the parameter or buffer does not carry it.
    """
    found: list[torch.Tensor] = []
    if torch.is_grad_enabled():
        map_tensors((target, beside), lambda one: found.append(one) if one.requires_grad else None)
    if found:
        raise TypeError(
            f"{name} would write what a global tensor says into a parameter or a buffer of the model, and the gradient "
            "of what is written would be lost; write under torch.no_grad(), or what has been detached"
        )
    made._ties = [_Standing(plain_of(target))]
    return made


def settled(value: Any) -> Any:
    """What a buffer of a model becomes that is set to a value: of a global tensor, the whole, on every worker.

    A value that has a gradient stays as it is.
    """
    if type(value) is not GlobalTensor or value.requires_grad:
        return value
    for tie in value.__dict__.get("_ties", ()):
        if isinstance(tie, _Standing):  # as after ``self.seen += x.sum(0)``
            return tie.target
    return value.full_tensor()


class _Standing:
    """The tie of a global tensor to the parameter or buffer that it stands for.

    Attributes:
        target: the parameter or buffer, or the part of it that is written.
    """

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target
        self._writes = writes_of(target)

    def holds(self) -> bool:
        return True

    def base_of(self, x: GlobalTensor) -> None:
        """Views of the one are no views of the other."""

    def written(self, x: GlobalTensor, name: str) -> None:
        """Write what a function has written."""
        with torch.no_grad():
            self.target.copy_(x.full_tensor())
        self._writes = writes_of(self.target)

    def check(self, x: GlobalTensor) -> None:
        """Check that the parameter or buffer has not been written by itself since.

        Raises: RuntimeError.
        """
        if writes_of(self.target) != self._writes:
            raise RuntimeError(
                "this tensor stands for a parameter or a buffer of the model, which has been written in place since; "
                "use that instead"
            )
