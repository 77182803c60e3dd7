"""Arguments that torch wants as numbers: sizes, dims, counts and offsets that a model gives as one-element tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from distdl.globals.functions.pointwise import elementwise
from distdl.globals.moving.alignment import number
from distdl.globals.rules.number_parameters import numbers_of
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import TABLE, Handler, named
from distdl.tensors.modes import uncounted
from distdl.tensors.private_torch import DisableTorchFunctionSubclass, nn_functions

# functions of one tensor, or of one list of tensors, whose other arguments are numbers
_ONE_TENSOR = """
    reshape view flatten unflatten squeeze unsqueeze permute transpose swapaxes swapdims movedim moveaxis expand
    broadcast_to repeat tile roll flip rot90 select narrow split chunk split_with_sizes hsplit vsplit dsplit unbind tril
    triu diagonal diag diagflat diag_embed new_zeros new_ones new_full new_empty one_hot topk kthvalue sort argsort sum
    mean prod amax amin argmax argmin cumsum cumprod unfold pad interpolate pixel_shuffle pixel_unshuffle
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d softmax log_softmax logsumexp var std cat concat stack
    as_strided avg_pool1d avg_pool2d avg_pool3d
"""
_TRANSFORMS = "fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn"
# operators that torch's Python functions call for a plain tensor; there only the numbers may be global
_COMPILED = """
    pad im2col col2im upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool2d adaptive_max_pool3d
"""
# functions without a tensor among their arguments
_NO_TENSOR = "zeros ones full empty eye"

# names of the arguments that are tensors, in functions of one tensor
_TENSORS = frozenset(["input", "tensor", "tensors"])
# types that are no tensors and hold none
_PLAIN = frozenset([int, float, bool, str, type(None), torch.dtype, torch.Size])


def _check_taken(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that torch takes tensors that require a gradient where it wants numbers. Few functions do.

    Raises: TypeError, on every worker, if it does not.
    """

    def without_values(one: torch.Tensor) -> torch.Tensor:
        if one.numel() == 1 and one.requires_grad:  # torch's functions in Python read the value of such a number
            return torch.ones(one.shape, dtype=one.dtype, requires_grad=True)
        return torch.empty(one.shape, dtype=one.dtype, device="meta")

    try:
        with uncounted():
            given, named = map_tensors((args, kwargs), without_values)
            func(*given, **named)
    except TypeError:
        raise
    except Exception:  # the samples lack values that torch may need
        return


def _requires_grad(value: Any) -> bool:
    """Whether a value is or holds a tensor that requires a gradient."""
    return any(one.requires_grad for one in tensors_in((value,)))


def _has_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a list that holds some."""
    if type(value) in (list, tuple):
        return not _PLAIN.issuperset(map(type, value)) and bool(tensors_in(value))
    return isinstance(value, torch.Tensor)


def with_numbers_at(handler: Handler, function: Callable[..., Any], one_tensor: bool = False) -> Handler:
    """A handler that gets the values of one-element tensors where torch's function wants numbers.

    Which arguments these are is read from the function's signatures at the first call, because that takes time.

    Args:
        function: whose signatures are read.
        one_tensor: whether all arguments but the first are numbers, so that no signature is needed.
    """

    @wraps(handler)
    def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count = len(args)
        places, names = (
            (range(1, count), kwargs.keys() - _TENSORS if kwargs else ()) if one_tensor else numbers_of(function)
        )
        found = [at for at in places if at < count and type(args[at]) not in _PLAIN and _has_tensors(args[at])]
        given = kwargs and [name for name in names if name in kwargs and _has_tensors(kwargs[name])]
        if not (found or given):
            return handler(func, args, kwargs)
        args = tuple(map_tensors(one, number) if at in found else one for at, one in enumerate(args))
        kwargs = {name: map_tensors(one, number) if name in given else one for name, one in kwargs.items()}
        if any(_requires_grad(args[at]) for at in found) or any(_requires_grad(kwargs[name]) for name in given):
            _check_taken(func, args, kwargs)
        is_split = GlobalTensor in map(type, tensors_in((args, kwargs)))
        return handler(func, args, kwargs) if is_split else func(*args, **kwargs)

    return run


def _new_tensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A new plain tensor, the same on every worker, whose sizes or values are given as tensors."""
    given, named = map_tensors((args, kwargs), number)
    with DisableTorchFunctionSubclass():  # torch raises its error where a tensor is left
        plain: torch.Tensor = func(*given, **named)
    return plain


def install() -> None:
    """Wrap the handlers in the table so that they get numbers, and enter one for functions of numbers alone.

    The handler of elementwise functions asks for numbers itself.
    """
    compiled = [*(getattr(nn_functions, name) for name in _COMPILED.split()), torch.affine_grid_generator]
    for function in compiled:
        TABLE.setdefault(function, TABLE[None])
    one_tensor = frozenset([*named(_ONE_TENSOR), *named(_TRANSFORMS, "fft"), *compiled])
    for function, handler in [*TABLE.items()]:
        if callable(function) and (function in one_tensor or handler is not elementwise):
            TABLE[function] = with_numbers_at(handler, function, function in one_tensor)
    for function in named(_NO_TENSOR, "torch"):
        TABLE[function] = _new_tensor
