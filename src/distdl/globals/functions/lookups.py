"""Lookups in tables that every worker has whole, and activations with a weight for each channel."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from distdl.globals.bounds import check_range
from distdl.globals.fallback import fall_back
from distdl.globals.functions.applying import as_global, autocast_dtype, weight_of
from distdl.globals.functions.judging import judged, shape_of
from distdl.globals.functions.pointwise import elementwise
from distdl.globals.functions.spreading import work_on
from distdl.globals.operands import block_of
from distdl.globals.replicas import plain_of
from distdl.globals.table import handles
from distdl.globals.tensor import GlobalTensor
from distdl.tensors.connection import refuses


@handles("embedding", "functional")
def embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each worker looks up the rows of its own indices."""

    def run(
        input: Any,
        weight: torch.Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        if type(input) is not GlobalTensor or max_norm is not None or scale_grad_by_freq:
            return fall_back(func, args, kwargs)
        if weight.dim() != 2:
            raise RuntimeError("'weight' must be 2-D")
        context, layout, table = input._context, input._layout, weight_of(weight, input._context)
        check_range(input, 0, table.shape[0], lambda wrong: functional.embedding(wrong, table.detach()[:, :1]))
        y = functional.embedding(block_of(input), table, padding_idx)
        columns = int(table.shape[1])
        grid = layout.partition.workers.shape

        def result() -> Any:
            return context.layout(context.grid(layout.partition, (*grid, 1)), [*layout.intervals, ((0, columns),)])

        return as_global(y, context.keep(("embedding", layout, columns), result))

    return run(*args, **kwargs)


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
    return work_on([table, x], labels, (*front, "m"), adds=False)(look, [table, x], func.__name__)


@handles("prelu", "torch Tensor functional")
def prelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A weight for all elements, or one for each channel."""

    def run(input: Any, weight: torch.Tensor) -> Any:
        judged(func, (input, weight), {})  # (for torch's error)
        if weight.numel() > 1 and input.dim() > 2:
            weight = weight.reshape(-1, *[1] * (input.dim() - 2))
        elif weight.numel() == 1:
            weight = weight.reshape(())
        cast = autocast_dtype(plain_of(input) if type(input) is not GlobalTensor else input._block)
        if cast is not None and input.dtype is not torch.float64:
            input, weight = input.to(cast), weight.to(cast)
        return elementwise(_prelu, (input, weight), {})

    return run(*args, **kwargs)


def _prelu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, weight * x)


@handles("glu", "functional")
def glu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(input: Any, dim: int = -1) -> Any:
        shape_of(func, input, (dim,), {})  # (for torch's error)
        first, gate = input.chunk(2, dim)
        return first * gate.sigmoid()

    return run(*args, **kwargs)
