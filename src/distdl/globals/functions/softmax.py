r"""Softmax and logsumexp over dims of a global tensor, which may be split.

Each worker computes the maximum m of its block along the dims, and the sum s of :math:`e^{x - m}`. The workers along
the dims gather these two numbers, and need nothing else of each other.
"""

from __future__ import annotations

from math import inf, prod
from typing import Any

import torch

from distdl.globals.functions.reductions import (
    dims_of,
    gather_entries,
    reduced_layout,
    reduced_shape,
    split_along,
    sum_over,
    without_dims,
)
from distdl.globals.rules.meta_checks import check_dtype
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.tensors.connection import always_curved, local
from distdl.tensors.dtypes import HALVES


def _exponential_sums(
    x: GlobalTensor, dims: tuple[int, ...], name: str, everywhere: bool, bounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum m along the dims, and the sum of ``exp(x - m)``, both with extent 1 along the dims.

    Args:
        everywhere: all workers along the dims get them; else only those that have cells of the reduced layout.
        bounded: an infinite m counts as 0. Then logsumexp is infinite; without this, softmax is nan.
    """
    layout, block = x._layout, block_of(x)
    shape, least = reduced_shape(layout, dims), (1,) * x.dim()

    def shift(top: torch.Tensor) -> torch.Tensor:
        """What to subtract: 0 for a block of minus infinities, which adds nothing but would give nan."""
        return top.masked_fill(top.isinf() if bounded else top == -inf, 0)

    def measure(one: torch.Tensor) -> torch.Tensor:
        top = one.detach().amax(dims, keepdim=True)
        return torch.stack([top, (one - shift(top)).exp().sum(dims, keepdim=True)])

    states = gather_entries(local(measure, (2, *shape), (block, least)), layout, dims, name, everywhere, kinds=2)
    if not (layout.active if everywhere else reduced_layout(layout, dims).active):
        return states[0], states[1]
    tops, sums = states
    tops = tops.detach()
    top = tops.amax(dims, keepdim=True)
    top = top.masked_fill(top.isinf(), 0) if bounded else top
    parts = (shift(tops) - top).exp().masked_fill(tops == -inf, 0)
    return top, (sums * parts).sum(dims, keepdim=True)


@handles("softmax log_softmax softmin", "torch Tensor functional special")
@by_name
def softmax(func: Any, input: Any, dim: Any = None, *rest: Any, dtype: Any = None, _stacklevel: int = 3) -> Any:
    """Softmax, log softmax or softmin over a dim. If it is split, two numbers for each line of each block move."""
    name = func.__name__.removeprefix("special_")
    for one in rest:
        dtype = one if isinstance(one, torch.dtype) else dtype
    if dim is None:
        dim = 0 if input.dim() in (0, 1, 3) else 1
    x = -input if name == "softmin" else input  # before the conversion, as in torch: unsigned integers wrap around
    x = x if dtype is None else x.to(dtype)
    dims, layout = dims_of(x, dim), x._layout
    own = torch.log_softmax if name == "log_softmax" else torch.softmax
    at = dims[0] if dims else 0
    check_dtype(lambda one: own(one, at), x)
    if not x.is_floating_point():  # raises torch's error, also on workers without cells
        own(torch.zeros((1,) * x.dim(), dtype=x.dtype), at)
    if not split_along(layout, dims) or not x.numel():
        block = block_of(x)
        return GlobalTensor._of(own(block, at), layout)
    if x.dtype in HALVES:  # computed in float32, as in torch; on a GPU, autocast returns float32
        return own(x.float(), dim).to(own(block_of(x).new_zeros(()), 0).dtype)
    top, sums = _exponential_sums(x, dims, name, everywhere=True)
    block = block_of(x)
    if not layout.active:
        y = always_curved(block + top.reshape(layout.local) + sums.reshape(layout.local), sums)
    elif name == "log_softmax":
        y = block - top - sums.log()
    else:
        y = (block - top).exp() / sums
    return GlobalTensor._of(y, layout)


@handles("logsumexp", "torch Tensor special")
@by_name
def logsumexp(func: Any, input: Any, dim: Any, keepdim: bool = False) -> Any:
    """The logarithm of the sum of exponentials over dims."""
    x = input if input.is_floating_point() or input.is_complex() else input.to(torch.get_default_dtype())
    dims, layout = dims_of(x, dim), x._layout
    if isinstance(dim, (tuple, list)) and not dim:
        # raises torch's error: torch takes no dims for all dims, and then fails without keepdim
        func(torch.zeros((1,) * x.dim(), dtype=x.dtype), dim, keepdim)
    if not prod(x.shape[one] for one in dims):
        return sum_over(x, dims, keepdim) - inf
    if x.is_complex() and split_along(layout, dims):
        top = x.real.detach().amax(dims, True)
        top = top.masked_fill(top.isinf(), 0)
        y = (x - top).exp().sum(dims, True).log() + top
        return y if keepdim else without_dims(y, dims)
    target = reduced_layout(layout, dims)
    if split_along(layout, dims):
        top, sums = _exponential_sums(x, dims, "logsumexp", everywhere=False, bounded=True)
        block = top.reshape(target.local) + local(torch.log, target.local, (sums, (1,)))
    else:
        at = dims or (0,)
        block = local(lambda one: one.logsumexp(at, bool(dims)), target.local, (block_of(x), (1,) * x.dim()))
    y = GlobalTensor._of(block, target)
    return y if keepdim else without_dims(y, dims)
