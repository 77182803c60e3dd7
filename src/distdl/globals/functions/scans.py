"""Functions along a dim of a global tensor that depend on the order of its elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distdl.globals.functions.reductions import dims_of, reduced_shape, split_along
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import moved_block
from distdl.globals.rules.meta_checks import judge_dtype
from distdl.globals.rules.whole_dims import along_whole
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.tensors.connection import always_curved, local


@handles("cumsum cumprod", "torch Tensor")
@by_name
def cumulate(func: Any, input: Any, dim: Any, *, dtype: Any = None) -> Any:
    """Each worker cumulates its block. What the blocks in front of it come to, along a split dim, comes to it."""
    name = func.__name__
    wanted = dtype or (input.dtype if input.is_floating_point() or input.is_complex() else torch.int64)
    x = input.to(wanted)
    dims, layout, block = dims_of(x, dim), x._layout, block_of(x)
    if not dims:
        return GlobalTensor._of(block.clone(), layout)
    judge_dtype(lambda one: func(one, 0, dtype=wanted), x)
    if wanted is torch.bool:
        func(torch.zeros(1, dtype=wanted), 0, dtype=wanted)  # (for torch's error)
    (along,) = dims
    y = getattr(torch, name)(block, along, dtype=wanted)  # (else torch adds up small integers as larger ones)
    y = y if name == "cumsum" else always_curved(y, block)
    if not split_along(layout, dims):
        return GlobalTensor._of(y, layout)
    total: Callable[..., torch.Tensor] = torch.sum if name == "cumsum" else _product
    reduce = partial(total, dim=along, keepdim=True, dtype=wanted)
    shape, least = reduced_shape(layout, dims), (1,) * x.dim()
    if layout.active and block.numel() == 0 and 0 not in shape:
        whole = reduce(block)  # (0 or 1)
    else:
        whole = local(reduce, shape, (block, least))
    owned, needed = layout.context.keep(("in front", layout, along), lambda: _in_front(layout, along))
    before = moved_block(whole, owned, needed, name)
    before = reduce(before) if layout.active else before.reshape(layout.local)
    return GlobalTensor._of(y + before if name == "cumsum" else y * before, layout)


def _product(x: torch.Tensor, dim: int, keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    return always_curved(torch.prod(x, dim, keepdim, dtype=dtype), x)


def _in_front(layout: KnownLayout, dim: int) -> tuple[KnownLayout, KnownLayout]:
    places = layout.partition.workers.shape[dim]
    owned, needed = list(layout.intervals), list(layout.intervals)
    owned[dim] = tuple((at, at + 1) for at in range(places))
    needed[dim] = tuple((0, at) for at in range(places))
    workers = layout.partition.workers
    return layout.context.layout(workers, owned), layout.context.layout(workers, needed)


@handles("cummax cummin logcumsumexp", "torch Tensor")
@by_name
def along_whole_dim(func: Any, input: Any, dim: Any) -> Any:
    """The dim is made whole; other dims are split further instead."""
    dims = dims_of(input, dim)
    if not dims:
        return NotImplemented
    return along_whole(lambda block: func(block, dims[0]), input, dims, func.__name__)
