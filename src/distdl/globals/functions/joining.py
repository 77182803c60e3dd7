"""Functions that join tensors: ``cat``, ``stack`` and others that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from distdl.geometry.boxes import Intervals, Shape, balanced
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import local_block, redistribute_blocks
from distdl.globals.moving.writes_into_plain import split_beside
from distdl.globals.rules.meta_checks import check_on_meta, check_once
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import TABLE, by_name, handles
from distdl.partition.groups import IntArray
from distdl.tensors.connection import zeros_on
from distdl.tensors.private_torch import nn_functions


def joined(tensors: Sequence[Any], dim: int, along: Intervals | None = None, name: str = "cat") -> GlobalTensor:
    """Concatenate tensors along a dim. The result is split as the largest global one, and evenly along the dim.

    But tensors that lie on different workers, with the same split of the other dims, are joined without messages: each
    cell stays on its worker.

    Args:
        tensors: global or plain ones, at least one of them global.
        along: how the result is split along the dim, if not evenly. All cells then move there.
    """
    lead = max((one for one in tensors if type(one) is GlobalTensor), key=lambda one: one.numel())
    context, layout = lead._context, lead._layout
    shapes = tuple(tuple(one.shape) for one in tensors)
    if along is None and all(type(one) is GlobalTensor for one in tensors):
        layouts = tuple([one._layout for one in tensors])
        if any(one is not layout for one in layouts):
            still = context.keep(("joined in place", layouts, dim), lambda: _joined_in_place(layouts, dim))
            if still is not None:
                return GlobalTensor._of(_joined_blocks([block_of(one) for one in tensors], dim, still.local), still)

    def make() -> tuple[KnownLayout, list[KnownLayout]]:
        total = sum(shape[dim] for shape in shapes)
        intervals: list[Intervals] = list(layout.intervals)
        intervals[dim] = balanced(total, len(intervals[dim])) if along is None else along
        target = context.layout(layout.partition.workers, intervals)
        needs, start = [], 0
        for shape in shapes:
            n = shape[dim]
            intervals[dim] = tuple(
                (min(max(i - start, 0), n), min(max(j - start, 0), n)) for i, j in target.intervals[dim]
            )
            needs.append(context.layout(layout.partition.workers, intervals))
            start += n
        return target, needs

    target, needs = context.keep(("joined", layout, dim, along, shapes), make)
    return GlobalTensor._of(_joined_blocks(_local_blocks(tensors, needs, name), dim, target.local), target)


def _local_blocks(tensors: Sequence[Any], needs: Sequence[KnownLayout], name: str) -> list[torch.Tensor]:
    """This worker's block of each tensor, in the layouts that are needed. Messages of all tensors run at once."""
    split = [place for place, one in enumerate(tensors) if type(one) is GlobalTensor]
    blocks = redistribute_blocks([(block_of(tensors[at]), tensors[at]._layout, needs[at]) for at in split], name)
    found = dict(zip(split, blocks, strict=True))
    return [found[at] if at in found else local_block(tensors[at], need, name) for at, need in enumerate(needs)]


def _joined_in_place(layouts: Sequence[KnownLayout], dim: int) -> KnownLayout | None:
    """The layout of joined tensors, of these layouts, of which no cell has moved.

    Returns: None if their other dims are split differently, if a worker would have two pieces that are no neighbours,
        or if all cells along the dim are on the same workers.
    """
    slabs: list[IntArray] = []
    extents: list[int] = []
    others = [one for one in range(len(layouts[0].intervals)) if one != dim]
    for layout in layouts:
        if any(layout.intervals[one] != layouts[0].intervals[one] for one in others):
            return None
        for place, (start, stop) in enumerate(layout.intervals[dim]):
            if start == stop:
                continue
            slab = layout.partition.workers.take([place], dim)
            if slabs and np.array_equal(slab, slabs[-1]):
                extents[-1] += stop - start
            else:
                slabs.append(slab)
                extents.append(stop - start)
    if len(slabs) < 2:
        return None
    workers = np.concatenate(slabs, dim)
    if len(np.unique(workers)) < workers.size:
        return None
    intervals = list(layouts[0].intervals)
    intervals[dim] = tuple(pairwise(accumulate(extents, initial=0)))
    return layouts[0].context.layout(workers, intervals)


def _joined_blocks(blocks: list[torch.Tensor], dim: int, shape: Shape) -> torch.Tensor:
    """Concatenate blocks of one worker, and promote their dtypes.

    The result depends on blocks without cells, too, which torch.cat would cut off the graph.

    Args:
        shape: of the result, if no block has cells.
    """
    filled = [one for one in blocks if one.numel()]
    empty = [one for one in blocks if not one.numel() and one.requires_grad]
    dtype = blocks[0].dtype
    for one in blocks[1:]:
        dtype = torch.promote_types(dtype, one.dtype)
    zero: Any = sum(zeros_on(one, ()).to(dtype) for one in empty)
    if not filled:
        y = blocks[0].new_zeros(shape, dtype=dtype)
        return y + zero if empty else y
    if empty:  # connect them to the smallest block; the blocks with cells may all require no gradient
        least = min(range(len(filled)), key=lambda place: filled[place].numel())
        filled[least] = filled[least].to(dtype) + zero
    return filled[0].to(dtype, copy=True) if len(filled) == 1 else torch.cat(filled, dim).to(dtype)


@handles("cat concat concatenate", "torch")
@by_name
def cat(func: Any, tensors: Any, dim: int = 0) -> Any:
    """Concatenate. As in torch, tensors of shape (0,) count only for the dtype of the result."""
    known = next(one for one in tensors if type(one) is GlobalTensor)
    ignored = [one for one in tensors if tuple(one.shape) == (0,)]
    tensors = [one for one in tensors if tuple(one.shape) != (0,)]
    if not tensors:
        tensors, ignored = ignored, []
    if not any(type(one) is GlobalTensor for one in tensors):
        tensors[0] = split_beside(tensors[0], (known,))
    shapes = tuple(one.shape for one in tensors)
    known._context.keep(("cat", shapes, dim), lambda: check_on_meta(func, (tensors, dim), {}))
    y: Any = joined(tensors, dim % tensors[0].dim())
    for one in ignored:
        y = y.to(torch.promote_types(y.dtype, one.dtype))
        y = y + one.sum().to(y.dtype) if one.requires_grad else y  # so its gradient is zero instead of None
    return y


@handles("stack", "torch")
@by_name
def stack(func: Any, tensors: Any, dim: int = 0) -> torch.Tensor:
    tensors = list(tensors)
    if len({one.shape for one in tensors}) > 1:
        check_on_meta(func, (tensors, dim), {})
    return torch.cat([one.unsqueeze(dim) for one in tensors], dim)


@handles("hstack vstack row_stack dstack", "torch")
def stack_along(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Concatenate tensors with as many dims as the function joins along, at its dim."""
    (tensors,) = (*args, *kwargs.values())
    lift: Any = {"hstack": torch.atleast_1d, "dstack": torch.atleast_3d}.get(func.__name__, torch.atleast_2d)
    lifted: list[Any] = [lift(one) for one in tensors]
    dim = {"hstack": min(1, lifted[0].dim() - 1), "dstack": 2}.get(func.__name__, 0)
    return torch.cat(lifted, dim)


@handles("column_stack", "torch")
@by_name
def column_stack(func: Any, tensors: Sequence[Any]) -> Any:
    """Join vectors, as columns, and matrices along their columns."""
    return torch.cat([one.reshape(one.numel(), 1) if one.dim() < 2 else one for one in tensors], 1)


@by_name
def pad_sequence(
    func: Any,
    sequences: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> torch.Tensor:
    """Stack tensors of different lengths, each padded to the longest of them."""
    check_once(func, (sequences, batch_first, padding_value, padding_side), {})
    longest = max(one.shape[0] for one in sequences)
    padded = []
    for one in sequences:
        missing = longest - one.shape[0]
        widths = (missing, 0) if padding_side == "left" else (0, missing)
        padded.append(functional.pad(one, (*[0, 0] * (one.dim() - 1), *widths), value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


TABLE[nn_functions.pad_sequence] = pad_sequence
