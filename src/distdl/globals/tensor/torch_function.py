"""What torch calls in the place of a function of global tensors, replicas or blocks: their ``__torch_function__``.

The three types are declared without it, each in a file of its own, so that none of them has to know the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from distdl.globals.layouts.context import Context, other_world, worlds
from distdl.globals.tensor.block import Block, as_block, mark, unblocked
from distdl.globals.tensor.entering import entered, without_gradients
from distdl.globals.tensor.failed import depends_on_values, meet_in
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.graph_state import settle_views
from distdl.globals.tensor.observers import AROUND_CALLS
from distdl.globals.tensor.provenance import has_entered
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.running import is_on_blocks, tells_blocks
from distdl.globals.tensor.stale import assigned, computed_from, current
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import OPERATOR, REPLICATED, TABLE, check_is_tensor, name_of, torch_calls, writes
from distdl.tensors.function import TransformError
from distdl.tensors.private_torch import OpOverload, OpOverloadPacket, are_functorch_transforms_active

DIFFERENTIATING = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""Functions in which a checkpoint computes its forward again, on every worker."""
TRANSFORMED = (
    "torch.vmap and the transforms of torch.func do not take a block, as x.to_local() gives it, inside of a "
    "distributed forward; call them in distdl.local_map, or with the global tensor"
)
_REFUSED = (
    "{} writes what follows from a parameter into a plain tensor that requires a gradient and has not entered the "
    "model; write into a clone of it, or use the result of a function out of place"
)
_BESIDE_BLOCKS: dict[type, str] = {GlobalTensor: "a global tensor", Replica: "a weight of the model"}
_OPERATORS = (OpOverload, OpOverloadPacket)
_COMPILED = (BuiltinFunctionType, MethodDescriptorType)
# NumPy's names of options, which torch's compiled functions take, too
_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
# functions whose argument ``input`` is not the first one
_INPUT_LATER = frozenset([torch.where, torch.searchsorted, torch.polygamma, torch.special.polygamma])


class _Handled(threading.local):
    """Which function of global tensors a worker is in.

    Attributes:
        func: the function; None outside of all.
    """

    func: Any = None


handled = _Handled()


@torch_calls(GlobalTensor)
def call_global(
    cls: type[GlobalTensor],
    func: Callable[..., Any],
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """What a function gives for a global tensor: what its handler in the table does, or else the fallback."""
    if are_functorch_transforms_active():  # a setup that is made and kept now would hold wrapped tensors
        raise TransformError
    if Block in types:
        check_unmixed(name_of(func), types)
        args, kwargs = map_tensors((args, kwargs or {}), unblocked)
    if Replica in types:
        args, kwargs = without_gradients(args, kwargs or {})
    if worlds.count > 1 and func not in DIFFERENTIATING and not _is_of_lists(func):
        check_one_world(name_of(func), (args, kwargs))
    handler = TABLE.get(func)
    if handler is None:
        handler = TABLE[None]
    if kwargs and "out" in kwargs:
        if kwargs["out"] is not None:
            handler = TABLE["out"]
        else:
            kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    if kwargs and ("axis" in kwargs or "keepdims" in kwargs) and isinstance(func, _COMPILED) and func in TABLE:
        kwargs = {_NUMPY.get(name, name): value for name, value in kwargs.items()}
    if kwargs and not args and "input" in kwargs and isinstance(func, _COMPILED) and func not in _INPUT_LATER:
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    around, handled.func = handled.func, func
    try:
        y = AROUND_CALLS[0](handler, func, args, kwargs or {}) if AROUND_CALLS else handler(func, args, kwargs or {})
        if not torch.is_grad_enabled():
            settle_views(y)
        return y
    except AttributeError as error:
        check_is_tensor(error.obj, func, args, kwargs or {})
        raise
    except RuntimeError as error:
        if depends_on_values(error):
            one: Any = next(one for one in tensors_in((args, kwargs)) if type(one) in (GlobalTensor, Replica))
            meet_in(error, f"a call of {name_of(func)}", one._context)
        raise
    finally:
        handled.func = around


@torch_calls(Replica)
def call_replicated(
    cls: type[Replica],
    func: Callable[..., Any],
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """What a function gives for replicas: replicas, if no block and no global tensor is among its arguments."""
    if Block in types:
        check_unmixed(name_of(func), types)
    if Block in types or GlobalTensor in types:
        return NotImplemented  # torch then asks the other type
    every = tensors_in((args, kwargs or {}))
    if any(current(value) is not value for value in every):
        args, kwargs = map_tensors((args, kwargs or {}), current)
        return func(*args, **kwargs)
    handler = REPLICATED.get(func)
    if handler is None and isinstance(func, _OPERATORS) and torch.is_grad_enabled() and not is_on_blocks():
        handler = REPLICATED[OPERATOR] if _is_users(func) else None
    if handler is not None:
        return handler(func, args, kwargs or {})
    for value in every:
        if type(value) is GlobalTensor:  # it stands deeper in a structure than torch looks
            return call_global(GlobalTensor, func, (*types, GlobalTensor), args, kwargs)
    found = [value for value in every if type(value) is Replica]
    return _call_plain(func, found, args, kwargs or {})


def _call_plain(
    func: Callable[..., Any], found: Sequence[Replica], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function with the plain tensors of replicas. Its results are replicas; in a function on blocks, plain.

    Outside of functions on blocks, a plain argument that requires a gradient enters first, because this worker has only
    a part of its gradient; and a plain tensor that the function writes becomes a replica, if it then requires one.

    Args:
        found: the replicas among the arguments.
    Raises: ValueError for replicas of several worlds; RuntimeError if it writes into a plain tensor that requires a
        gradient and has not entered.
    """
    alone, context = is_on_blocks(), found[0]._context
    for value in found if torch.is_grad_enabled() else ():
        if value._context is not context:  # its gradient would add up over other workers
            raise other_world(name_of(func), context, value._context)
    written_to = tensors_in(args[:1]) if not alone and writes(func, kwargs) else []
    plain_ones = [one for one in written_to if type(one) is torch.Tensor]
    targets = [one for one in plain_ones if not one.requires_grad or has_entered(one, context)]
    if torch.is_grad_enabled() and len(targets) < len(plain_ones):
        raise RuntimeError(_REFUSED.format(func.__name__))
    replicas: dict[int, Replica] = {}

    def plain(value: torch.Tensor) -> torch.Tensor:
        own = plain_of(value) if alone else entered(value, context, False)
        if type(value) is Replica:
            replicas[id(own)] = value
        return own

    given, named = map_tensors((args, kwargs), plain)
    result = func(*given, **named)
    if alone:
        written = replicas.get(id(result))
        # without grad mode, what was written (self.w += 1) is returned as the parameter itself, also on blocks
        return result if written is None or torch.is_grad_enabled() else assigned(written)
    for one in targets:
        if one.requires_grad:
            mark(one, Replica, _context=context)

    def wrap(value: Any) -> Any:
        if type(value) is Replica:  # the target that was marked
            return value
        written = replicas.get(id(value))
        return computed_from(found, value, context) if written is None else assigned(written)

    return map_tensors(result, wrap)


@torch_calls(Block)
def call_blocks(
    cls: type[Block],
    func: Callable[..., Any],
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """What a function gives for blocks: blocks, where these have a type of their own, and plain tensors elsewhere.

    Raises: RuntimeError beside a replica or a global tensor, and inside of transforms of torch.func.
    """
    kwargs = kwargs or {}
    if tells_blocks():
        check_unmixed(name_of(func), types)
        if are_functorch_transforms_active():
            raise RuntimeError(TRANSFORMED)
    blocks: dict[int, Block] = {}

    def plain(one: torch.Tensor) -> torch.Tensor:
        if type(one) is not Block:
            return one
        own = one._plain
        blocks[id(own)] = one
        return own

    given, named = map_tensors((args, kwargs), plain)
    y = func(*given, **named)
    if not tells_blocks():
        return y
    for target in tensors_in(args[:1]) if writes(func, kwargs) else ():
        if type(target) is torch.Tensor:
            mark(target, Block)

    def block(one: torch.Tensor) -> torch.Tensor:
        return blocks[id(one)] if id(one) in blocks else as_block(one)  # what was written in place is the same object

    return map_tensors(y, block)


def check_unmixed(name: str, types: Iterable[type]) -> None:
    """Check that a function is not given blocks beside global tensors or weights.

    Raises: RuntimeError if it is, where blocks have a type of their own.
    """
    found = set(types)
    beside = found & _BESIDE_BLOCKS.keys()
    if Block not in found or not beside or not tells_blocks():
        return
    others = " and ".join(sorted(_BESIDE_BLOCKS[one] for one in beside))
    raise RuntimeError(
        f"{name} got a block of this worker, as x.to_local() gives it, beside {others}; inside of a distributed "
        "forward, nobody could tell whose gradient the result has. Call it by distdl.local_map(function)(x, ...), "
        "which takes the global tensor x itself, and runs the function on blocks; or make the block global, by "
        "GlobalTensor.from_local(block, P)"
    )


def check_one_world(name: str, values: Any) -> None:
    """Check that all arguments of a function are of one world. In another world, worker 1 is another worker.

    Raises: ValueError if they are not.
    """
    given: list[Any] = [one for one in tensors_in(values) if type(one) in (GlobalTensor, Replica)]
    found: dict[Context, None] = dict.fromkeys(one._context for one in given)
    if len(found) > 1:
        raise other_world(name, *found)


def _is_of_lists(func: Any) -> bool:
    """Whether a function does the same to each tensor of a list, as those of optimisers do."""
    name = getattr(func, "__name__", "")
    return "_foreach_" in name or "_fused_" in name


def _is_users(operator: Any) -> bool:
    """Whether an operator is a user's and writes no argument. Torch lets only such ones have a backward."""
    if str(operator).startswith(("aten.", "prims.")):
        return False
    single = isinstance(operator, OpOverload)
    each = [operator] if single else [getattr(operator, name) for name in operator.overloads()]
    return not any(one._schema.is_mutable for one in each)
