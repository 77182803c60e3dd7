"""Parameters and buffers that a model writes global tensors into: running statistics, weights set by the first batch.

They are the same on every worker, and stay so: what is written comes to all workers, and each writes all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from distdl.globals.layouts.context import Context
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.views.aliasing import note_settled
from distdl.nn.placement import distributed_models
from distdl.tensors.memory import parts_of


def is_of_model(tensor: torch.Tensor, context: Context) -> bool:
    """Whether a plain tensor is a parameter, or a buffer of a distributed model, or shares memory with one of its."""
    if type(tensor) is torch.nn.Parameter:  # (an optimiser may have some of no model beside those in shares)
        return True
    plain = plain_of(tensor)
    storage = plain.untyped_storage()._cdata
    # (one reference is the tensor's, one is ours: it can be a buffer, but share memory with none)
    alone = type(tensor) is torch.Tensor and torch._C._storage_Use_Count(storage) <= 2 and not plain._is_view()
    return any(
        one is plain or (not alone and any(part.untyped_storage()._cdata == storage for part in parts_of(one)))
        for one in _held(context)
    )


def is_named(tensor: torch.Tensor, context: Context) -> bool:
    """Whether a tensor itself is a parameter or a buffer of a distributed model."""
    return any(one is tensor for one in _held(context))


def _held(context: Context) -> Iterator[torch.Tensor]:
    """The parameters and buffers of distributed models, but for those in shares."""
    for model in list(distributed_models(context.comm)):
        for child in model.modules():
            for one in (*child._buffers.values(), *child._parameters.values()):
                if one is not None and type(one) is not GlobalTensor:
                    yield one


def check_gradient(values: Any, name: str) -> None:
    """Check that what is written into a parameter or a buffer, and that itself, have no gradient that would be lost.

    Args:
        name: of the function that writes.
    Raises: RuntimeError.
    """
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in(values)):
        raise RuntimeError(
            f"{name} would write what a global tensor says into a parameter or a buffer of the model, and the gradient "
            "of what is written would be lost; write under torch.no_grad(), or what has been detached"
        )


def settled(value: Any) -> Any:
    """What a buffer of a model becomes that is set to a value: of a global tensor, the whole, on every worker.

    It is an error to write the tensor after that, and to use it once the buffer has been written. A value that has a
    gradient stays as it is. What was computed from parameters is equal on all workers as it is, and plain.
    """
    if type(value) is Replica and not value.requires_grad:
        return plain_of(value)
    if type(value) is not GlobalTensor or value.requires_grad:
        return value
    whole = value.full_tensor()
    with torch.inference_mode(False):  # torch counts no writes of a tensor that is made in inference mode
        whole = whole.clone() if whole.is_inference() else whole
    note_settled(value, whole)
    return whole
