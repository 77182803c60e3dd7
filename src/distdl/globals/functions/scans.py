"""Scans: cumulative functions along a dim of a global tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distdl.globals.functions.reductions import dims_of, reduced_shape, split_along
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import redistribute_block
from distdl.globals.rules.meta_checks import check_dtype
from distdl.globals.rules.whole_dims import along_whole
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.tensors.connection import always_curved, local


@handles("cumsum cumprod", "torch Tensor")
@by_name
def cumulate(func: Any, input: Any, dim: Any, *, dtype: Any = None) -> Any:
    """Cumulative sum or product along a dim, which may be split.

    Each worker cumulates its block, gets the totals of the blocks before it, and adds or multiplies them in.
    """
    name = func.__name__
    wanted = dtype or (input.dtype if input.is_floating_point() or input.is_complex() else torch.int64)
    x = input.to(wanted)
    dims, layout, block = dims_of(x, dim), x._layout, block_of(x)
    if not dims:
        return GlobalTensor._of(block.clone(), layout)
    check_dtype(lambda one: func(one, 0, dtype=wanted), x)
    if wanted is torch.bool:
        func(torch.zeros(1, dtype=wanted), 0, dtype=wanted)  # raises torch's error
    (along,) = dims
    y = getattr(torch, name)(block, along, dtype=wanted)  # without a dtype, torch would widen small integers
    y = y if name == "cumsum" else always_curved(y, block)
    if not split_along(layout, dims):
        return GlobalTensor._of(y, layout)
    total: Callable[..., torch.Tensor] = torch.sum if name == "cumsum" else _product
    reduce = partial(total, dim=along, keepdim=True, dtype=wanted)
    shape, least = reduced_shape(layout, dims), (1,) * x.dim()
    if layout.active and block.numel() == 0 and 0 not in shape:
        own_total = reduce(block)  # an empty sum or product: 0 or 1
    else:
        own_total = local(reduce, shape, (block, least))
    owned, needed = layout.context.keep(("before", layout, along), lambda: _before(layout, along))
    before = redistribute_block(own_total, owned, needed, name)
    before = reduce(before) if layout.active else before.reshape(layout.local)
    return GlobalTensor._of(y + before if name == "cumsum" else y * before, layout)


def _product(x: torch.Tensor, dim: int, keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    return always_curved(torch.prod(x, dim, keepdim, dtype=dtype), x)


def _before(layout: KnownLayout, dim: int) -> tuple[KnownLayout, KnownLayout]:
    """Two layouts of the totals of blocks along a dim: each worker owns its own, and needs all before it."""
    workers = layout.partition.workers
    owned, needed = list(layout.intervals), list(layout.intervals)
    owned[dim] = tuple((at, at + 1) for at in range(workers.shape[dim]))
    needed[dim] = tuple((0, at) for at in range(workers.shape[dim]))
    return layout.context.layout(workers, owned), layout.context.layout(workers, needed)


@handles("cummax cummin logcumsumexp", "torch Tensor")
@by_name
def along_whole_dim(func: Any, input: Any, dim: Any) -> Any:
    """Apply a scan along a dim, which becomes whole; other dims are split further instead."""
    dims = dims_of(input, dim)
    if not dims:
        return NotImplemented
    return along_whole(lambda block: func(block, dims[0]), input, dims, func.__name__)
