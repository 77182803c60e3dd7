"""What a module of ``distdl.nn`` does when a block or a replica is its first argument that is not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distdl.globals.tensor.block import as_blocks, unblocked
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import plain_of
from distdl.globals.tensor.running import is_on_blocks, on_blocks, tells_blocks
from distdl.globals.tensor.table import METHODS
from distdl.globals.tensor.torch_function import check_unmixed
from distdl.nn import module as nn_module

_NO_MODULE = (
    "{} got a weight of a distributed model, or what is computed from weights, of which each worker has a copy; nobody "
    "could tell whose gradient the result has. Call it in distdl.local_map, or make the weight global first, by "
    "distdl.distribute_tensor(w, P)"
)


def call_with_blocks(module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module gives for blocks: blocks.

    Raises: RuntimeError beside a replica or a global tensor.
    """
    check_unmixed(type(module).__name__, map(type, (*args, *kwargs.values())))
    return in_forward(call, tuple(map(unblocked, args)), {name: unblocked(one) for name, one in kwargs.items()})


def call_with_replicas(module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module gives for replicas; a module without a partition passes them on to the modules in it.

    Raises: RuntimeError, but in a function on blocks, or beside a global tensor.
    """
    every = (*args, *kwargs.values())
    check_unmixed(type(module).__name__, map(type, every))
    if any(type(one) is GlobalTensor for one in every):
        return GlobalTensor._call_module(module, call, args, kwargs)
    if not hasattr(module, "P_x"):
        return call(*args, **kwargs)
    if not is_on_blocks():
        raise RuntimeError(_NO_MODULE.format(type(module).__name__))
    return call(*map(plain_of, args), **{name: plain_of(one) for name, one in kwargs.items()})


def in_forward(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module gives for plain tensors: inside of a distributed forward, blocks."""
    if not tells_blocks():
        return call(*args, **kwargs)
    with on_blocks():
        y = call(*args, **kwargs)
    return as_blocks(y)


METHODS.update(call_module_with_blocks=call_with_blocks, call_module_with_replicas=call_with_replicas)
nn_module.call_in_forward = in_forward
