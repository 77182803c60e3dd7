"""Sums, means and their kin over dims of a global tensor.

Where the dims are split, each worker reduces its block. Sums are added up by a sum-reduce. Of others, the results of
the blocks, one *entry* for each place along the dims, come together and are reduced once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from distdl.exchange import Operator
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.layouts.reshaping import place
from distdl.globals.moving.alignment import derivatives_of, entire, moved_block
from distdl.globals.rules.meta_checks import judge_dtype
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.ops import Site
from distdl.plan.planning import broadcast
from distdl.tensors.connection import always_curved, local
from distdl.tensors.constants import Constant
from distdl.tensors.derivatives import Derivatives
from distdl.tensors.dtypes import HALVES
from distdl.transport import Label


def dims_of(x: GlobalTensor, dim: Any) -> tuple[int, ...]:
    """The dims that a reduction is over, in order; all if none are given.

    Raises: what torch raises for a dim that does not exist, or that is named twice.
    """
    if dim is None or (isinstance(dim, (tuple, list)) and not len(dim)):
        return tuple(range(x.dim()))
    dims = [dim] if isinstance(dim, int) else list(dim)
    rank = max(x.dim(), 1)
    found = sorted({one % rank for one in dims})
    if len(found) < len(dims) or min(dims) < -rank or max(dims) >= rank:
        torch.zeros(()).expand(x.shape).sum(dims)  # (for torch's error)
    return tuple(found) if x.dim() else ()


def reduced_layout(layout: KnownLayout, dims: Sequence[int]) -> KnownLayout:
    """Where a result lies that has extent 1 along the given dims: at place 0 of the axes that split them."""
    context = layout.context

    def make() -> KnownLayout:
        workers = layout.partition.workers
        kept = workers[tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(workers.ndim))]
        intervals = [((0, 1),) if dim in dims else along for dim, along in enumerate(layout.intervals)]
        return context.layout(kept, intervals)

    return context.keep(("reduced", layout, tuple(dims)), make)


def without_dims(x: GlobalTensor, dims: Sequence[int]) -> GlobalTensor:
    """The tensor without dims of extent 1."""
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


def summed(block: torch.Tensor, layout: KnownLayout, dims: Sequence[int], name: str) -> GlobalTensor:
    """Add up what the workers have computed along dims: their blocks have extent 1 there.

    Args:
        block: of this worker. Where it is outside the layout's partition, it is not read.
        layout: of the tensor that the blocks were computed of.
    """
    context, target = layout.context, reduced_layout(layout, dims)
    if not layout.active:
        block = block.reshape(-1)[:0].reshape((0,) * max(len(layout.rulers), 1))
    if not layout.rulers:
        return GlobalTensor._of(block, target)
    operator = _adding(context, layout, target, dims, block.dtype, derivatives_of(block), name)
    return GlobalTensor._of(operator(block), target)


def _adding(
    context: Context,
    layout: KnownLayout,
    target: KnownLayout,
    dims: Sequence[int],
    dtype: torch.dtype,
    derivatives: Derivatives,
    name: str,
) -> Operator:
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


@handles("sum", "torch Tensor")
def sum_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        return total(input, dim, keepdim, dtype)

    return run(*_positional(args), **kwargs)


@handles("mean", "torch Tensor")
def mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        dims = dims_of(input, dim)
        wanted = dtype or input.dtype
        if not (wanted.is_floating_point or wanted.is_complex):
            torch.zeros(1, dtype=input.dtype).mean(dtype=dtype)  # (for torch's error)
        half = wanted in HALVES  # whose sums overflow long before the mean does
        y: GlobalTensor = total(input, dims, keepdim, torch.float32 if half else dtype)
        y = y / prod(input.shape[one] for one in dims)
        return y.to(wanted) if half else y

    return run(*_positional(args), **kwargs)


def _positional(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Dims may come one by one: ``x.sum(1, 2)``."""
    if not args:
        return args
    x, *rest = args
    count = 0
    while count < len(rest) and isinstance(rest[count], int) and not isinstance(rest[count], bool):
        count += 1
    return args if count < 2 else (x, tuple(rest[:count]), *rest[count:])


def total(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> GlobalTensor:
    """The sum over dims. Half precision is added up in float32 and rounded once, as torch does."""
    dims, block = dims_of(x, dim), block_of(x)
    judge_dtype(lambda one: one.sum(dtype=dtype), x)
    if (dtype or x.dtype) in HALVES:
        rounded = block.new_zeros(()).sum(dtype=dtype).dtype  # (float32 where autocast says so)
        return total(x, dims, keepdim, torch.float32).to(rounded)
    if not x.dim():  # (new on every worker, in the same dtype)
        return GlobalTensor._of(block.sum(dtype=dtype) if x._layout.active else block.cumsum(0, dtype=dtype), x._layout)
    y = summed(block.sum(dims, keepdim=True, dtype=dtype), x._layout, dims, "sum")
    return y if keepdim else without_dims(y, dims)


def split_along(layout: KnownLayout, dims: Sequence[int]) -> bool:
    """Whether one of these dims is split."""
    places = layout.partition.workers.shape
    return any(places[dim] > 1 for dim in dims)


def reduced_shape(layout: KnownLayout, dims: Sequence[int]) -> tuple[int, ...]:
    """Shape of this worker's part of a result, with extent 1 along the dims, before parts come together."""
    if not layout.active:
        return layout.local
    return tuple(1 if dim in dims else extent for dim, extent in enumerate(layout.local))


def gathered(
    entries: torch.Tensor, layout: KnownLayout, dims: Sequence[int], name: str, everywhere: bool = False, kinds: int = 0
) -> torch.Tensor:
    """Bring the entries of blocks together.

    Args:
        entries: this worker's, with extent 1 along the dims; if there are kinds of them, these are a dim in front.
        layout: of the tensor that they were computed of.
        everywhere: every worker along the dims gets them; if not, those that have the result.
    Returns: along the dims, an entry of each place whose block has cells.
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
    y = moved_block(entries, owned, needed, name)
    if needed.active:
        for dim, places in filled:
            y = y.index_select(dim, places.on(y.device))
    elif kinds:
        y = y.reshape(kinds, *y.shape[1:])
    return y


def in_two_steps(
    func: Callable[[torch.Tensor], torch.Tensor],
    x: GlobalTensor,
    dims: Sequence[int],
    keepdim: bool,
    name: str,
    merge: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> GlobalTensor:
    """A reduction of which the result on the whole is that on the results on blocks, in values and derivatives.

    Args:
        func: reduces a block over the dims, keeping them with extent 1.
        merge: the same of the results on blocks, where its derivative is computed otherwise.
    """
    layout, least = x._layout, (1,) * x.dim()
    part = local(func, reduced_shape(layout, dims), (block_of(x), least))
    target = reduced_layout(layout, dims)
    if split_along(layout, dims):
        part = local(merge or func, target.local, (gathered(part, layout, dims, name), least))
    y = GlobalTensor._of(part, target)
    return y if keepdim else without_dims(y, dims)


def nonempty(x: GlobalTensor, dims: Sequence[int], name: str) -> None:
    """Raises: IndexError, if there is nothing to choose from."""
    for dim in dims:
        if x.shape[dim] == 0:
            raise IndexError(f"{name}(): Expected reduction dim {dim} to have non-zero size.")


@handles("prod", "torch Tensor")
@by_name
def product(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dims = dims_of(input, dim)

    def over(block: torch.Tensor) -> torch.Tensor:
        for one in dims:
            block = always_curved(block.prod(one, keepdim=True, dtype=dtype), block)
        return block if dims else block.prod(dtype=dtype)

    wanted = dtype or (input.dtype if input.is_floating_point() or input.is_complex() else torch.int64)
    if 0 in [input.shape[one] for one in dims]:
        return total(input, dims, keepdim, wanted) + 1
    return in_two_steps(over, input.to(wanted), dims, keepdim, "prod")


@handles("any all", "torch Tensor")
@by_name
def truth(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    y: Any = input != 0
    if not isinstance(dim, (tuple, list)) or dim:  # (no dims are none here, and all to other reductions)
        false = total(y if func.__name__ == "any" else ~y, dim, keepdim)
        y = (false != 0) if func.__name__ == "any" else (false == 0)
    return y.to(torch.uint8) if input.dtype == torch.uint8 else y


@handles("_is_any_true _is_all_true", "torch Tensor")
def truth_of_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch's checks ask of a tensor of truths (``torch._check_tensor_all``)."""
    (x,) = (*args, *kwargs.values())
    if x.dtype is not torch.bool:
        raise RuntimeError(f"{func.__name__} needs truths; got a tensor of {x.dtype}")
    if x._context.comm.imagined and func.__name__ == "_is_all_true":  # (what is checked is taken to hold)
        entire(x.all())
        return torch.ones((), dtype=torch.bool, device="cpu")
    return x.any() if func.__name__ == "_is_any_true" else x.all()


@handles("count_nonzero", "torch Tensor")
def count_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(input: Any, dim: Any = None) -> Any:
        return total(input.detach() != 0, dim)

    return run(*_positional(args), **kwargs)


@handles("nansum nanmean", "torch Tensor")
@by_name
def without_nan(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    func(torch.zeros(1, dtype=input.dtype, device=input.device), dtype=dtype)  # (for torch's error)
    if not (input.is_floating_point() or input.is_complex()):
        return input.sum(dim, keepdim, dtype=dtype)
    there = ~input.detach().isnan()
    y = total(input.masked_fill(~there, 0), dim, keepdim, dtype)
    y = y.to(input.dtype) if dtype is None else y  # (which autocast does not cast, as it does sums)
    return y / total(there, dim, keepdim) if func.__name__ == "nanmean" else y
