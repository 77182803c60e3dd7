"""Modules of ``distdl.nn`` that are called with global tensors: they get blocks, and global tensors come out."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch

from distdl import nn
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.moving.alignment import part_of
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.running import on_blocks
from distdl.globals.tensor.table import METHODS
from distdl.globals.tensor.torch_function import check_unmixed
from distdl.partition import Partition
from distdl.partition.groups import IntArray
from distdl.partition.sharing import gather_values
from distdl.tensors.connection import zeros_on

# their results overlap, or are parts of sums
_OF_BLOCKS = (
    nn.Broadcast, nn.SumReduce, nn.AllSumReduce, nn.AllGather, nn.ReduceScatter, nn.HaloExchange, nn.Interpolate,
)  # fmt: skip
_OF_ROWS = (nn.DistributedLinear,)  # (which may have more dims than P_x has axes, in front of the features)
_OF_CLASSES = (nn.DistributedNLLLoss, nn.DistributedCrossEntropyLoss)


def call_module(module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module with this worker's blocks of global tensors, over its ``P_x``, and make its result global.

    Where a tensor lies in another way, it is redistributed. The result lies over ``P_y``, or ``P_x`` where there is
    none; a loss on the first worker of ``P_x``.

    Raises: TypeError for a module whose results are no blocks of a tensor; ValueError for one of another world.
    """
    kind = type(module).__name__
    check_unmixed(kind, map(type, (*args, *kwargs.values())))
    if isinstance(module, _OF_BLOCKS):
        raise TypeError(
            f"{kind} works on blocks, and its results do not tile a tensor: call it with x.to_local(), or use "
            f"distdl.local_map. A global tensor moves by x.redistribute(P)"
        )
    if not hasattr(module, "P_x"):  # (what it is made of takes them)
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
        None if not isinstance(one, torch.Tensor) else layout if one is first else _place(module, one, layout)
        for one in args
    ]
    blocks = [one if at is None else part_of(one, at, kind) for one, at in zip(args, places, strict=True)]
    with on_blocks():
        y = call(*blocks, **kwargs)
    return _global(context, module, tuple(places), y)


def _by_place(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments of a module, with those by place that were passed by name."""
    if not kwargs:
        return args, kwargs
    try:
        bound = signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(module).__name__}: {error}") from None
    return bound.args, bound.kwargs


def _with_dims(P: Partition, dims: int) -> IntArray:
    """The workers of a partition with an axis for each dim of rows: one more for each in front of the features."""
    *batch, features = P.workers.shape
    return P.workers.reshape(*batch, *[1] * (dims - len(batch) - 1), features)


def _place(module: torch.nn.Module, one: torch.Tensor, first: KnownLayout) -> KnownLayout:
    """Where a module takes an argument, given where it takes the first. Targets of classes are not split by class."""
    if not isinstance(module, _OF_CLASSES) or len(first.rulers) < 2:
        return first
    context, workers = first.context, first.partition.workers
    batch, _, *space = first.intervals
    if one.dim() == len(first.rulers) - 1:
        return context.layout(workers[:, 0], [batch, *space])
    return context.layout(workers[:, :1], [batch, ((0, first.extents[1]),), *space])


def _global(context: Context, module: torch.nn.Module, places: tuple[Any, ...], y: Any) -> Any:
    """The result. Where its blocks lie, the workers tell each other once for each way in which the arguments lay."""
    if isinstance(y, tuple):  # (values and their indices)
        return tuple(_global(context, module, (*places, number), one) for number, one in enumerate(y))
    kept: WeakKeyDictionary[torch.nn.Module, dict[Any, Any]] = context.keep_told(("modules",), WeakKeyDictionary)
    known = kept.setdefault(module, {})
    if places not in known:
        told = gather_values(context.comm, context.everyone, type(module).__name__, tuple(y.shape))
        known[places] = _result(context, module, told)
    layout = known[places]
    if context.me not in layout.partition and y.shape != layout.local:  # (what comes out as it went in stays the same)
        y = zeros_on(y, layout.local)
    return GlobalTensor._of(y, layout)


def _result(context: Context, module: Any, shapes: list[Any]) -> KnownLayout:
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
