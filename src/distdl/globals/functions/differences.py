"""Functions of a few slices of a global tensor: differences and integrals along dims, and vector products."""

from __future__ import annotations

from typing import Any

import torch

from distdl.globals.rules.meta_checks import check_once
from distdl.globals.tensor.table import by_name, handles


@handles("diff")
@by_name
def diff(func: Any, input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Differences of neighbours along a dim, taken n times, with more slices in front and behind if they are given."""
    check_once(func, (input, n, dim, prepend, append), {})
    pieces = [one for one in (prepend, input, append) if one is not None] if n else [input]
    y = torch.cat(pieces, dim) if len(pieces) > 1 else input
    for _ in range(min(n, y.shape[dim])):
        left, right = _neighbours(y, dim)
        y = left ^ right if y.dtype == torch.bool else right - left
    return y.clone() if y is input else y


def _neighbours(y: Any, dim: int) -> tuple[Any, Any]:
    """All slices along a dim but the last, and all but the first."""
    count = max(y.shape[dim] - 1, 0)
    return y.narrow(dim, 0, count), y.narrow(dim, y.shape[dim] - count, count)


@handles("trapezoid trapz cumulative_trapezoid", "torch")
@by_name
def trapezoid(func: Any, y: Any, x: Any = None, **options: Any) -> Any:
    """The integral along a dim, or up to each place along it, by the trapezoidal rule.

    Args:
        x: the coordinates of the places along the dim; if not given, they are ``dx`` apart, or 1.
    """
    check_once(func, (y,) if x is None else (y, x), options)
    dim, dx = options.get("dim", -1), options.get("dx", 1)
    if not y.shape[dim]:
        return NotImplemented
    added = torch.cumsum if func is torch.cumulative_trapezoid else torch.sum
    if x is None and added is torch.sum:
        # torch's own formula, whose sum of small integers is of int64
        return (y.sum(dim) - (y.select(dim, 0) + y.select(dim, -1)) * 0.5) * dx
    left, right = _neighbours(y, dim)
    if x is None:
        return added(left + right, dim) * (dx / 2)
    return added(_distances(x, y, dim) * (left + right), dim) / 2


def _distances(x: Any, y: Any, dim: int) -> Any:
    """The distances of neighbours along a dim of y, of which x has the coordinates, in a shape that broadcasts to y."""
    if x.dim() == 1:
        x = x.reshape([-1 if place == dim % y.dim() else 1 for place in range(y.dim())])
    elif x.dim() < y.dim():
        x = x.reshape((1,) * (y.dim() - x.dim()) + tuple(x.shape))
    left, right = _neighbours(x, dim)
    return right - left


@handles("gradient", "torch")
@by_name
def gradient(func: Any, input: Any, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Any:
    """Derivatives along dims by central differences of evenly spaced cells, and one-sided differences at the ends.

    Other spacings, and too few cells, fall back.
    """
    dims = tuple(range(input.dim())) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    steps = list(spacing) if isinstance(spacing, (tuple, list)) else [spacing] * len(dims)
    even = len(steps) == len(dims) and all(isinstance(step, (int, float)) for step in steps)
    if not even or edge_order not in (1, 2) or any(input.shape[place] <= edge_order for place in dims) or not dims:
        return NotImplemented
    check_once(func, (input,), {"spacing": spacing, "dim": dims, "edge_order": edge_order})
    return tuple(_gradient(input, step, place, edge_order) for step, place in zip(steps, dims, strict=True))


def _gradient(x: Any, step: float, dim: int, edge_order: int) -> Any:
    """The derivative along one dim.

    Args:
        edge_order: 1 or 2: how many neighbours the difference at an end reads.
    """
    count = x.shape[dim]
    inner = (x.narrow(dim, 2, count - 2) - x.narrow(dim, 0, count - 2)) / (2 * step)
    ends = []
    for side in (1, -1):
        a, b, *c = [x.narrow(dim, (at if side > 0 else -1 - at) % count, 1) for at in range(edge_order + 1)]
        ends.append((b * 2 - a * 1.5 - c[0] * 0.5 if c else b - a) / (side * step))
    return torch.cat([ends[0], inner, ends[1]], dim)


@handles("cross", "torch Tensor linalg")
@by_name
def cross(func: Any, input: Any, other: Any, dim: int | None = None) -> Any:
    """The cross product of vectors along a dim of extent 3. Operands of unlike dtypes or ranks fall back."""
    shape = torch.broadcast_shapes(input.shape, other.shape)
    if dim is None:
        dim = -1 if func is torch.linalg.cross else next((place for place, n in enumerate(shape) if n == 3), 0)
    alike = input.dim() == other.dim() and (func is torch.linalg.cross or input.shape == other.shape)
    alike = alike and input.dtype == other.dtype
    if not alike or input.shape[dim] != 3 or other.shape[dim] != 3:
        return NotImplemented
    a, b = input.unbind(dim), other.unbind(dim)
    return torch.stack([a[i - 2] * b[i - 1] - a[i - 1] * b[i - 2] for i in range(3)], dim)
