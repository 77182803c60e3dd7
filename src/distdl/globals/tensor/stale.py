"""Whether a replica is still what its parameter is, and what is read in its place where it is not.

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
    """Tells whether a copy, or a view of it, is no longer what it is a copy of."""

    def is_over(self, copy: torch.Tensor) -> bool: ...

    def now(self) -> torch.Tensor:
        """What is read in its place now: the parameter, or in a forward another copy."""


def current(value: torch.Tensor) -> torch.Tensor:
    """A copy as it is; or what the parameter is by now, where the copy is no longer that, as it always is in torch.

    The parameter has been frozen since the copy was read, or given other data. Or the copy is of a share, which has
    been written since, or was read without gradients and is used where there are some.

    Raises: RuntimeError for a view of the copy of a share that has been written.
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
    """Whether a copy lies where its parameter does, which has not been frozen."""
    is_frozen = torch.is_grad_enabled() and not parameter.requires_grad
    return not is_frozen and address_of(plain) == address_of(parameter)


def address_of(x: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in memory, and how that is read."""
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def computed_from(copies: Sequence[Replica], plain: torch.Tensor, context: Context) -> Replica:
    """The copy that a plain tensor is which was computed from copies. In the memory of one, it is as old as that."""
    made = Replica._of(plain, context)
    for one in copies:
        if one._since is not None and _storage(one) == _storage(plain):
            made._since = one._since
            break
    return made


def _storage(x: torch.Tensor) -> int:
    storage: int = plain_of(x).untyped_storage()._cdata
    return storage


def assigned(value: torch.Tensor) -> torch.Tensor:
    """What a function gives that has written in place: without gradients, ``self.w += 1`` assigns the parameter."""
    return value if torch.is_grad_enabled() else parameter_of(value)
