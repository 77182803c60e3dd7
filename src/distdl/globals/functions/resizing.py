"""Pooling and interpolation of global tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from distdl.geometry.windows import PoolSliding
from distdl.globals.fallback import fall_back
from distdl.globals.functions.applying import apply, hashable, single, widened
from distdl.globals.functions.judging import frozen, judge, judged, rough
from distdl.globals.nested import map_tensors
from distdl.globals.table import by_name, composite, handles
from distdl.globals.tensor import GlobalTensor
from distdl.ops.adaptive_pooling import AdaptiveAverage, AdaptiveMaximum
from distdl.ops.interpolation import Interpolation
from distdl.ops.pooling import Average, Maximum, Pooling, Power
from distdl.ops.resampling import Mode
from distdl.tensors.dtypes import without_autocast

_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # a function, and its arguments


def _space_of(func: Any) -> int:
    """The dims of space that a function's name tells: ``max_pool2d`` has two."""
    return int(next(letter for letter in func.__name__ if letter.isdigit()))


def _batched(input: Any, call: _Call, pool: Callable[[GlobalTensor], Any]) -> Any:
    """Pool a tensor that may have no batch.

    Raises: of one of other dims, what torch raises. (Of tensors without memory, that has other texts.)
    """
    space = _space_of(call[0])
    if input.dim() == space + 2:
        return pool(input)
    if input.dim() != space + 1:
        func, *given = call
        args, kwargs = map_tensors(given, lambda one: torch.zeros((), dtype=one.dtype).expand(one.shape))
        func(*args, **kwargs)
        raise RuntimeError(f"Expected {space + 1}D or {space + 2}D input to a pooling, got {list(input.shape)}")
    y = pool(input.unsqueeze(0))
    return tuple(one.squeeze(0) for one in y) if isinstance(y, tuple) else y.squeeze(0)


def _pooled(
    call: _Call,
    input: GlobalTensor,
    reduction: Any,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
) -> Any:
    space, name = _space_of(call[0]), call[0].__name__
    if not isinstance(ceil_mode, bool):
        raise TypeError(f"{name}() needs ceil_mode to be True or False; got {ceil_mode!r}")
    if bool in map(type, (kernel, stride, padding, dilation)):
        raise TypeError(f"{name}(): kernel_size, stride, padding and dilation must be ints or tuples of them, not bool")
    stride = kernel if stride is None or stride == [] or stride == () else stride
    key = (reduction, *hashable((kernel, stride, padding, dilation)), ceil_mode)

    def op() -> Pooling:
        judge(*call)
        sliding = PoolSliding.of(name, space, *map(single, key[1:5]))
        made = Pooling(reduction, replace(sliding, ceil_mode=ceil_mode))
        made.check(name)
        accepted: Pooling = _accepting(made, made.least, input)
        return accepted

    return _batched(input, call, lambda x: apply(op, key, x, name))


def _accepting(op: Any, least: Sequence[int], x: GlobalTensor) -> Any:
    """A pooling, of which torch's operator takes tensors of this dtype.

    Raises: what torch raises, on every worker, if it does not.
    """
    if not x._block.is_meta:
        op.sample(torch.zeros(tuple(least), dtype=x.dtype, device=x.device))
    return op


@handles(
    "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices",
    "torch functional",
)
def max_pooling(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each worker completes its block by the cells that its windows read."""

    def run(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        indices = return_indices or func.__name__.endswith("indices")
        call = func, args, kwargs
        return _pooled(call, input, Maximum(indices), kernel_size, stride, padding, dilation, ceil_mode)

    return run(*args, **kwargs)


@handles("avg_pool1d avg_pool2d avg_pool3d", "torch functional")
def average_pooling(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        reduction = Average(count_include_pad, divisor_override)
        return _pooled((func, args, kwargs), input, reduction, kernel_size, stride, padding, 1, ceil_mode)

    return run(*args, **kwargs)


@handles("lp_pool1d lp_pool2d lp_pool3d", "functional")
def power_pooling(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(input: Any, norm_type: Any, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Any:
        if isinstance(norm_type, torch.Tensor):  # (that is learned)
            return composite(func)(*args, **kwargs)
        call = func, args, kwargs
        return _pooled(call, input, Power(norm_type), kernel_size, stride, 0, 1, ceil_mode)

    return run(*args, **kwargs)


@handles("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", "torch functional")
@by_name
def adaptive_average_pooling(func: Any, input: Any, output_size: Any) -> Any:
    space = _space_of(func)
    op = AdaptiveAverage(_extents(space, output_size))
    if input.dim() > space + 2 > 3 and set(op.extents) == {1}:  # (torch takes a mean, and looks at no other dim)
        return input.mean(tuple(range(-space, 0)), keepdim=True)
    return _adaptive(func, input, output_size, op)


@handles(
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d_with_indices "
    "adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices",
    "torch functional",
)
@by_name
def adaptive_max_pooling(func: Any, input: Any, output_size: Any, return_indices: bool = False) -> Any:
    # (torch.adaptive_max_pool1d always gives both)
    indices = bool(return_indices) or func.__name__.endswith("indices") or func is torch.adaptive_max_pool1d
    op = AdaptiveMaximum(_extents(_space_of(func), output_size), indices)
    return _adaptive(func, input, output_size, op)


def _adaptive(func: Any, input: Any, output_size: Any, op: AdaptiveAverage | AdaptiveMaximum) -> Any:
    call: _Call = (func, (input, output_size), {})

    def accepted(x: GlobalTensor) -> Any:
        taken = _accepting(op, (1,) * x.dim(), x)
        judge(*call)
        return taken

    key = op, frozen(output_size)
    return _batched(input, call, lambda x: apply(lambda: accepted(x), key, x, func.__name__))


def _extents(space: int, output_size: Any) -> tuple[int | None, ...]:
    sizes = (output_size,) * space if output_size is None or isinstance(output_size, int) else tuple(output_size)
    sizes = sizes * space if len(sizes) == 1 else sizes
    if len(sizes) != space:
        raise RuntimeError(f"adaptive pooling in {space} dims needs an output_size of {space}; got {output_size}")
    return sizes


@handles("interpolate", "functional")
def interpolation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each worker completes its block by the cells that its outputs read."""

    def run(
        input: Any,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        antialias: bool = False,
    ) -> Any:
        options = (size, scale_factor, mode, align_corners, recompute_scale_factor)

        def check() -> None:
            """Let torch check the options. (That cells come out is checked apart.)"""

            def ask() -> bool:
                # (of no samples, torch's own check of nearest ones raises another error, without memory alone)
                shape = (*(max(n, 1) for n in input.shape[:1]), *input.shape[1:])
                one = torch.empty(shape, dtype=input.dtype, device="meta")
                return judge(lambda x: torch.nn.functional.interpolate(x, *options), (one,), {})

            try:
                input._context.keep(("interpolate", rough(input.shape), input.dtype, frozen(options)), ask)
            except ZeroDivisionError:  # (of tensors without memory, torch divides by what factors give)
                _check_cells(input, _scaled(input, scale_factor))
                raise

        if mode == "area" and not antialias:
            check()
            return _area(input, size, scale_factor)
        input = widened(input, ("cuda",))
        is_rounded = input.dtype is torch.uint8 and mode in ("bilinear", "bicubic")  # (after each dim, by integers)
        if (size is None) == (scale_factor is None) or is_rounded:
            return fall_back(func, args, kwargs)
        if antialias:
            if input.dim() != 4 or input.dtype not in (torch.float32, torch.float64):
                return fall_back(func, args, kwargs)  # (for torch's error, and other dtypes)
            size = tuple(map(int, size)) if isinstance(size, (tuple, list)) else size
            given = {"mode": mode, "align_corners": align_corners, "recompute_scale_factor": recompute_scale_factor}
            judged(func, (input, size, scale_factor), {"antialias": True, **given})
            return _filtered(func, input, size, scale_factor, given)
        space, factors = input.dim() - 2, scale_factor
        if size is not None:
            size = (size,) * space if isinstance(size, int) else tuple(map(int, size))
        elif recompute_scale_factor:
            check()
            size, factors = _scaled(input, factors), None
        if size is not None:
            _check_cells(input, size)  # (of tensors without memory, torch divides by it)

        def op() -> Interpolation:
            check()
            if size is None:
                _check_cells(input, _scaled(input, factors))
            chosen = Mode.of("interpolate", space, mode, align_corners, factors)
            return Interpolation(chosen, None if size is None else (*input.shape[:2], *size))

        key = (size, hashable(factors), mode, align_corners, recompute_scale_factor)
        return apply(op, (key, tuple(input.shape[:2])), input, "interpolate")

    return run(*args, **kwargs)


def _filtered(func: Any, input: Any, size: Any, factors: Any, given: dict[str, Any]) -> Any:
    """Filter along rows and columns: products with matrices, which are what torch makes of those of ones.

    (So nan and inf reach all of their row and column, and in torch only what is near them.)
    """
    y: Any = input
    for dim in (3, 2):
        ones = torch.eye(input.shape[dim], dtype=input.dtype, device=input.device)[None, None]
        if size is None:
            factor = factors[dim - 2] if isinstance(factors, (list, tuple)) else factors
            matrix = func(ones, scale_factor=(factor, 1.0), antialias=True, **given)[0, 0]
        else:
            count = size[dim - 2] if isinstance(size, tuple) else int(size)
            matrix = func(ones, size=(count, input.shape[dim]), antialias=True, **given)[0, 0]
        with without_autocast(input.device):  # (torch casts nothing for it)
            y = torch.matmul(y, matrix.mT) if dim == 3 else torch.matmul(matrix, y)
    return y


def _area(input: GlobalTensor, size: Any, scale_factor: Any) -> Any:
    pool: Any = getattr(torch.nn.functional, f"adaptive_avg_pool{input.dim() - 2}d")
    return pool(input, _scaled(input, scale_factor) if size is None else size)


def _scaled(input: GlobalTensor, factors: Any) -> tuple[int, ...]:
    """The sizes of an input times factors: one for each dim of space, or for all."""
    listed = factors if isinstance(factors, (list, tuple)) else [factors] * (input.dim() - 2)
    return tuple(int(n * f) for n, f in zip(input.shape[2:], listed, strict=True))


def _check_cells(input: GlobalTensor, size: tuple[int, ...]) -> None:
    """Check that interpolation gives cells.

    Raises: RuntimeError, as torch does.
    """
    if min(size, default=1) < 1:
        raise RuntimeError(
            f"Input and output sizes should be greater than 0, but got input {tuple(input.shape[2:])} output {size}"
        )
