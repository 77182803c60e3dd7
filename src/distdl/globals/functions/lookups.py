"""Lookups in tables: embeddings, and the search in sorted vectors. Each worker looks up its own elements."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.moving.alignment import gather_global, local_slice
from distdl.globals.rules.applying import as_global, replicated_weight
from distdl.globals.rules.meta_checks import check_once
from distdl.globals.rules.work import work_on
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.structures import map_tensors
from distdl.globals.tensor.table import REPLICATED, by_name, handles
from distdl.tensors.connection import local, refuses


@handles("embedding", "functional")
@by_name
def embedding(
    func: Any,
    input: Any,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Each worker looks up its own indices in the whole table. Plain indices and ``scale_grad_by_freq`` fall back.

    Raises: RuntimeError unless the table has two dims.
    """
    if max_norm is not None and type(weight) is not GlobalTensor:
        _renormalise(weight, input, max_norm, norm_type)
        return func(input, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse)
    if type(input) is not GlobalTensor or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    if weight.dim() != 2:
        raise RuntimeError("'weight' must be 2-D")
    context, layout, table = input._context, input._layout, replicated_weight(weight, input._context)
    block, (rows, columns) = block_of(input), map(int, table.shape)

    def look_up(indices: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return functional.embedding(indices, table, padding_idx)

    # local, because torch's second derivative raises if there are no indices
    y = local(look_up, (*block.shape, columns), (block, (1,) * block.dim()), (table, (max(rows, 1), 1)))

    def result() -> Any:
        return context.layout(layout.partition.workers[..., None], [*layout.intervals, ((0, columns),)])

    return as_global(y, context.keep(("embedding", layout, columns), result))


@handles("embedding_bag", "functional")
@by_name
def embedding_bag(
    func: Any,
    input: Any,
    weight: torch.Tensor,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """The sum, mean or maximum of the table's rows for each bag: each row of a global ``input``, (bags, indices).

    Bags of different lengths, weights of samples and other options fall back.
    """
    rest = norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx
    if max_norm is not None and type(weight) is not GlobalTensor:
        _renormalise(weight, input, max_norm, norm_type)
        return func(input, weight, offsets, None, *rest)
    equal_lengths = type(input) is GlobalTensor and input.dim() == 2 and input.shape[1] > 0 and offsets is None
    plain = max_norm is per_sample_weights is padding_idx is None and type(weight) is not GlobalTensor
    if not (equal_lengths and plain and mode in _REDUCTIONS) or scale_grad_by_freq:
        return NotImplemented
    return _REDUCTIONS[mode](functional.embedding(input, weight))


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: rows.sum(1),
    "mean": lambda rows: rows.mean(1),
    "max": lambda rows: rows.max(1).values,
}


def _renormalise(weight: torch.Tensor, indices: Any, max_norm: float, norm_type: float) -> None:
    """Scale rows of a table down to a norm, in place, on every worker: those that any worker looks up.

    Args:
        weight: a plain table, or the replica of a parameter, which is written, too, if it is sharded.
    Raises: IndexError, on every worker, for an index that is out of range.
    """
    plain = plain_of(gather_global(indices))
    if plain.numel() and not 0 <= int(plain.min()) <= int(plain.max()) < weight.shape[0]:
        raise IndexError("index out of range in self")
    parameter = weight.__dict__.get("_variable", weight)
    is_sharded = type(parameter) is GlobalTensor
    # the write into a sharded parameter's replica is not counted, because backward has to use the new rows
    table = plain_of(weight).data if is_sharded else plain_of(weight).detach()
    torch.embedding_renorm_(table, plain.contiguous(), max_norm, norm_type)
    if is_sharded and parameter._layout.active:
        parameter._block.data.copy_(local_slice(table, parameter._layout))


@handles("bucketize", "torch")
@by_name
def bucketize(func: Any, input: Any, boundaries: Any, **options: Any) -> Any:
    """The interval between sorted boundaries in which each element lies.

    Raises: RuntimeError unless the boundaries have one dim.
    """
    if boundaries.dim() != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")
    return _search(_bucketize, func.__name__, boundaries, input, options)


def _bucketize(table: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.bucketize(x, table, **options)


@handles("searchsorted", "torch")
@by_name
def searchsorted(func: Any, sorted_sequence: Any, input: Any, **options: Any) -> Any:
    """The place of each element in a sorted vector, or in the sorted vector of its own line."""
    return _search(func, func.__name__, sorted_sequence, input, options)


def _search(func: Any, name: str, table: Any, x: Any, options: dict[str, Any]) -> Any:
    """Each worker searches for its own elements.

    A table that is split, or has a vector for each line of x, is whole where it is read. Of a plain vector, every
    worker has all. Other arguments fall back.

    Args:
        func: takes a table, elements and the options.
    """
    if not isinstance(x, torch.Tensor) or any(isinstance(one, torch.Tensor) for one in options.values()):
        return NotImplemented
    x, table = x.detach(), table.detach()
    if x.dim() and (type(table) is GlobalTensor or table.dim() > 1):
        check_once(func, (table, x), options)
        lines = range(x.dim() - 1)
        labels = [("n",) if table.dim() == 1 else (*lines, "n"), (*lines, "m")]
        work = work_on([table, x], labels, (*lines, "m"), adds=False)

        def search(table: torch.Tensor, x: torch.Tensor) -> Any:
            return func(table.contiguous(), x.contiguous(), **options)

        return work(search, [table, x], name, bool(options.get("out_int32")))
    if type(x) is not GlobalTensor or type(table) is GlobalTensor or table.dim() != 1:
        return NotImplemented
    block, plain = block_of(x), plain_of(table)
    refuses(lambda cells: func(plain, cells, **options), block, (1,))
    return GlobalTensor._of(func(plain, block, **options), x._layout)


@handles("isin", "torch")
@by_name
def isin(func: Any, elements: Any, test_elements: Any, **options: Any) -> Any:
    """Whether each element is one of a plain tensor's, or equals a number. Other arguments fall back."""
    if type(elements) is not GlobalTensor or type(test_elements) is GlobalTensor:
        return NotImplemented
    values = plain_of(test_elements).detach() if isinstance(test_elements, torch.Tensor) else test_elements
    block = block_of(elements).detach()
    refuses(lambda cells: func(cells, values, **options), block, (1,))
    return GlobalTensor._of(func(block, values, **options), elements._layout)


def _of_replicas(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replica:
    """``embedding`` or ``embedding_bag`` of replicas: every worker has all indices, and computes all of the result."""
    given = {**dict(zip(_PARAMETERS[func], args, strict=False)), **kwargs}
    if given.get("max_norm") is not None:
        _renormalise(given["weight"], given["input"], given.pop("max_norm"), given.get("norm_type", 2.0))
    context = next(one._context for one in given.values() if type(one) is Replica)
    return Replica._of(func(**map_tensors(given, lambda one: entered(one, context))), context)


_PARAMETERS = {one: tuple(signature(one).parameters) for one in (functional.embedding, functional.embedding_bag)}
REPLICATED.update(dict.fromkeys(_PARAMETERS, _of_replicas))
