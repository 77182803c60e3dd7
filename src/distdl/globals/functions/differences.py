"""Differences along dims, sums of their products, and other functions of a few slices of a global tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distdl.globals.functions.shapes import expanded
from distdl.globals.rules.applying import one_by_one
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import judge_dtype, judged
from distdl.globals.tensor.table import TABLE, by_name, handles


@handles("diff")
@by_name
def diff(func: Any, input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Differences of neighbours."""
    judged(func, (input, n, dim, prepend, append), {})
    pieces = [one for one in (prepend, input, append) if one is not None] if n else [input]  # (as torch does)
    y = torch.cat(pieces, dim) if len(pieces) > 1 else input
    for _ in range(min(n, y.shape[dim])):
        first, second = _sides(y, dim)
        y = first ^ second if y.dtype == torch.bool else second - first
    return y.clone() if y is input else y


def _sides(y: Any, dim: int) -> tuple[Any, Any]:
    """All slices along a dim but the last, and all but the first."""
    count = max(y.shape[dim] - 1, 0)
    return y.narrow(dim, 0, count), y.narrow(dim, y.shape[dim] - count, count)


@handles("trapezoid trapz cumulative_trapezoid", "torch")
def trapezoid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The integral along a dim, or up to each place along it, by the trapezoidal rule."""

    def run(y: Any, x: Any = None, *, dx: float = 1, dim: int = -1) -> Any:
        judged(func, args, kwargs)
        if not y.shape[dim]:
            return fall_back(func, args, kwargs)
        added = torch.cumsum if func is torch.cumulative_trapezoid else torch.sum
        if x is None and added is torch.sum:  # (torch's own formula, which adds up bytes as larger integers)
            return (y.sum(dim) - (y.select(dim, 0) + y.select(dim, -1)) * 0.5) * dx
        first, second = _sides(y, dim)
        if x is None:
            return added(first + second, dim) * (dx / 2)
        return added(_widths(x, y, dim) * (first + second), dim) / 2

    return run(*args, **kwargs)


def _widths(x: Any, y: Any, dim: int) -> Any:
    """The distances of places along a dim of y."""
    if x.dim() == 1:
        x = x.reshape([-1 if place == dim % y.dim() else 1 for place in range(y.dim())])
    elif x.dim() < y.dim():
        x = x.reshape((1,) * (y.dim() - x.dim()) + tuple(x.shape))
    left, right = _sides(x, dim)
    return right - left


@handles("gradient", "torch")
def gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Central differences of cells at equal distances, and one-sided ones at both ends, of first or second order."""

    def run(input: Any, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Any:
        dims = tuple(range(input.dim())) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        steps = list(spacing) if isinstance(spacing, (tuple, list)) else [spacing] * len(dims)
        even = len(steps) == len(dims) and all(isinstance(step, (int, float)) for step in steps)
        if not even or edge_order not in (1, 2) or any(input.shape[place] <= edge_order for place in dims) or not dims:
            return fall_back(func, args, kwargs)
        judged(func, args, kwargs)
        return tuple(_gradient(input, step, place, edge_order) for step, place in zip(steps, dims, strict=True))

    return run(*args, **kwargs)


def _gradient(x: Any, step: float, dim: int, edge_order: int) -> Any:
    count = x.shape[dim]
    inner = (x.narrow(dim, 2, count - 2) - x.narrow(dim, 0, count - 2)) / (2 * step)
    ends = []
    for side in (1, -1):  # of the first cell, and of the last
        a, b, *c = [x.narrow(dim, (at if side > 0 else -1 - at) % count, 1) for at in range(edge_order + 1)]
        ends.append((b * 2 - a * 1.5 - c[0] * 0.5 if c else b - a) / (side * step))
    return torch.cat([ends[0], inner, ends[1]], dim)


@handles("cross", "torch Tensor linalg")
@by_name
def cross(func: Any, input: Any, other: Any, dim: int | None = None) -> Any:
    """The product of vectors of space."""
    shape = torch.broadcast_shapes(input.shape, other.shape)
    if dim is None:
        dim = -1 if func is torch.linalg.cross else next((place for place, n in enumerate(shape) if n == 3), 0)
    alike = input.dim() == other.dim() and (func is torch.linalg.cross or input.shape == other.shape)
    alike = alike and input.dtype == other.dtype
    if not alike or input.shape[dim] != 3 or other.shape[dim] != 3:
        return NotImplemented
    a, b = input.unbind(dim), other.unbind(dim)
    return torch.stack([a[i - 2] * b[i - 1] - a[i - 1] * b[i - 2] for i in range(3)], dim)


@handles("rot90")
@by_name
def rot90(func: Any, input: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """A plane turned by right angles."""
    judged(func, (input, k, dims), {})
    judge_dtype(lambda one: func(one, k, dims), input)
    first, second = dims
    turned = {
        0: lambda: input.clone(),
        1: lambda: input.transpose(first, second).flip(first),  # (a copy, and no view of one)
        2: lambda: input.flip((first, second)),
        3: lambda: input.transpose(first, second).flip(second),
    }
    return turned[k % 4]()


@handles("column_stack", "torch")
@by_name
def column_stack(func: Any, tensors: Sequence[Any]) -> Any:
    """Vectors and matrices side by side."""
    return torch.cat([one.reshape(one.numel(), 1) if one.dim() < 2 else one for one in tensors], 1)


@handles("meshgrid", "torch")
def meshgrid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The coordinates of a grid."""

    def run(*tensors: Any, indexing: str | None = None) -> Any:
        axes = one_by_one(tensors)
        if any(one.dim() > 1 for one in axes):
            return fall_back(func, args, kwargs)  # (for torch's error, which prints them)
        judged(func, args, kwargs)
        order = list(range(len(axes)))
        if indexing == "xy" and len(axes) > 1:
            order[:2] = [1, 0]
        shape = tuple(axes[place].numel() for place in order)
        lines = [one.reshape([-1 if place == at else 1 for place in order]) for at, one in enumerate(axes)]
        return tuple(expanded(one, shape) for one in lines)

    return run(*args, **kwargs)


_MESHGRID: Any = getattr(torch._C._VariableFunctions, "meshgrid")  # noqa: B009 (the stubs lack it)
TABLE[_MESHGRID] = meshgrid  # (torch.meshgrid calls it, and only it asks us)
