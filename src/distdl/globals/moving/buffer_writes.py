"""Parameters and buffers into which a model writes global tensors: running statistics, weights set by the first batch.

They are the same on every worker, and stay so: the global tensor is gathered, and each worker writes all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from distdl.globals.layouts.context import Context
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.views.aliasing import note_stored
from distdl.nn.placement import distributed_models
from distdl.tensors.memory import parts_of
from distdl.tensors.private_torch import storage_use_count


def is_of_model(tensor: torch.Tensor, context: Context) -> bool:
    """Whether a plain tensor is any parameter, or a buffer of a distributed model, or shares memory with either."""
    if type(tensor) is torch.nn.Parameter:  # also of no model, as an optimiser may have beside sharded weights
        return True
    plain = plain_of(tensor)
    storage = plain.untyped_storage()._cdata
    # two references to the storage are the tensor's and ours, so no other tensor shares it
    alone = type(tensor) is torch.Tensor and storage_use_count(storage) <= 2 and not plain._is_view()
    return any(
        one is plain or (not alone and any(part.untyped_storage()._cdata == storage for part in parts_of(one)))
        for one in _held(context)
    )


def is_itself_of_model(tensor: torch.Tensor, context: Context) -> bool:
    """Whether a tensor itself is a parameter or a buffer of a distributed model."""
    return any(one is tensor for one in _held(context))


def _held(context: Context) -> Iterator[torch.Tensor]:
    """Return the parameters and buffers of distributed models, without sharded weights."""
    for model in list(distributed_models(context.comm)):
        for child in model.modules():
            for one in (*child._buffers.values(), *child._parameters.values()):
                if one is not None and type(one) is not GlobalTensor:
                    yield one


def check_gradient(values: Any, name: str) -> None:
    """Raise RuntimeError if a write of values into a parameter or a buffer, given with them, would lose a gradient."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in(values)):
        raise RuntimeError(
            f"{name} would write values of a global tensor into a parameter or a buffer of the model, and their "
            "gradient would be lost; write under torch.no_grad(), or write a detached tensor"
        )


def value_to_store(value: Any) -> Any:
    """Return what to store where a buffer of a model is set to a value.

    A global tensor is gathered on every worker; from then on it is an error to write it, and to use it once the buffer
    was written. A replica becomes a plain tensor. Any value that requires a gradient is returned as it is, and so are
    all others.
    """
    if type(value) is Replica and not value.requires_grad:
        return plain_of(value)
    if type(value) is not GlobalTensor or value.requires_grad:
        return value
    whole = value.full_tensor()
    with torch.inference_mode(False):  # torch counts no writes of a tensor that is made in inference mode
        whole = whole.clone() if whole.is_inference() else whole
    note_stored(value, whole)
    return whole
