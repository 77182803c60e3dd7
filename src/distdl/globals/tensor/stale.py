"""Whether a replica still has the values of its parameter, and what is read in its place where it has not.

In torch, a parameter is one tensor. A replica of it is made once in a forward, and may be kept: the parameter may have
been frozen since, given other data, or, if it is sharded, written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from distdl.globals.layouts.context import Context
from distdl.globals.tensor.replicas import Replica, parameter_of, plain_of

_OUTDATED = (
    "this is a view, or the data, of a weight that is stored in shares, which has been written since: the view has the "
    'values of before. Take it anew, keep a clone(), or distribute with weights="replicated"'
)


class Since(Protocol):
    """What a replica of a sharded weight, or a view of it, knows of that weight since the replica was made."""

    def is_over(self, copy: torch.Tensor) -> bool:
        """Whether the replica, or the view of it, is stale."""

    def now(self) -> torch.Tensor:
        """What is read in its place now: the parameter, or in a forward another replica."""


def current(value: torch.Tensor) -> torch.Tensor:
    """Return the replica, or read the parameter again if it is stale. Other tensors are returned as they are.

    A replica is stale if its parameter was frozen since it was read, or given other data. That of a sharded weight is,
    too, if the weight was written since, or if it was read without grad mode and is used where gradients are recorded.

    Raises: RuntimeError for a view of a stale replica of a sharded weight.
    """
    if type(value) is not Replica:
        return value
    since: Since | None = value._since
    parameter = parameter_of(value)
    if since is None:
        return value if parameter is value or _is_still(value._plain, parameter) else parameter
    if not since.is_over(value):
        return value
    if parameter is value:
        raise RuntimeError(_OUTDATED)
    return since.now()


def _is_still(plain: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a replica still lies where its parameter does, and the parameter has not been frozen."""
    is_frozen = torch.is_grad_enabled() and not parameter.requires_grad
    return not is_frozen and address_of(plain) == address_of(parameter)


def address_of(x: torch.Tensor) -> tuple[Any, ...]:
    """Where in memory a tensor lies, and with which dtype, shape and strides that is read."""
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def computed_from(replicas: Sequence[Replica], plain: torch.Tensor, context: Context) -> Replica:
    """Make a replica of a plain tensor that was computed from replicas. A view of one of them goes stale with it."""
    made = Replica._of(plain, context)
    for one in replicas:
        if one._since is not None and storage_of(one) == storage_of(plain):
            made._since = one._since
            break
    return made


def storage_of(x: torch.Tensor) -> int:
    storage: int = plain_of(x).untyped_storage()._cdata
    return storage


def assigned(value: torch.Tensor) -> torch.Tensor:
    """The result of a function that has written into a tensor: the tensor, or without grad mode its parameter.

    So ``self.w += 1`` assigns the parameter itself.
    """
    return value if torch.is_grad_enabled() else parameter_of(value)
