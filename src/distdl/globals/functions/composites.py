"""Functions that are computed by calls of other functions, which have handlers of their own."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.functions.losses import reduction_of
from distdl.globals.functions.pointwise import elementwise
from distdl.globals.functions.shapes import expanded
from distdl.globals.moving.writes_into_plain import write_into_plain
from distdl.globals.rules.applying import as_list, autocast_dtype, cast_to
from distdl.globals.rules.meta_checks import check_once, result_shape
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import TABLE, Handler, by_name, composite, handles
from distdl.globals.views.aliasing import write_back
from distdl.tensors.connection import zeros_on
from distdl.tensors.modes import uncounted
from distdl.tensors.private_torch import unpool_output_size


def rebuilt(func: Any, **names: Any) -> Handler:
    """A handler that runs torch's own Python code, in which the functions that it calls are handled.

    Args:
        names: values for some of the names that the code uses.
    """
    run = composite(func, **names)
    return lambda func, args, kwargs: run(*args, **kwargs)


for _function in (
    functional.gaussian_nll_loss, functional.local_response_norm, functional.lp_pool1d, functional.lp_pool2d,
    functional.lp_pool3d, functional.multilabel_soft_margin_loss, functional.triplet_margin_with_distance_loss,
    torch.Tensor.__reversed__, torch.unravel_index,
):  # fmt: skip
    TABLE[_function] = rebuilt(_function)
TABLE[torch.clip_] = elementwise


@handles("tril_ triu_ cumsum_ cumprod_ addmm_ baddbmm_", "Tensor")
def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute out of place, and write the result into the first argument."""
    x = args[0]
    if type(x) is not GlobalTensor:
        return write_into_plain(func, args, kwargs, x, (args, kwargs))
    check_once(func, args, kwargs)
    before = x.clone() if x.requires_grad else x  # a derivative may need the old values
    y = getattr(torch.Tensor, func.__name__.removesuffix("_"))(before, *args[1:], **kwargs)
    return write_back(x, y, func.__name__)


@handles("sum_to_size", "Tensor")
def sum_to_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The adjoint of expand: sum over the dims along which a tensor of the given shape is expanded to this one."""
    x = args[0]
    shape = result_shape(func, x, args[1:], kwargs)
    more = x.dim() - len(shape)
    dims = [dim for dim in range(x.dim()) if dim < more or shape[dim - more] != x.shape[dim]]
    return x.sum(dims, keepdim=True).reshape(shape) if dims or not shape else x


def linear_cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The linear map, then the loss. Options that save memory by chunks are ignored, because blocks are small."""
    return composite(func)(*args, **{**kwargs, "options": None})


if hasattr(functional, "linear_cross_entropy"):
    TABLE[functional.linear_cross_entropy] = linear_cross_entropy


@handles("broadcast_tensors", "torch")
def broadcast_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    tensors = as_list(args)
    shape = tuple(torch.broadcast_shapes(*(one.shape for one in tensors)))
    return tuple(expanded(one, shape) for one in tensors)


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
    """Scatter each value into its plane, at the place that its index names. A plane is whole on one worker."""
    check_once(func, (input, indices, kernel_size, stride, padding, output_size), {})
    dims = int(func.__name__[-2])

    def per_dim(value: Any) -> list[int]:
        return [value] * dims if isinstance(value, int) else list(value)

    kernel, margins = per_dim(kernel_size), per_dim(padding)
    steps = kernel if stride is None else per_dim(stride)
    if output_size is not None and len(output_size) > dims:
        output_size = output_size[-dims:]
    with uncounted():
        size = unpool_output_size(torch.empty(input.shape, device="meta"), kernel, steps, margins, output_size)
    values = input.flatten(-dims)
    y = values.new_zeros((*values.shape[:-1], prod(size)))
    return y.scatter(-1, indices.flatten(-dims), values).unflatten(-1, tuple(size))


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
    distance = partial(functional.pairwise_distance, p=p, eps=eps)
    wanted, call = reduction_of(size_average, reduce, reduction), functional.triplet_margin_with_distance_loss
    return call(anchor, positive, negative, distance_function=distance, margin=margin, swap=swap, reduction=wanted)


@handles("affine_grid", "functional")
@by_name
def affine_grid(func: Any, theta: Any, size: Any, align_corners: bool | None = None) -> Any:
    """Map the cell centres of an image, which every worker computes whole, by the affine matrices of each sample."""
    check_once(func, (theta, list(size), bool(align_corners)), {})
    space = [int(n) for n in size[2:]]
    centres = [_centres(n, bool(align_corners), theta) for n in space]
    places = torch.stack([*reversed(torch.meshgrid(centres, indexing="ij")), centres[0].new_ones(space)], -1)
    points: Any = torch.matmul(places.flatten(0, -2), theta.transpose(1, 2))
    return points.unflatten(1, space)


def _centres(count: int, align_corners: bool, like: Any) -> torch.Tensor:
    """The coordinates of cells between -1 and 1. With ``align_corners`` the outer ones are -1 and 1 themselves."""
    if count == 1:
        return torch.zeros(1, dtype=like.dtype, device=like.device)
    line = torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device)
    return line if align_corners else line * (count - 1) / count


@handles("cov corrcoef", "torch Tensor")
@by_name
def covariance(func: Any, input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """The covariance of rows, or their correlation. Weights, integers and too few columns fall back."""
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
    """The norm over all dims but one, or over all of them if dim is -1."""
    check_once(func, (v, pow, dim), {})
    others = [axis for axis in range(v.dim()) if dim == -1 or axis != dim % v.dim()]
    return torch.linalg.vector_norm(v, pow, others, keepdim=dim != -1)


@handles("_weight_norm", "torch")
@by_name
def weight_norm(func: Any, v: Any, g: Any, dim: int = 0) -> Any:
    return v * (g / torch.norm_except_dim(v, 2, dim))


@handles("prelu", "torch Tensor functional")
@by_name
def prelu(func: Any, input: Any, weight: torch.Tensor) -> Any:
    """The slope of negative elements is a weight for all of them, or one for each channel (dim 1)."""
    cast = autocast_dtype(input)
    if cast is not None:
        input, weight = (cast_to(one, cast) for one in (input, weight))
    check_once(func, (input, weight), {})  # raises torch's error
    if weight.numel() > 1 and input.dim() > 2:
        weight = weight.reshape(-1, *[1] * (input.dim() - 2))
    elif weight.numel() == 1:
        weight = weight.reshape(())
    return elementwise(_prelu, (input, weight), {})


def _prelu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``prelu`` of a block and weights that broadcast to it. A block without cells has the same derivatives."""
    return functional.prelu(x, weight.reshape(-1) if x.numel() else zeros_on(weight, (1,)))


@handles("glu", "functional")
@by_name
def glu(func: Any, input: Any, dim: int = -1) -> Any:
    """The first half along a dim times the sigmoid of the second."""
    result_shape(func, input, (dim,), {})  # raises torch's error
    first, gate = input.chunk(2, dim)
    return first * gate.sigmoid()
