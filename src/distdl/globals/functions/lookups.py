"""Lookups in tables that every worker has whole, and activations with a weight for each channel."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.functions.pointwise import elementwise
from distdl.globals.moving.alignment import entire, taken
from distdl.globals.rules.applying import as_global, autocast_dtype, cast_to, weight_of
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import judged, shape_of
from distdl.globals.rules.work import work_on
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.structures import map_tensors
from distdl.globals.tensor.table import REPLICATED, by_name, handles
from distdl.tensors.connection import local, refuses, zeros_on


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
    """Each worker looks up the rows of its own indices."""
    if max_norm is not None and type(weight) is not GlobalTensor:
        _shorten(weight, input, max_norm, norm_type)
        return func(input, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse)
    if type(input) is not GlobalTensor or max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    if weight.dim() != 2:
        raise RuntimeError("'weight' must be 2-D")
    context, layout, table = input._context, input._layout, weight_of(weight, input._context)
    block, (rows, columns) = block_of(input), map(int, table.shape)

    def look_up(indices: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return functional.embedding(indices, table, padding_idx)

    # (of no indices, torch's second derivative raises)
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
    """The sum, mean or maximum of the rows of each bag, where bags have equal lengths. Others fall back."""
    rest = norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx
    if max_norm is not None and type(weight) is not GlobalTensor:
        _shorten(weight, input, max_norm, norm_type)
        return func(input, weight, offsets, None, *rest)
    alike = type(input) is GlobalTensor and input.dim() == 2 and input.shape[1] > 0 and offsets is None
    plain = max_norm is per_sample_weights is padding_idx is None and type(weight) is not GlobalTensor
    if not (alike and plain and mode in _OF_BAGS) or scale_grad_by_freq:
        return NotImplemented
    return _OF_BAGS[mode](functional.embedding(input, weight))


_OF_BAGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: rows.sum(1),
    "mean": lambda rows: rows.mean(1),
    "max": lambda rows: rows.max(1).values,
}


def _shorten(weight: torch.Tensor, indices: Any, max_norm: float, norm_type: float) -> None:
    """Shorten the rows of a table that are looked up and too long, in place: on every worker, all of them.

    Raises: IndexError, on every worker, for an index that is out of range.
    """
    whole = plain_of(entire(indices))
    if whole.numel() and not 0 <= int(whole.min()) <= int(whole.max()) < weight.shape[0]:
        raise IndexError("index out of range in self")
    parameter = weight.__dict__.get("_variable", weight)
    in_shares = type(parameter) is GlobalTensor
    # (of shares, past the count of writes: backward needs the new rows, too)
    table = plain_of(weight).data if in_shares else plain_of(weight).detach()
    torch.embedding_renorm_(table, whole.contiguous(), max_norm, norm_type)
    if in_shares and parameter._layout.active:
        parameter._block.data.copy_(taken(table, parameter._layout))


@handles("bucketize searchsorted isin", "torch")
def sought(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where the elements of a tensor stand in a table: each worker looks for its own."""
    names = {"bucketize": ("input", "boundaries"), "searchsorted": ("sorted_sequence", "input")}
    first, second = names.get(func.__name__, ("elements", "test_elements"))
    given = {**dict(zip((first, second), args, strict=False)), **kwargs}
    places = (second, first) if func is torch.searchsorted else (first, second)
    x, table = (given[name] for name in places)
    if func is torch.bucketize and table.dim() != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({table.dim()})")
    others = {name: value for name, value in given.items() if name not in (first, second)}
    plain_others = not any(isinstance(one, torch.Tensor) for one in others.values())
    both = isinstance(x, torch.Tensor) and isinstance(table, torch.Tensor) and func is not torch.isin
    if both and plain_others and x.dim() and (type(table) is GlobalTensor or table.dim() > 1):
        return _sought_in_lines(func, x.detach(), table.detach(), others)
    if func is torch.isin:
        fits = isinstance(table, (torch.Tensor, int, float))  # (in any number of dims)
    else:
        fits = isinstance(table, torch.Tensor) and table.dim() == 1
    if type(x) is not GlobalTensor or not fits or type(table) is GlobalTensor or not plain_others:
        return fall_back(func, args, kwargs)
    values: Any = plain_of(table).detach() if isinstance(table, torch.Tensor) else table

    def look(cells: torch.Tensor) -> torch.Tensor:
        pair = (values, cells) if func is torch.searchsorted else (cells, values)
        places: torch.Tensor = func(*pair, **others)
        return places

    block = block_of(x).detach()
    refuses(look, block, (1,))
    return GlobalTensor._of(look(block), x._layout)


def _sought_in_lines(func: Any, x: Any, table: Any, others: dict[str, Any]) -> Any:
    """The same in a table that is split, or in one for each line of x: each table is whole where it is read."""

    def look(lines: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        pair = (lines.contiguous(), cells.contiguous())  # (torch warns of others)
        found: torch.Tensor = func(*(pair if func is torch.searchsorted else pair[::-1]), **others)
        return found

    judged(func, (table, x) if func is torch.searchsorted else (x, table), others)
    front = range(x.dim() - 1)
    labels = [("n",) if table.dim() == 1 else (*front, "n"), (*front, "m")]
    work = work_on([table, x], labels, (*front, "m"), adds=False)
    return work(look, [table, x], func.__name__, bool(others.get("out_int32")))


@handles("prelu", "torch Tensor functional")
@by_name
def prelu(func: Any, input: Any, weight: torch.Tensor) -> Any:
    """A weight for all elements, or one for each channel."""
    cast = autocast_dtype(input)
    if cast is not None:
        input, weight = (cast_to(one, cast) for one in (input, weight))
    judged(func, (input, weight), {})  # (for torch's error)
    if weight.numel() > 1 and input.dim() > 2:
        weight = weight.reshape(-1, *[1] * (input.dim() - 2))
    elif weight.numel() == 1:
        weight = weight.reshape(())
    return elementwise(_prelu, (input, weight), {})


def _prelu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """That of blocks, of which the weights broadcast to x. (Without cells, too: so it has the same derivatives.)"""
    return functional.prelu(x, weight.reshape(-1) if x.numel() else zeros_on(weight, (1,)))


@handles("glu", "functional")
@by_name
def glu(func: Any, input: Any, dim: int = -1) -> Any:
    shape_of(func, input, (dim,), {})  # (for torch's error)
    first, gate = input.chunk(2, dim)
    return first * gate.sigmoid()


@by_name
def _of_copies(func: Any, input: Any, weight: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """A lookup of indices that every worker has, in a weight of the model."""
    names = _OPTIONS[func]
    given = {**dict(zip(names, rest, strict=False)), **named}
    if given.get("max_norm") is not None:
        _shorten(weight, input, given.pop("max_norm"), given.get("norm_type", 2.0))
    context = next(one._context for one in (weight, input, *given.values()) if type(one) is Replica)
    plain, others = map_tensors(((input, weight), given), lambda one: entered(one, context))
    return Replica._of(func(*plain, **others), context)


_OPTIONS = {
    function: tuple(signature(function).parameters)[2:] for function in (functional.embedding, functional.embedding_bag)
}
REPLICATED.update(dict.fromkeys(_OPTIONS, _of_copies))
