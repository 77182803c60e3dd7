"""Tensors that every worker has whole, and how they meet the blocks of global tensors.

A plain tensor beside a global one is one variable, equal on all workers: a parameter, a table. Each worker computes
with its own copy, which has entered (see ``tensor.entering``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, overload

import torch
from torch.autograd.function import BackwardCFunction

from distdl.globals.layouts.context import Context
from distdl.globals.tensor.block import Block, raw_of, unblocked
from distdl.globals.tensor.global_tensor import complex_part
from distdl.globals.tensor.gradient_sums import enter
from distdl.globals.tensor.observers import COMPARING, note_plain
from distdl.globals.tensor.provenance import OLD_REFERENCE, has_entered
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import METHODS


class Since(Protocol):
    """Tells whether a copy, or a view of it, is no longer what it is a copy of."""

    def is_over(self, copy: torch.Tensor) -> bool: ...

    def now(self) -> torch.Tensor:
        """What is read in its place now: the parameter, or in a forward another copy."""


class Replica(torch.Tensor):
    """A worker's own copy of a tensor that every worker has whole: one that has entered.

    What is computed from copies is a copy, too. Beside a global tensor, a block is taken from it. Its gradient is this
    worker's part.
    """

    # the same memory and graph as a plain tensor
    _plain: torch.Tensor
    # what the workers share over which the parts of its gradient add up
    _context: Context
    # the parameter that has entered as this replica; None of what is computed from replicas
    _variable: Any = None
    # of a replica of a sharded weight, and of its views: tells whether the weight has been written since
    _since: Since | None = None
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
        """The copy of a parameter: an ``nn.Parameter``, too, for who asks in a forward."""
        made = Replica._of(plain, context)
        made._variable = parameter
        made._is_param = isinstance(parameter, torch.nn.Parameter)
        return made

    def __getattr__(self, name: str) -> Any:
        """``_plain`` of a tensor that :func:`mark` has made a replica: made at each call, to keep no base alive."""
        if name != "_plain":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return raw_of(self)

    # (what is asked for most often, without the way through torch, whose stubs let it be written)

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
_OUTDATED = (
    "this is a view, or the data, of a weight that is stored in shares, which has been written since: the view has the "
    'values of before. Take it anew, keep a clone(), or distribute with weights="replicated"'
)


def copy_of(replica: Replica) -> torch.Tensor:
    """The plain tensor that a replica is.

    Raises: RuntimeError if an autograd function has given it whose backward gets this worker's part of the gradient.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if _is_tied(replica):
            raise RuntimeError(OLD_REFERENCE.format(type(replica.grad_fn).__name__.removesuffix("Backward")))
    return replica._plain


def tied_of(value: Any) -> Any:
    """The plain tensor that an autograd function has given: a replica or a block itself, to which the node is tied."""
    return raw_of(value) if type(value) in (Replica, Block) else value


def _is_tied(replica: Replica) -> bool:
    """Whether a replica has a node of Python's that its plain tensor does not follow from."""
    try:
        node = replica.grad_fn
    except RuntimeError:  # (an alias made without gradients, of what has been written since)
        return False
    plain = replica.__dict__.get("_plain")
    if plain is None or not isinstance(node, BackwardCFunction):
        return False
    return plain.grad_fn is None or node not in [before for before, _ in plain.grad_fn.next_functions[:1]]


def entered(tensor: torch.Tensor, context: Context, strict: bool = True) -> torch.Tensor:
    """This worker's own copy of a plain tensor: itself, with a gradient that adds up over all workers.

    Args:
        strict: whether it stands beside a global tensor, so that it is compared.
    Raises: RuntimeError for what follows from a weight, and does not say so.
    """
    if type(tensor) is Replica:
        return copy_of(tensor)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    if has_entered(tensor, context):
        return tensor
    if not strict:
        return enter(context, [tensor])[0]
    if type(tensor) is torch.nn.Parameter:
        note_plain(context, tensor)
    return enter(context, [tensor], COMPARING[0](context) if COMPARING else None)[0]


@overload
def plain_of(value: torch.Tensor) -> torch.Tensor: ...
@overload
def plain_of(value: Any) -> Any: ...
def plain_of(value: Any) -> Any:
    """The plain tensor that a replica or a block is; others as they are."""
    return copy_of(value) if type(value) is Replica else unblocked(value)


def without_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a function of a global tensor gets: replicas that have no gradient (indices, statistics) as plain tensors.

    The first one stays what it is: it may be what is written. (And what is no longer current is made so.)
    """
    copies = [one for one in tensors_in((args, kwargs)) if type(one) is Replica]
    if any(current(one) is not one for one in copies):
        args, kwargs = map_tensors((args, kwargs), current)
    elif all(one._plain.requires_grad for one in copies):
        return args, kwargs  # (most have one)

    def plain(value: torch.Tensor) -> torch.Tensor:
        return plain_of(value) if type(value) is Replica and not value._plain.requires_grad else value

    rest, named = map_tensors((args[1:], kwargs), plain)
    return (*args[:1], *rest), named


def view_of(copies: Sequence[Replica], plain: torch.Tensor, context: Context) -> Replica:
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


def current(value: torch.Tensor) -> torch.Tensor:
    """A copy as it is; or what the parameter is by now, where the copy is no longer that, as it always is in torch.

    The parameter has been frozen since the copy was read, or given other data. Or the copy is of a share, which has
    been written since, or was read without gradients and is used where there are some.

    Raises: RuntimeError for a view of the copy of a share that has been written.
    """
    if type(value) is not Replica:
        return value
    since, parameter = value._since, parameter_of(value)
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
    return not is_frozen and memory_of(plain) == memory_of(parameter)


def memory_of(x: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in memory, and how that is read."""
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def parameter_of(value: torch.Tensor) -> torch.Tensor:
    """The parameter of which a tensor is this worker's copy; others as they are."""
    return value if type(value) is not Replica or value._variable is None else value._variable


def assigned(value: torch.Tensor) -> torch.Tensor:
    """What a function gives that has written in place: without gradients, ``self.w += 1`` assigns the parameter."""
    return value if torch.is_grad_enabled() else parameter_of(value)


def context_of(value: torch.Tensor) -> Context | None:
    """The context that a copy has entered; None of others."""
    return value._context if type(value) is Replica else None
