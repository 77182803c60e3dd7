"""Sums, means and other reductions over dims of a global tensor, which may be split.

Each worker reduces its block. Sums of blocks are added up by a sum-reduce. For other reductions, the results of the
blocks, called *entries*, one for each block along the dims, are gathered and reduced once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any

import torch

from distdl.exchange import Operator
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.layouts.reshaping import place
from distdl.globals.moving.alignment import derivatives_of, gather_global, redistribute_block
from distdl.globals.rules.meta_checks import check_dtype
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import Handler, by_name, handles
from distdl.ops import Site
from distdl.plan.planning import broadcast
from distdl.tensors.connection import always_curved, local
from distdl.tensors.constants import Constant
from distdl.tensors.derivatives import Derivatives
from distdl.tensors.dtypes import HALVES
from distdl.transport import Label


def dims_of(x: GlobalTensor, dim: Any) -> tuple[int, ...]:
    """The dims of a reduction as sorted nonnegative numbers; all dims for None or an empty list.

    Raises: what torch raises for a dim that does not exist, or that is named twice.
    """
    if dim is None or (isinstance(dim, (tuple, list)) and not len(dim)):
        return tuple(range(x.dim()))
    dims = [dim] if isinstance(dim, int) else list(dim)
    rank = max(x.dim(), 1)
    found = sorted({one % rank for one in dims})
    if len(found) < len(dims) or min(dims) < -rank or max(dims) >= rank:
        torch.zeros(()).expand(x.shape).sum(dims)  # raises torch's error
    return tuple(found) if x.dim() else ()


def reduced_layout(layout: KnownLayout, dims: Sequence[int]) -> KnownLayout:
    """The layout of a result with extent 1 along the given dims. The first workers of the axes along these hold it."""
    context = layout.context

    def make() -> KnownLayout:
        workers = layout.partition.workers
        kept = workers[tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(workers.ndim))]
        intervals = [((0, 1),) if dim in dims else along for dim, along in enumerate(layout.intervals)]
        return context.layout(kept, intervals)

    return context.keep(("reduced", layout, tuple(dims)), make)


def without_dims(x: GlobalTensor, dims: Sequence[int]) -> GlobalTensor:
    """Remove the given dims, which have extent 1. Nothing moves."""
    if not dims:
        return x
    layout, context = x._layout, x._context

    def make() -> KnownLayout:
        kept = [dim for dim in range(len(layout.rulers)) if dim not in dims]
        workers = layout.partition.workers
        owner = [place(layout, dim) if dim in dims else slice(None) for dim in range(workers.ndim)]
        return context.layout(workers[tuple(owner)], [layout.intervals[dim] for dim in kept])

    target = context.keep(("without", layout, tuple(dims)), make)
    return GlobalTensor._of(block_of(x).reshape(target.local), target)


def sum_blocks(block: torch.Tensor, layout: KnownLayout, dims: Sequence[int], name: str) -> GlobalTensor:
    """Add up the results of blocks along dims, and return them as a global tensor in the reduced layout.

    Args:
        block: this worker's result, with extent 1 along the dims. A worker outside the partition may pass any tensor.
        layout: of the tensor whose blocks were reduced.
    """
    context, target = layout.context, reduced_layout(layout, dims)
    if not layout.active:
        block = block.reshape(-1)[:0].reshape((0,) * max(len(layout.rulers), 1))
    if not layout.rulers:
        return GlobalTensor._of(block, target)
    operator = _sum_operator(context, layout, target, dims, block.dtype, derivatives_of(block), name)
    return GlobalTensor._of(operator(block), target)


def _sum_operator(
    context: Context,
    layout: KnownLayout,
    target: KnownLayout,
    dims: Sequence[int],
    dtype: torch.dtype,
    derivatives: Derivatives,
    name: str,
) -> Operator:
    """The operator that adds blocks up along dims: the adjoint of a broadcast. Made once."""

    def make() -> Operator:
        site = Site._make((layout.partition, context.everyone, Label(name, detail=(layout, target, dtype))))
        if target.partition.workers.size == layout.partition.workers.size:
            return site.identity(dtype, derivatives, target.local)
        shapes = {
            worker: tuple(1 if dim in dims else n for dim, n in enumerate(layout.shapes[worker])) for worker in layout
        }
        plan = broadcast(target.partition, layout.partition, shapes, context.me).T
        own = shapes.get(context.me, (0,) * len(layout.rulers))
        return site.operator(plan, dtype, derivatives, [own], [target.local])

    return context.keep(("adding", layout, tuple(dims), dtype, derivatives, name), make)


def _with_listed_dims(handler: Callable[..., Any]) -> Handler:
    """A handler whose arguments are bound by name, where dims may also be given one by one: ``x.sum(1, 2)``."""

    @wraps(handler)
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stop = 1
        while stop < len(args) and isinstance(args[stop], int) and not isinstance(args[stop], bool):
            stop += 1
        return handler(func, *(args if stop < 3 else (args[0], args[1:stop], *args[stop:])), **kwargs)

    return run


@handles("sum", "torch Tensor")
@_with_listed_dims
def sum_(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return sum_over(input, dim, keepdim, dtype)


@handles("mean", "torch Tensor")
@_with_listed_dims
def mean(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum over dims, divided by the count. For half precision the sum is in float32, where it does not overflow."""
    dims = dims_of(input, dim)
    wanted = dtype or input.dtype
    if not (wanted.is_floating_point or wanted.is_complex):
        torch.zeros(1, dtype=input.dtype).mean(dtype=dtype)  # raises torch's error
    half = wanted in HALVES
    y: GlobalTensor = sum_over(input, dims, keepdim, torch.float32 if half else dtype)
    y = y / prod(input.shape[one] for one in dims)
    return y.to(wanted) if half else y


def sum_over(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> GlobalTensor:
    """The sum over dims; over all for None. Half precision is added up in float32 and rounded once, as in torch."""
    dims, block = dims_of(x, dim), block_of(x)
    check_dtype(lambda one: one.sum(dtype=dtype), x)
    if (dtype or x.dtype) in HALVES:
        rounded = block.new_zeros(()).sum(dtype=dtype).dtype  # float32 under some autocasts
        return sum_over(x, dims, keepdim, torch.float32).to(rounded)
    if not x.dim():  # a new tensor on every worker; cumsum gives a block without cells the dtype of a sum
        return GlobalTensor._of(block.sum(dtype=dtype) if x._layout.active else block.cumsum(0, dtype=dtype), x._layout)
    y = sum_blocks(block.sum(dims, keepdim=True, dtype=dtype), x._layout, dims, "sum")
    return y if keepdim else without_dims(y, dims)


def split_along(layout: KnownLayout, dims: Sequence[int]) -> bool:
    """Whether one of these dims is split."""
    places = layout.partition.workers.shape
    return any(places[dim] > 1 for dim in dims)


def reduced_shape(layout: KnownLayout, dims: Sequence[int]) -> tuple[int, ...]:
    """The shape of this worker's entry, the result of its own block: extent 1 along the dims."""
    if not layout.active:
        return layout.local
    return tuple(1 if dim in dims else extent for dim, extent in enumerate(layout.local))


def gather_entries(
    entries: torch.Tensor, layout: KnownLayout, dims: Sequence[int], name: str, everywhere: bool = False, kinds: int = 0
) -> torch.Tensor:
    """Gather the entries of blocks along dims.

    Args:
        entries: this worker's entry, with extent 1 along the dims.
        layout: of the tensor whose blocks were reduced.
        everywhere: every worker along the dims gets the entries; else only those that hold the reduced layout.
        kinds: the extent of a dim in front, if an entry consists of several kinds of numbers; else 0.
    Returns: along the dims, one entry for each block that has cells.
    """
    context = layout.context

    def make() -> tuple[KnownLayout, KnownLayout, list[tuple[int, Constant]]]:
        workers = layout.partition.workers
        split = [dim for dim in dims if workers.shape[dim] > 1]
        owned = list(layout.intervals)
        needed = list(layout.intervals)
        for dim in dims:
            places = workers.shape[dim]
            owned[dim] = tuple((at, at + 1) for at in range(places))
            needed[dim] = ((0, places),) * (places if everywhere else 1)
        targets = workers
        if not everywhere:
            targets = workers[tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(workers.ndim))]
        front: list[Any] = [((0, kinds),)] if kinds else []
        more = (1,) * len(front)
        filled = []
        for dim in split:
            places = [at for at, (start, stop) in enumerate(layout.intervals[dim]) if stop > start]
            if len(places) < workers.shape[dim]:
                filled.append((dim + len(front), Constant(torch.tensor(places, device="cpu"))))
        return (
            context.layout(workers.reshape(more + workers.shape), [*front, *owned]),
            context.layout(targets.reshape(more + targets.shape), [*front, *needed]),
            filled,
        )

    owned, needed, filled = context.keep(("entries", layout, tuple(dims), everywhere, kinds), make)
    if owned is needed:
        return entries
    if not layout.active:
        entries = entries.reshape(-1)[:0].reshape(owned.local)
    y = redistribute_block(entries, owned, needed, name)
    if needed.active:
        for dim, places in filled:
            y = y.index_select(dim, places.on(y.device))
    elif kinds:
        y = y.reshape(kinds, *y.shape[1:])
    return y


def reduce_and_merge(
    func: Callable[[torch.Tensor], torch.Tensor],
    x: GlobalTensor,
    dims: Sequence[int],
    keepdim: bool,
    name: str,
    merge: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> GlobalTensor:
    """Reduce blocks, gather the entries, and reduce these: for reductions of which that gives value and derivatives.

    Args:
        func: reduces a block over the dims, keeping them with extent 1.
        merge: reduces the gathered entries, if that is not done by func, too.
    """
    layout, least = x._layout, (1,) * x.dim()
    block = local(func, reduced_shape(layout, dims), (block_of(x), least))
    target = reduced_layout(layout, dims)
    if split_along(layout, dims):
        block = local(merge or func, target.local, (gather_entries(block, layout, dims, name), least))
    y = GlobalTensor._of(block, target)
    return y if keepdim else without_dims(y, dims)


def check_nonempty(x: GlobalTensor, dims: Sequence[int], name: str) -> None:
    """Raises: IndexError, as torch does, for a dim of extent 0, in which there is no element to choose."""
    for dim in dims:
        if x.shape[dim] == 0:
            raise IndexError(f"{name}(): Expected reduction dim {dim} to have non-zero size.")


@handles("prod", "torch Tensor")
@by_name
def product(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The product over dims. Over none it is 1."""
    dims = dims_of(input, dim)

    def over(block: torch.Tensor) -> torch.Tensor:
        for one in dims:
            block = always_curved(block.prod(one, keepdim=True, dtype=dtype), block)
        return block if dims else block.prod(dtype=dtype)

    wanted = dtype or (input.dtype if input.is_floating_point() or input.is_complex() else torch.int64)
    if 0 in [input.shape[one] for one in dims]:
        return sum_over(input, dims, keepdim, wanted) + 1
    return reduce_and_merge(over, input.to(wanted), dims, keepdim, "prod")


@handles("any all", "torch Tensor")
@by_name
def truth(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Whether any or all elements are not zero, by a count. An empty list of dims reduces none here, as in torch."""
    y: Any = input != 0
    if not isinstance(dim, (tuple, list)) or dim:
        count = sum_over(y if func.__name__ == "any" else ~y, dim, keepdim)
        y = (count != 0) if func.__name__ == "any" else (count == 0)
    return y.to(torch.uint8) if input.dtype == torch.uint8 else y


@handles("_is_any_true _is_all_true", "torch Tensor")
def truth_of_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether any or all elements are true, as ``torch._check_tensor_all`` asks. In a rehearsal all are."""
    (x,) = (*args, *kwargs.values())
    if x.dtype is not torch.bool:
        raise RuntimeError(f"{func.__name__} needs truths; got a tensor of {x.dtype}")
    if x._context.comm.imagined and func.__name__ == "_is_all_true":
        gather_global(x.all())
        return torch.ones((), dtype=torch.bool, device="cpu")
    return x.any() if func.__name__ == "_is_any_true" else x.all()


@handles("count_nonzero", "torch Tensor")
@_with_listed_dims
def count_nonzero(func: Any, input: Any, dim: Any = None) -> Any:
    return sum_over(input.detach() != 0, dim)


@handles("nansum nanmean", "torch Tensor")
@by_name
def without_nan(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sum or mean over the elements that are not nan."""
    func(torch.zeros(1, dtype=input.dtype, device=input.device), dtype=dtype)  # raises torch's error
    if not (input.is_floating_point() or input.is_complex()):
        return input.sum(dim, keepdim, dtype=dtype)
    valid = ~input.detach().isnan()
    y = sum_over(input.masked_fill(~valid, 0), dim, keepdim, dtype)
    y = y.to(input.dtype) if dtype is None else y  # autocast casts sums, but not this function
    return y / sum_over(valid, dim, keepdim) if func.__name__ == "nanmean" else y
