"""Replica: a worker's own copy of a tensor that every worker has whole.

A plain tensor beside a global one is one variable, equal on all workers: a parameter, a table. Each worker computes
with its own copy, which has entered (see :mod:`distdl.globals.tensor.entering`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.autograd.function import BackwardCFunction

from distdl.globals.layouts.context import Context
from distdl.globals.tensor.block import Block, raw_of, unblocked
from distdl.globals.tensor.global_tensor import complex_part
from distdl.globals.tensor.provenance import OLD_REFERENCE
from distdl.globals.tensor.table import METHODS
from distdl.tensors.private_torch import DisableTorchFunctionSubclass


class Replica(torch.Tensor):
    """A worker's own copy of a tensor that every worker has whole.

    What is computed from replicas is a replica, too. Beside a global tensor, a block is taken from it. Its gradient is
    this worker's part of the gradient.
    """

    # the same memory and graph as a plain tensor
    _plain: torch.Tensor
    # what the workers share over which the parts of its gradient add up
    _context: Context
    # the parameter that has entered as this replica; None of what is computed from replicas
    _variable: Any = None
    # of a replica of a sharded weight and its views: a stale.Since, which tells whether the weight was written since
    _since: Any = None
    # the autograd node of the user's function that has given it; none of other replicas
    _node: Any
    # whether it is a replica of a parameter: torch asks a tensor of a subclass for this name
    _is_param: bool = False

    @staticmethod
    def _of(plain: torch.Tensor, context: Context) -> Replica:
        made = plain.as_subclass(Replica)
        made._plain = plain
        made._context = context
        return made

    @staticmethod
    def _of_parameter(plain: torch.Tensor, parameter: torch.Tensor, context: Context) -> Replica:
        """The replica of a parameter. ``isinstance(replica, nn.Parameter)`` holds if it does of the parameter."""
        made = Replica._of(plain, context)
        made._variable = parameter
        made._is_param = isinstance(parameter, torch.nn.Parameter)
        return made

    def __getattr__(self, name: str) -> Any:
        """``_plain`` of a tensor that :func:`mark` has made a replica: made at each call, to keep no base alive."""
        if name != "_plain":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return raw_of(self)

    # attributes that are read most often, without the way through torch; its stubs let them be written

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._plain.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._plain.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._plain.device

    @property
    def requires_grad(self) -> bool:
        variable = self._variable  # the replica of a sharded weight requires none itself where it was read without
        return (self._plain if variable is None else variable).requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    real, imag = complex_part("real"), complex_part("imag")

    def dim(self) -> int:
        return self._plain.dim()

    @staticmethod
    def _call_module(module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module of ``distdl.nn`` gives for arguments of which the first that is not plain is a replica."""
        return METHODS["call_module_with_replicas"](module, call, args, kwargs)


Replica.__module__ = "torch"
WRITTEN = (
    "{} into a weight that is stored in shares, which a forward may only read. Run the first batch, or what else sets "
    'weights, before distdl.distribute, write between two steps, or distribute with weights="replicated"'
)


def copy_of(replica: Replica) -> torch.Tensor:
    """The plain tensor of a replica.

    Raises: RuntimeError if an autograd function gave the replica that was applied by an old reference: its backward
        would get this worker's part of the gradient.
    """
    with DisableTorchFunctionSubclass():
        if _is_tied(replica):
            raise RuntimeError(OLD_REFERENCE.format(type(replica.grad_fn).__name__.removesuffix("Backward")))
    return replica._plain


def tied_of(value: Any) -> Any:
    """The plain tensor of what an autograd function has given, with the function's node in its graph.

    For a replica or a block it is made of the tensor itself, as its own plain tensor lacks the node.
    """
    return raw_of(value) if type(value) in (Replica, Block) else value


def _is_tied(replica: Replica) -> bool:
    """Whether a replica was given by a user's autograd function, whose node its plain tensor lacks."""
    try:
        node = replica.grad_fn
    except RuntimeError:  # a view that was made without grad mode, of a tensor that was written since
        return False
    plain = replica.__dict__.get("_plain")
    if plain is None or not isinstance(node, BackwardCFunction):
        return False
    return plain.grad_fn is None or node not in [before for before, _ in plain.grad_fn.next_functions[:1]]


@overload
def plain_of(value: torch.Tensor) -> torch.Tensor: ...
@overload
def plain_of(value: Any) -> Any: ...
def plain_of(value: Any) -> Any:
    """The plain tensor of a replica or a block. Other values are returned as they are."""
    return copy_of(value) if type(value) is Replica else unblocked(value)


def parameter_of(value: torch.Tensor) -> torch.Tensor:
    """The parameter whose replica a tensor is. Other tensors are returned as they are."""
    return value if type(value) is not Replica or value._variable is None else value._variable


def context_of(value: torch.Tensor) -> Context | None:
    """The context of a replica's world; None of other tensors."""
    return value._context if type(value) is Replica else None
