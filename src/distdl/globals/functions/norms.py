"""Norms of global tensors, and distances that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch

from distdl.globals.functions.extremes import extreme_over
from distdl.globals.functions.reductions import (
    dims_of,
    reduce_and_merge,
    reduced_shape,
    split_along,
    sum_blocks,
    sum_over,
    without_dims,
)
from distdl.globals.moving.alignment import derivatives_of
from distdl.globals.rules.applying import widened
from distdl.globals.rules.meta_checks import check_dtype, check_once, result_shape
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.tensors.connection import local
from distdl.tensors.derivatives import NONE
from distdl.tensors.dtypes import HALVES
from distdl.tensors.function import Function


def norm_over(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """The p-norm over dims, as a global tensor.

    Args:
        dim: the dims; None for all.
        dtype: to which the elements are converted first.
    Raises: what ``torch.linalg.vector_norm`` raises.
    """
    if dtype is not None or not (x.is_floating_point() or x.is_complex()):
        torch.linalg.vector_norm(torch.zeros(1, dtype=x.dtype), p, dtype=dtype)  # raises torch's error
    x = widened(x, ("cuda",)) if dtype is None else x.to(dtype)
    dims, p = dims_of(x, dim), float(p)
    # two cells at least: torch adds nothing up for one, and takes more dtypes then
    check_dtype(lambda one: torch.linalg.vector_norm(one.flatten().repeat(2), p), x)
    if p and 0 in [x.shape[one] for one in dims]:
        result_shape(torch.linalg.vector_norm, x, (p, dims, keepdim), {})  # raises torch's error
        return sum_over(x.real if x.is_complex() else x, dims, keepdim)
    if split_along(x._layout, dims):
        return _norm_over_split(x, p, dims, keepdim)
    return reduce_and_merge(lambda block: _norm(block, p, dims, None), x, dims, keepdim, "norm")


def _norm_over_split(x: Any, p: float, dims: tuple[int, ...], keepdim: bool) -> Any:
    """The p-norm over dims that are split: by sums for p of 0 and 1, by extremes for infinite p, else of the norms."""
    if p in (0, 1):
        shape = reduced_shape(x._layout, dims)
        norms = local(lambda block: _norm(block, p, dims, None), shape, (block_of(x), (1,) * x.dim()))
        y = sum_blocks(norms, x._layout, dims, "norm")
        return y if keepdim else without_dims(y, dims)
    if p in (inf, -inf):
        return extreme_over(x.abs(), dims, keepdim, "amax" if p > 0 else "amin", nan="none")
    wide = torch.float32 if x.dtype in HALVES else None  # torch adds up half precision in float32
    recorded, dtype = derivatives_of(block_of(x)) != NONE, x.dtype.to_real()
    of_block, of_norms = (_BlockNorm.apply, _NormOfNorms.apply) if recorded else (_norm, _norm)

    def merge(norms: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = of_norms(norms, p, dims, None)
        return y.to(dtype)

    return reduce_and_merge(lambda block: of_block(block, p, dims, wide), x, dims, keepdim, "norm", merge)


def _norm(x: torch.Tensor, p: float, dims: Sequence[int], wide: torch.dtype | None) -> torch.Tensor:
    """The p-norm of a block over dims, which keep extent 1; computed in the dtype ``wide``, if it is given."""
    y: torch.Tensor = torch.linalg.vector_norm(x, p, dims or None, keepdim=bool(dims), dtype=wide)
    return y


class _BlockNorm(Function):
    r"""The norm :math:`n = |x|_p` of a block. :class:`_NormOfNorms` makes the norm y of all blocks' norms.

    The derivative of y is :math:`\partial x = x |x|^{p - 2} f` with :math:`f = y^{1 - p} \partial y`. It does not
    depend on n, which may be zero or infinite where y has derivatives of any order. So the two functions pass the
    factor f to each other in the place of the derivative by n, which would be :math:`n^{p - 1} f`.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, dims: Sequence[int], wide: torch.dtype | None) -> torch.Tensor:
        ctx.p, ctx.dims, ctx.wide = p, dims, wide
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return _norm(x, p, dims, wide)

    @staticmethod
    def _direction(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """:math:`x |x|^{p - 2}`, by torch's own operators, so that its derivatives exist where torch's do."""
        p, x = ctx.p, x if ctx.wide is None else x.to(ctx.wide)
        if p == 2:
            return x
        if p > 2:
            return x * x.abs().pow(p - 2)
        size = x.abs().pow(p - 1)
        return x.sgn() * (size if p > 1 else size.masked_fill(x == 0, 0))

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors  # read once, because a checkpoint gives saved tensors only once
        return (_BlockNorm._direction(ctx, x) * factor).to(x.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        along = _BlockNorm._direction(ctx, *ctx.saved_tensors).conj() * tangent
        return (along.real if along.is_complex() else along).sum(ctx.dims, keepdim=True)


class _NormOfNorms(Function):
    """The norm y of the norms of blocks. Its derivative is the factor f that all blocks share: see _BlockNorm."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, p: float, dims: Sequence[int], wide: torch.dtype | None) -> torch.Tensor:
        y = _norm(parts, p, dims, wide)
        ctx.p, ctx.dims, ctx.shape = p, dims, parts.shape
        ctx.save_for_backward(y)
        ctx.save_for_forward(y)
        return y

    @staticmethod
    def _factor(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        r""":math:`f = y^{1 - p} \partial y`, and 0 where y is 0, by torch's own operators, too."""
        p: float = ctx.p
        y: torch.Tensor = ctx.saved_tensors[0]
        if p == 2:  # multiplied by dy at last, so that the derivative by dy is 0 there, too
            return dy * y.reciprocal().masked_fill(y == 0, 0)
        return dy * y.pow(1 - p) if p < 1 else (dy / y.pow(p - 1)).masked_fill(y == 0, 0)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _NormOfNorms._factor(ctx, dy).expand(ctx.shape), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        return _NormOfNorms._factor(ctx, tangent.sum(ctx.dims, keepdim=True))


@handles("vector_norm", "linalg")
@by_name
def vector_norm(
    func: Any, x: GlobalTensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    return norm_over(x, ord, dim, keepdim, dtype)


@handles("norm", "torch Tensor")
@by_name
def norm(func: Any, input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if p == "nuc":
        return NotImplemented
    return norm_over(input, 2 if p in (None, "fro") else p, dim, keepdim, dtype)


@handles("norm matrix_norm", "linalg")
@by_name
def linalg_norm(
    func: Any, A: GlobalTensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if func is torch.linalg.matrix_norm:
        ord, dim = "fro" if ord is None else ord, (-2, -1) if dim is None else dim
    pair = (A.dim() == 2) if dim is None else not isinstance(dim, int) and len(dim) == 2
    if pair and ord not in (None, "fro"):
        return NotImplemented  # norms of matrices as operators need whole matrices
    check_once(func, (A, ord, dim, keepdim), {"dtype": dtype})
    return norm_over(A, 2 if ord in (None, "fro") else ord, dim, keepdim, dtype)


@handles("normalize", "functional")
@by_name
def normalize(func: Any, input: Any, p: float | None = 2.0, dim: Any = 1, eps: float = 1e-12) -> Any:
    check_once(func, (input, p, dim, eps), {})
    return input / norm_over(input, 2.0 if p is None else p, dim, True).clamp_min(eps)


@handles("dist", "torch Tensor")
@by_name
def dist(func: Any, input: Any, other: Any, p: Any = 2) -> Any:
    return norm_over(input - other, p)


@handles("pairwise_distance", "torch functional")
@by_name
def pairwise_distance(func: Any, x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    return norm_over(x1 - x2 + eps, p, -1, keepdim)


@handles("cosine_similarity", "torch functional")
@by_name
def cosine_similarity(func: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    common = torch.result_type(x1, x2)
    if not common.is_floating_point:
        raise RuntimeError(f"expected common dtype to be floating point, yet common dtype is {common}")
    x1, x2 = (one if one.is_floating_point() else one.to(common) for one in (x1, x2))
    if x1.shape != x2.shape:
        x1, x2 = torch.broadcast_tensors(x1, x2)
    first, second = (
        one / (norm_over(one, 2, dim, True) if type(one) is GlobalTensor else one.norm(2, dim, True)).clamp_min(eps)
        for one in (x1, x2)
    )
    return (first * second).sum(dim)
