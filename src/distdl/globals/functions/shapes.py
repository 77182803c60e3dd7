"""Functions that give a tensor another shape: permutations, reshapes and expansions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl.geometry.boxes import Shape
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.layouts.reshaping import plan_reshape
from distdl.globals.layouts.spreading import pencils
from distdl.globals.moving.alignment import aligned, block_in
from distdl.globals.rules.applying import as_list
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import as_key, result_shape
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.structures import map_tensors
from distdl.globals.tensor.table import TABLE, handles, handles_property
from distdl.globals.views.aliasing import note_copied, note_view
from distdl.globals.views.strides import (
    View,
    call_on_meta,
    is_copied,
    note_strides,
    same_strides,
    strides_of,
    whole_view,
)
from distdl.tensors.private_torch import variable_functions

# -- views, and whole dims, as other families need them, too


def view_of(
    x: GlobalTensor, block: torch.Tensor, layout: KnownLayout, came: bool, view: View | None = None
) -> GlobalTensor:
    """Make the result of a function that returns a view of x in torch.

    Args:
        block, layout: of the result.
        came: whether cells moved between workers, so that the result is a copy, and writes into it do not reach x.
        view: how torch takes the view of a whole tensor; None for a view of all of x in the same shape.
    """
    wants = x._block.requires_grad
    if block.requires_grad is not wants and not torch.is_grad_enabled():
        block = block.detach().requires_grad_(wants)  # torch's views do so without grad mode; copies have to
    y = GlobalTensor._of(block, layout, x._block)
    if view is None:
        same_strides(x, y)
    else:
        note_strides(x, y, view)
    if came:
        note_copied(x, y)
    else:
        note_view(x, y)
    return y


def with_whole_dims(x: GlobalTensor, dims: Sequence[int], name: str) -> GlobalTensor:
    """Redistribute a tensor so that the given dims are whole; other dims are split further instead."""
    needed = pencils(x._layout, dims)
    return x if needed is x._layout else GlobalTensor._of(block_in(x, needed, name), needed)


# -- the order of dims


@handles("permute transpose swapaxes swapdims movedim moveaxis t adjoint", "torch Tensor")
def permute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """Permute the dims; the axes of the partition are permuted alike, so nothing moves."""
    x, *rest = args
    layout: KnownLayout = x._layout
    if not layout.rulers and (func in _OF_MATRICES or (func in _ADJOINTS and not x.is_complex())):
        same: GlobalTensor = x  # as in torch, the tensor itself
        return same

    def make() -> KnownLayout:
        probe = torch.empty([2 + dim for dim in range(len(layout.rulers))], device="meta")  # extents tell the dims
        order = [n - 2 for n in func(probe, *rest, **kwargs).shape]
        workers = layout.partition.workers.transpose(order)
        return layout.context.layout(workers, [layout.intervals[dim] for dim in order])

    key = (func, as_key(rest), as_key(kwargs))
    target = layout.context.keep(("permute", layout, key), make)
    block = block_of(x)
    if layout.rulers:
        block = func(block, *rest, **kwargs)
    else:  # blocks of idle workers have a dim, so func would refuse them; a new view, whose gradient may differ
        block = block.conj() if func in _ADJOINTS else block.view_as(block)
    return view_of(x, block, target, False, View(key, lambda whole: func(whole, *rest, **kwargs)))


handles_property("T", "mT", "H", "mH")(permute)
_tensor: Any = torch.Tensor  # untyped, because its stubs do not show properties as descriptors
_ADJOINTS = (torch.adjoint, torch.Tensor.adjoint, _tensor.H.__get__, _tensor.mH.__get__)
_OF_MATRICES = (_tensor.mT.__get__,)


# -- reshapes


def reshaped(x: GlobalTensor, shape: Sequence[int], name: str = "reshape") -> GlobalTensor:
    """Reshape a tensor to a known shape of as many elements. Cells move where a worker's would not form a box.

    Args:
        name: of the function that asks; ``reshape``, ``flatten`` and ``ravel`` copy where torch's do, others view.
    Raises: RuntimeError, as torch does, for a view that torch could not take of the whole tensor.
    """
    layout, shape = x._layout, tuple(shape)
    copied = "_strides" in x.__dict__ and _is_copied(x, shape, name)
    if layout.extents == shape and not copied:
        return view_of(x, block_of(x).view_as(x._block), layout, False)
    needed, target = x._context.keep(("reshape", layout, shape), lambda: plan_reshape(layout, shape))
    block = block_of(x) if needed is None else block_in(x, needed, name)
    y = block.reshape(target.local)
    if copied:
        return GlobalTensor._of(y.clone() if _shares(y, x._block) else y, target)
    return view_of(x, y, target, needed is not None, View(shape, lambda whole: whole.reshape(shape)))


def _is_copied(x: GlobalTensor, shape: Shape, name: str) -> bool:
    """Whether torch's function of this name would copy a tensor with the strides of x.

    Raises: RuntimeError, as torch does, if ``view`` would have to copy.
    """
    if name == "view" and is_copied(x, shape):
        call_on_meta(x, "view", shape)
    return name in _MAY_COPY and bool(strides_of(x)) and (name == "ravel" or is_copied(x, shape))


_MAY_COPY = ("reshape", "flatten", "ravel")


def _shares(y: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether two plain tensors share memory."""
    return bool(y.untyped_storage()._cdata == x.untyped_storage()._cdata)


@handles("reshape view flatten unflatten ravel squeeze unsqueeze", "torch Tensor")
def reshape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshape; or, with a dtype, view the bits of the elements as another dtype of their size."""
    x, *rest = args
    if type(x) is not GlobalTensor:  # but one of the sizes is
        return func(x, *map_tensors(rest, int), **map_tensors(kwargs, int))
    dtype = next((value for value in (*rest, *kwargs.values()) if isinstance(value, torch.dtype)), None)
    if dtype is not None:
        if dtype.itemsize != x.dtype.itemsize:
            call_on_meta(x, "view", dtype)  # raises torch's error
            return fall_back(func, args, kwargs)
        return whole_view(x, block_of(x).view(dtype))
    shape = result_shape(func, x, rest, kwargs)
    if func.__name__ == "flatten" and tuple(shape) == x._layout.extents:
        return x
    return reshaped(x, shape, func.__name__)


@handles("view_as reshape_as", "Tensor")
def reshape_as(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Reshape to the shape of another tensor, whose values are not read."""
    x, other = (*args, *kwargs.values())
    y: torch.Tensor = x.view(other.shape) if func.__name__ == "view_as" else x.reshape(other.shape)
    return y


@handles("atleast_1d atleast_2d atleast_3d", "torch")
def atleast(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add dims of extent 1 to tensors that have too few; return others themselves."""
    least = int(func.__name__.removesuffix("d")[-1])
    found = tuple(
        reshaped(x, result_shape(func, x, (), {}), func.__name__)
        if type(x) is GlobalTensor and x.dim() < least
        else x
        if type(x) is GlobalTensor
        else func(x)
        for x in as_list(args)
    )
    return found[0] if len(args) == 1 and isinstance(args[0], torch.Tensor) else found


for _name in ("atleast_1d", "atleast_2d", "atleast_3d"):  # torch's functions call these for lists
    TABLE[getattr(variable_functions, _name)] = atleast


@handles("squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_", "Tensor")
def change_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """Change the shape of a tensor in place.

    Raises: RuntimeError for a leaf that requires a gradient, as torch does; without grad mode, for every tensor that
        requires one.
    """
    x, *rest = args
    name = func.__name__
    if x._block.requires_grad and torch.is_grad_enabled() and x._block.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if x._block.requires_grad and not torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} would change the shape of a global tensor that requires a gradient, where gradients are switched "
            f"off; use what x.{name.removesuffix('_')}(...) gives, or x.detach()"
        )
    y = getattr(torch.Tensor, name.removesuffix("_"))(x, *rest, **kwargs)
    x._block, x._layout, x._strides = y._block, y._layout, strides_of(y)
    same: GlobalTensor = x
    return same


# -- expansion along dims of extent 1


@handles("expand broadcast_to", "torch Tensor")
def expand(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Expand dims of extent 1 on the workers that hold them: a view without memory of its own, as in torch."""
    x, *rest = args
    kwargs.pop("implicit", None)
    return expanded(x, result_shape(func, x, rest, kwargs))


def expanded(x: Any, shape: Shape) -> Any:
    """Expand a tensor to a known shape. It may also be one that every worker has whole."""
    if type(x) is not GlobalTensor:
        return x.expand(shape)
    layout = x._layout
    lifted = layout.lifted(len(shape))

    def make() -> KnownLayout:
        intervals = [
            along if along[-1][1] == n else tuple((start * n, stop * n) for start, stop in along)
            for along, n in zip(lifted.intervals, shape, strict=True)
        ]
        return layout.context.layout(lifted.partition.workers, intervals)

    target = layout.context.keep(("expand", layout, shape), make)
    block = block_of(x).reshape(lifted.local).expand(target.local)
    return view_of(x, block, target, False, _expansion(shape))


def _expansion(shape: Shape) -> View:
    return View(("expand", shape), lambda whole: whole.expand(shape))


@handles("expand_as", "Tensor")
def expand_as(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Expand to the shape of another tensor, and to its layout if both are global."""
    x, other = (*args, *kwargs.values())
    if type(x) is not GlobalTensor or type(other) is not GlobalTensor:
        plain: torch.Tensor = x.expand(other.shape)
        return plain
    result_shape(torch.Tensor.expand, x, (tuple(other.shape),), {})  # raises torch's error
    target, (block, _) = aligned(x._context, [x, other.detach()], 1, "expand_as")
    return view_of(x, block.expand(target.local), target, True, _expansion(tuple(other.shape)))


# -- cells between channels and space


@handles("pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle", "torch functional")
def shuffle(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move cells from channels to space or back, or shuffle channels: compositions of reshape and permute."""
    x, n = (*args, *kwargs.values())
    name = func.__name__
    if name.endswith("channel_shuffle"):
        b, c, *space = x.shape
        if c % n:
            raise RuntimeError(f"Number of channels must be divisible by groups. Got {c} channels and {n} groups.")
        return x.reshape(b, n, c // n, *space).transpose(1, 2).reshape(x.shape)
    shape = result_shape(func, x, (n,), {})
    if n == 1:
        return x.clone(memory_format=torch.contiguous_format)
    *batch, c, h, w = x.shape
    k = len(batch)
    if name == "pixel_shuffle":
        y = x.reshape(*batch, c // n**2, n, n, h, w).permute(*range(k + 1), k + 3, k + 1, k + 4, k + 2)
    else:
        y = x.reshape(*batch, c, h // n, n, w // n, n).permute(*range(k + 1), k + 2, k + 4, k + 1, k + 3)
    return y.reshape(shape)
