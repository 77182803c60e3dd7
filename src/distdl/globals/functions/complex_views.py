"""Views between complex and real numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.globals.functions.shapes import view_of, with_whole_dims
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.rules.meta_checks import result_shape
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import handles, handles_property
from distdl.globals.views.strides import View, offset_of


@handles("view_as_real", "torch")
def view_as_real(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """View complex numbers as pairs of real ones along a new last dim, which is not split."""
    (x,) = (*args, *kwargs.values())
    layout: KnownLayout = x._layout

    def make() -> KnownLayout:
        return layout.context.layout(layout.partition.workers[..., None], [*layout.intervals, ((0, 2),)])

    target = layout.context.keep(("view_as_real", layout), make)
    return view_of(x, func(block_of(x)).reshape(target.local), target, False, _real_view(func))


def _real_view(func: Callable[..., Any]) -> View:
    """How a function takes a view of real numbers of a complex tensor, whose strides count them."""

    def view(whole: torch.Tensor) -> Any:
        return func(torch.empty_strided(whole.shape, whole.stride(), dtype=torch.complex64, device="meta"))

    return View(("of numbers", func), view)


@handles("real imag conj", "torch Tensor")
def parts_of_numbers(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views of real parts, imaginary parts or conjugates. Of a real tensor, the tensor itself, where torch does so."""
    (x,) = (*args, *kwargs.values())
    block = block_of(x)
    y = func(block)
    if y is block:
        return x
    alike = y.dtype == block.dtype
    return view_of(x, y, x._layout, False, View("conj", torch.conj) if alike else _real_view(func))


handles_property("real", "imag")(parts_of_numbers)


@handles("view_as_complex", "torch")
def view_as_complex(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """View pairs of real numbers along the last dim as complex ones. Blocks of other strides are copied."""
    (x,) = (*args, *kwargs.values())
    result_shape(func, x, (), {})  # raises torch's error
    if offset_of(x) % 2:
        raise RuntimeError("Tensor must have a storage_offset divisible by 2")
    dims = x.dim()
    y: GlobalTensor = with_whole_dims(x, [dims - 1], "view_as_complex")
    layout: KnownLayout = y._layout

    def make() -> KnownLayout:
        return layout.context.layout(layout.partition.workers[..., 0], layout.intervals[:-1])

    target = layout.context.keep(("view_as_complex", layout), make)
    block = block_of(y)
    if not layout.active:  # all dims of this block are empty, also the last one
        block = block.reshape((*target.local, 2))
    elif block.stride(-1) != 1 or any(n % 2 for n in (block.storage_offset(), *block.stride()[:-1])):
        # torch also looks at the strides of dims of extent 1, which contiguous() leaves as they are
        block = torch.empty_like(block, memory_format=torch.contiguous_format).copy_(block)
    return view_of(x, func(block), target, y is not x, View("view_as_complex", torch.view_as_complex))
