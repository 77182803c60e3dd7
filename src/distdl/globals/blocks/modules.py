"""Call modules of ``distdl.nn`` with global tensors: they compute on blocks, and the results become global."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch

from distdl import nn
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.moving.alignment import local_block
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.running import on_blocks
from distdl.globals.tensor.table import METHODS
from distdl.globals.tensor.torch_function import check_unmixed
from distdl.partition import Partition
from distdl.partition.groups import IntArray
from distdl.partition.sharing import gather_values
from distdl.tensors.connection import zeros_on

# modules whose results overlap, or are partial sums
_OF_BLOCKS = (
    nn.Broadcast, nn.SumReduce, nn.AllSumReduce, nn.AllGather, nn.ReduceScatter, nn.HaloExchange, nn.Interpolate,
)  # fmt: skip
# modules whose tensors may have more dims than P_x has axes, in front of the features
_OF_ROWS = (nn.DistributedLinear,)
_OF_CLASSES = (nn.DistributedNLLLoss, nn.DistributedCrossEntropyLoss)


def call_module(module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module with this worker's blocks of global tensors, over its ``P_x``, and make its result global.

    Tensors in another layout are redistributed. The result lies over ``P_y``, or ``P_x`` if the module has no ``P_y``;
    a loss on the first worker of ``P_x``.

    Raises: TypeError if the results do not tile a tensor; ValueError for another world, or dims that do not fit P_x.
    """
    kind = type(module).__name__
    check_unmixed(kind, map(type, (*args, *kwargs.values())))
    if isinstance(module, _OF_BLOCKS):
        raise TypeError(
            f"{kind} works on blocks, and its results do not tile a tensor: call it with x.to_local(), or use "
            f"distdl.local_map. A global tensor moves by x.redistribute(P)"
        )
    if not hasattr(module, "P_x"):  # its submodules take the global tensors
        return call(*args, **kwargs)
    args, kwargs = _by_place(module, args, kwargs)
    P_x: Partition = module.P_x
    first = next(one for one in args if type(one) is GlobalTensor)
    context = first._context
    if Context.of(P_x.comm) is not context:
        raise ValueError(f"{kind} needs tensors of the world of its partitions; got one of another")
    axes, rows = P_x.workers.ndim, isinstance(module, _OF_ROWS)
    if first.dim() < axes or (first.dim() > axes and not rows):
        wanted = "at least as many dims as P_x has axes" if rows else "a dim for each axis of P_x"
        raise ValueError(f"{kind} needs a tensor with {wanted} ({P_x}); got {tuple(first.shape)}")
    workers, layout = _with_dims(P_x, first.dim()), first._layout
    if layout.partition.workers.tolist() != workers.tolist():
        layout = context.balanced(workers, first.shape)
    places = [
        None if not isinstance(one, torch.Tensor) else layout if one is first else _layout_for(module, one, layout)
        for one in args
    ]
    blocks = [one if at is None else local_block(one, at, kind) for one, at in zip(args, places, strict=True)]
    with on_blocks():
        y = call(*blocks, **kwargs)
    return _global_result(context, module, tuple(places), y)


def _by_place(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a module's forward, by place as far as that is possible."""
    if not kwargs:
        return args, kwargs
    try:
        bound = signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(module).__name__}: {error}") from None
    return bound.args, bound.kwargs


def _with_dims(P: Partition, dims: int) -> IntArray:
    """Return the workers of a partition with one axis for each of ``dims``: new axes stand in front of the last one."""
    *batch, features = P.workers.shape
    return P.workers.reshape(*batch, *[1] * (dims - len(batch) - 1), features)


def _layout_for(module: torch.nn.Module, one: torch.Tensor, first: KnownLayout) -> KnownLayout:
    """Return the layout of an argument: that of the first one, but targets of a loss of classes not split by class."""
    if not isinstance(module, _OF_CLASSES) or len(first.rulers) < 2:
        return first
    context, workers = first.context, first.partition.workers
    batch, _, *space = first.intervals
    if one.dim() == len(first.rulers) - 1:
        return context.layout(workers[:, 0], [batch, *space])
    return context.layout(workers[:, :1], [batch, ((0, first.extents[1]),), *space])


def _global_result(context: Context, module: torch.nn.Module, places: tuple[Any, ...], y: Any) -> Any:
    """Return the global result of a block. Workers tell each other the shapes once for given layouts of arguments."""
    if isinstance(y, tuple):
        return tuple(_global_result(context, module, (*places, number), one) for number, one in enumerate(y))
    kept: WeakKeyDictionary[torch.nn.Module, dict[Any, Any]] = context.keep_told(("modules",), WeakKeyDictionary)
    known = kept.setdefault(module, {})
    if places not in known:
        told = gather_values(context.comm, context.everyone, type(module).__name__, tuple(y.shape))
        known[places] = _result_layout(context, module, told)
    layout = known[places]
    if context.me not in layout.partition and y.shape != layout.local:
        y = zeros_on(y, layout.local)
    return GlobalTensor._of(y, layout)


def _result_layout(context: Context, module: Any, shapes: list[Any]) -> KnownLayout:
    """Return the layout of a module's result, of which each worker has a block of the given shape."""
    P: Partition = getattr(module, "P_y", None) or module.P_x
    worker = int(P.workers.flat[0])
    rank = len(shapes[worker])
    if not rank:
        return context.whole((), worker)
    if rank == P.workers.ndim - 1 and isinstance(module, _OF_CLASSES):
        workers = P.workers[:, 0]
    else:
        workers = _with_dims(P, rank) if isinstance(module, _OF_ROWS) else P.workers
    return context.tiled(workers, shapes, "the result")


METHODS["call_module"] = call_module
