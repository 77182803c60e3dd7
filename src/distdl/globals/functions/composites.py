"""Functions that are made of others: each of those has an op."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.adopting import write
from distdl.globals.functions.applying import one_by_one, widened
from distdl.globals.functions.judging import judged, shape_of
from distdl.globals.functions.losses import reduction_of
from distdl.globals.functions.pointwise import elementwise
from distdl.globals.functions.shapes import expanded
from distdl.globals.nested import map_tensors
from distdl.globals.table import TABLE, Handler, by_name, composite, handles
from distdl.globals.tensor import GlobalTensor
from distdl.globals.ties import write_back
from distdl.tensors.dtypes import HALVES
from distdl.tensors.modes import uncounted


def _made_of_others(func: Any) -> Handler:
    rebuilt = composite(func)
    return lambda func, args, kwargs: rebuilt(*args, **kwargs)


for _function in (
    functional.multilabel_soft_margin_loss, functional.triplet_margin_with_distance_loss, torch.unravel_index,
    functional.gaussian_nll_loss,
):  # fmt: skip
    TABLE[_function] = _made_of_others(_function)
TABLE[torch.clip_] = elementwise


@handles("tril_ triu_ cumsum_ cumprod_ addmm_ addmv_ addr_ addbmm_ baddbmm_ put_ renorm_", "Tensor")
def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function out of place, written into its first argument."""
    x = args[0]
    if type(x) is not GlobalTensor:
        return write(func, args, kwargs, x, (args, kwargs))
    judged(func, args, kwargs)
    before = x.clone() if x.requires_grad else x  # (of which a derivative may need the old values)
    y = getattr(torch.Tensor, func.__name__.removesuffix("_"))(before, *args[1:], **kwargs)
    return write_back(x, y, func.__name__)


@handles("put", "torch Tensor")
@by_name
def put(func: Any, input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Other elements at places in the flat tensor."""
    judged(func, (input, index, source, accumulate), {})
    if index.dtype is not torch.int64:
        raise RuntimeError(f"put_(): Expected a long tensor for index, but got {index.dtype}")
    if source.numel() != index.numel():
        raise IndexError(
            f"put_(): Expected source and index to have the same number of elements, but got source.numel() = "
            f"{source.numel()}, index.numel() = {index.numel()}"
        )
    y = torch.index_put(input.reshape(-1), (index.reshape(-1),), source.reshape(-1), accumulate)
    return y.reshape(input.shape)


@handles("sum_to_size", "Tensor")
def sum_to_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum over those dims along which a smaller tensor would be expanded: the adjoint of that."""
    x = args[0]
    shape = shape_of(func, x, args[1:], kwargs)
    more = x.dim() - len(shape)
    dims = [dim for dim in range(x.dim()) if dim < more or shape[dim - more] != x.shape[dim]]
    return x.sum(dims, keepdim=True).reshape(shape) if dims or not shape else x


@handles("linspace logspace", "torch")
def between_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor: the values of tensors without dims come to every worker."""

    def value(one: torch.Tensor) -> Any:
        if one.dim():
            raise RuntimeError(f"{func.__name__} needs numbers and tensors without dims; got one with {one.dim()}")
        return one.item()

    given, named = map_tensors((args, kwargs), value)
    return func(*given, **named)


@handles("kron", "torch Tensor")
@by_name
def kron(func: Any, input: Any, other: Any) -> Any:
    """Each element of a tensor times all of another."""
    judged(func, (input, other), {})
    dims = max(input.dim(), other.dim())
    outer, inner = ([1] * (dims - one.dim()) + list(one.shape) for one in (input, other))
    first = input.reshape([n for pair in zip(outer, [1] * dims, strict=True) for n in pair])
    second = other.reshape([n for pair in zip([1] * dims, inner, strict=True) for n in pair])
    return (first * second).reshape([n * m for n, m in zip(outer, inner, strict=True)])


@handles("block_diag", "torch")
def block_diag(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Matrices along a diagonal, with zeros beside them."""
    judged(func, args, kwargs)
    matrices = [torch.atleast_2d(one) for one in args]
    ends = list(accumulate((one.shape[1] for one in matrices), initial=0))
    places = zip(matrices, pairwise(ends), strict=True)
    return torch.cat([functional.pad(one, (start, ends[-1] - stop)) for one, (start, stop) in places])


@handles("multi_dot chain_matmul", "torch linalg")
def chain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product of matrices, in the cheapest order; the first and the last may be vectors."""
    judged(func, args, kwargs)
    given = list(args) if func is torch.chain_matmul else list(*args, *kwargs.values())
    matrices = list(given)
    matrices[0] = given[0] if given[0].dim() > 1 else given[0].unsqueeze(0)
    matrices[-1] = given[-1] if given[-1].dim() > 1 else given[-1].unsqueeze(1)
    y = _product(matrices) if len(matrices) > 1 else matrices[0].clone()
    y = y if given[-1].dim() > 1 else y.squeeze(1)
    return y if given[0].dim() > 1 else y.squeeze(0)


def _product(matrices: Sequence[Any]) -> Any:
    if len(matrices) == 1:
        return matrices[0]
    _, cut = _cheapest((*(one.shape[0] for one in matrices), matrices[-1].shape[1]))
    return _product(matrices[:cut]) @ _product(matrices[cut:])


@lru_cache(1024)
def _cheapest(sizes: tuple[int, ...]) -> tuple[int, int]:
    """How much a product of matrices costs, and behind how many of them it is cut.

    Args:
        sizes: the rows of each matrix, and the columns of the last.
    """
    ways = (
        (_cheapest(sizes[: cut + 1])[0] + _cheapest(sizes[cut:])[0] + sizes[0] * sizes[cut] * sizes[-1], cut)
        for cut in range(1, len(sizes) - 1)
    )
    return min(ways, default=(0, 0))


@handles("vander", "linalg")
@by_name
def powers(func: Any, x: Any, N: int | None = None) -> Any:
    """Rows of powers of each element, from the zeroth on."""
    judged(func, (x,), {"N": N})
    x = x if x.dim() else x.reshape(1)  # (as torch does)
    count = x.shape[-1] if N is None else N
    x = (x if x.is_floating_point() or x.is_complex() else x.long()).unsqueeze(-1)
    others = x.expand(*x.shape[:-1], count - 1).cumprod(-1)
    return torch.cat([torch.ones_like(x), others], -1)


@handles("vander", "torch")
@by_name
def powers_from_the_last(func: Any, x: Any, N: int | None = None, increasing: bool = False) -> Any:
    """The same of a vector, down to the zeroth, or up as an option says."""
    judged(func, (x, N, increasing), {})
    count = x.shape[0] if N is None else N
    x = x.long() if x.dtype is torch.bool else x
    y = torch.linalg.vander(x, N=max(count, 2))[:, :count]
    return y.clone() if increasing else y.flip(1)


@handles("pdist", "torch functional")
@by_name
def pdist(func: Any, input: Any, p: float = 2.0) -> Any:
    """The distances of rows from the rows behind them."""
    judged(func, (input, p), {})
    if input._context.comm.imagined:  # (where nobody knows how many elements a mask chooses)
        return NotImplemented
    if input.dtype in HALVES:
        func(torch.zeros(min(len(input), 2), 1, dtype=input.dtype, device=input.device))  # (for torch's error)
    distances = torch.cdist(input, input, p, "donot_use_mm_for_euclid_dist")
    return distances[torch.ones_like(distances, dtype=torch.bool).triu(1)].to(input.dtype)


def linear_cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The linear map and then the loss. (In chunks, as options say, torch saves memory that blocks do not take.)"""
    return composite(func)(*args, **{**kwargs, "options": None})


if hasattr(functional, "linear_cross_entropy"):
    TABLE[functional.linear_cross_entropy] = linear_cross_entropy


@handles("broadcast_tensors", "torch")
def broadcast_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    tensors = one_by_one(args)
    shape = tuple(torch.broadcast_shapes(*(one.shape for one in tensors)))
    return tuple(expanded(one, shape) for one in tensors)


@handles("local_response_norm", "functional")
@by_name
def local_response_norm(
    func: Any, input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Any:
    """Divide by a power of the mean square over neighbouring channels."""
    if input.dim() < 3:
        raise ValueError(f"Expected 3D or higher dimensionality input (got {input.dim()} dimensions)")
    channels, margins = input.shape[1], (size // 2, (size - 1) // 2)
    squares = input * input
    if input.dim() > 3:  # (which torch averages by its pooling of volumes)
        squares = widened(squares, ("cpu",))
    squares = functional.pad(squares, (*[0, 0] * (input.dim() - 2), *margins))
    mean: Any = sum(squares.narrow(1, first, channels) for first in range(size)) / size
    return input / (mean * alpha + k).pow(beta)


@handles("max_unpool1d max_unpool2d max_unpool3d", "functional")
@by_name
def max_unpooling(
    func: Any,
    input: Any,
    indices: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    output_size: Any = None,
) -> Any:
    """Put each value into the cell of its plane that its index says; planes are whole meanwhile."""
    dims = int(func.__name__[-2])
    kernel, margins = _each(kernel_size, dims), _each(padding, dims)
    steps = kernel if stride is None else _each(stride, dims)
    if output_size is not None and len(output_size) > dims:
        output_size = output_size[-dims:]
    extents: Any = getattr(functional, "_unpool_output_size")  # noqa: B009 (torch does not export it)
    with uncounted():
        size = extents(torch.empty(input.shape, device="meta"), kernel, steps, margins, output_size)
    if indices.shape != input.shape:
        raise RuntimeError(
            f"Expected shape of indices to be same as that of the input tensor ({list(input.shape)}) but got "
            f"indices tensor with shape: {list(indices.shape)}"
        )
    values = input.flatten(-dims)
    y = values.new_zeros((*values.shape[:-1], prod(size)))
    return y.scatter(-1, indices.flatten(-dims), values).unflatten(-1, tuple(size))


def _each(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)


def _reduced(losses: Any, reduction: str, average: Any, reduce: Any) -> Any:
    return {"none": lambda: losses, "mean": losses.mean, "sum": losses.sum}[reduction_of(average, reduce, reduction)]()


@handles("triplet_margin_loss", "functional")
@by_name
def triplet_margin_loss(
    func: Any,
    anchor: Any,
    positive: Any,
    negative: Any,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    if not anchor.dim() == positive.dim() == negative.dim():
        raise RuntimeError(
            f"The anchor, positive, and negative tensors are expected to have the same number of dimensions, but "
            f"got: anchor {anchor.dim()}D, positive {positive.dim()}D, and negative {negative.dim()}D inputs"
        )
    near = functional.pairwise_distance(anchor, positive, p, eps)
    far = functional.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, functional.pairwise_distance(positive, negative, p, eps))
    return _reduced((near - far + margin).clamp_min(0), reduction, size_average, reduce)


@handles("cosine_embedding_loss", "functional")
@by_name
def cosine_embedding_loss(
    func: Any,
    input1: Any,
    input2: Any,
    target: Any,
    margin: float = 0,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if target.dim() + 1 != input1.dim() or target.dim() + 1 != input2.dim():
        raise RuntimeError(
            f"{target.dim()}D target tensor expects {target.dim() + 1}D input tensors, but found inputs with sizes "
            f"{list(input1.shape)} and {list(input2.shape)}."
        )
    dot, first, second = ((a * b).sum(-1) for a, b in ((input1, input2), (input1, input1), (input2, input2)))
    cosine = dot / ((first + 1e-12) * (second + 1e-12)).sqrt()
    alike, unlike = (target == 1).to(cosine.dtype), (target == -1).to(cosine.dtype)
    losses = alike * (1 - cosine) + unlike * (cosine - margin).clamp_min(0)
    return _reduced(losses, reduction, size_average, reduce)


@handles("affine_grid", "functional")
@by_name
def affine_grid(func: Any, theta: Any, size: Any, align_corners: bool | None = None) -> Any:
    """The points of an affine map: the cells of a grid that every worker has, times its matrices."""
    judged(func, (theta, list(size), bool(align_corners)), {})
    space = [int(n) for n in size[2:]]
    lines = [_cells(n, bool(align_corners), theta) for n in space]
    places = torch.stack([*reversed(torch.meshgrid(lines, indexing="ij")), lines[0].new_ones(space)], -1)
    points: Any = torch.matmul(places.flatten(0, -2), theta.transpose(1, 2))
    return points.unflatten(1, space)


def _cells(count: int, align_corners: bool, like: Any) -> torch.Tensor:
    """Where cells lie between -1 and 1: the first and the last on these, or half a cell inside."""
    if count == 1:
        return torch.zeros(1, dtype=like.dtype, device=like.device)
    line = torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device)
    return line if align_corners else line * (count - 1) / count


@handles("cov corrcoef", "torch Tensor")
@by_name
def covariance(func: Any, input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """How rows vary together."""
    if input.dim() != 2 or input.shape[0] < 2 or input.shape[1] <= correction:
        return NotImplemented
    if fweights is not None or aweights is not None or not (input.is_floating_point() or input.is_complex()):
        return NotImplemented
    centred = input - input.mean(1, keepdim=True)
    products = centred @ centred.mH / (input.shape[1] - correction)
    if func.__name__ == "cov":
        return products
    sizes = products.diagonal().real.sqrt()
    found = products / sizes.unsqueeze(1) / sizes
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)


@handles("norm_except_dim", "torch")
@by_name
def norm_except_dim(func: Any, v: Any, pow: int = 2, dim: int = 0) -> Any:
    """The norm over all dims but one, or over all of them."""
    if dim == -1:
        return v.norm(pow)
    judged(func, (v, pow, dim), {})
    others = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    return torch.linalg.vector_norm(v, pow, others, keepdim=True)


@handles("_weight_norm", "torch")
@by_name
def weight_norm(func: Any, v: Any, g: Any, dim: int = 0) -> Any:
    return v * (g / torch.norm_except_dim(v, 2, dim))
