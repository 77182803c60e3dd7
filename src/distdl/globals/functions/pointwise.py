"""Elementwise functions: torch's function of the blocks, once the operands lie on the same workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl.globals.moving.alignment import aligned, number, operands_without_dims
from distdl.globals.moving.writes_into_plain import write_into_plain
from distdl.globals.rules import number_parameters
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import plain_of
from distdl.globals.tensor.structures import map_tensors
from distdl.globals.tensor.table import TABLE, handles, name_of, named, writes
from distdl.globals.views.aliasing import check_writable, note_written
from distdl.globals.views.strides import has_format, keep_order, note_format, whole_view
from distdl.tensors.private_torch import parse_to_arguments

# names of functions in place stand here if torch has them as functions, too; methods in place are found by _enter_names
_NAMES = """
abs absolute acos arccos acosh arccosh add addcdiv addcmul angle asin arcsin asinh arcsinh atan arctan atanh arctanh
atan2 arctan2 bitwise_not bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift ceil clamp clip
clamp_min clamp_max conj_physical copysign cos cosh deg2rad div divide digamma erf erfc erfinv exp exp2 expm1
fix float_power floor floor_divide fmod frac frexp gcd lcm ldexp lerp lgamma log log10 log1p log2 logaddexp logaddexp2
logical_and logical_not logical_or logical_xor logit hypot i0 mul multiply mvlgamma nan_to_num neg negative nextafter
polygamma positive pow rad2deg reciprocal remainder resolve_conj resolve_neg round rsqrt sigmoid expit sign
sgn signbit sin sinc sinh sqrt square sub subtract rsub tan tanh true_divide trunc xlogy
eq ne lt le gt ge greater greater_equal less less_equal not_equal isclose isfinite isinf isnan isneginf isposinf
isreal maximum minimum fmax fmin heaviside complex polar relu relu6 elu selu celu gelu silu mish softplus softsign
softshrink hardshrink tanhshrink threshold leaky_relu logsigmoid hardtanh hardsigmoid hardswish
clone zeros_like ones_like full_like empty_like float double half bfloat16 bool cfloat cdouble type cpu cuda
neg_ exp_ log_ sqrt_ rsqrt_ clamp_ clamp_min_ clamp_max_ relu_ sigmoid_ tanh_ abs_ sin_ cos_ round_ floor_ ceil_
reciprocal_ square_ fill_ zero_ copy_ erf_ trunc_ frac_ expm1_ log1p_ log2_ log10_ nan_to_num_ leaky_relu_ elu_ selu_
celu_ hardtanh_ threshold_ xlogy_ cosh_ sinh_ tan_
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __div__ __rdiv__ __idiv__ __truediv__
__rtruediv__ __itruediv__ __floordiv__ __rfloordiv__ __ifloordiv__ __mod__ __rmod__ __imod__ __pow__ __rpow__ __ipow__
__neg__ __pos__ __abs__ __invert__ __and__ __rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__ __lshift__
__rlshift__ __ilshift__ __rshift__ __rrshift__ __irshift__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ entr erfcx i0e i1
i1e log_ndtr ndtr ndtri xlog1py zeta psi gammaln igamma igammac gammainc gammaincc multigammaln airy_ai bessel_j0
bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 chebyshev_polynomial_t chebyshev_polynomial_u
hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
"""


_RETURN_THEIR_ARGUMENT = frozenset([
    "positive", "resolve_conj", "resolve_neg", "cpu", "cuda", "float", "double", "half", "bfloat16", "bool", "cfloat",
    "cdouble", "type",
])  # fmt: skip


def elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function element by element; in place, if it writes into its first argument.

    The operands broadcast to each other as in torch. They come to the workers of the largest operand, or, if the
    function writes in place, to those of its first argument.
    """
    first = args[0] if args else None
    if type(first) is not GlobalTensor:
        return _align_and_apply(func, args, kwargs)
    if "_strides" in first.__dict__ and 0 in first._strides and writes(func, kwargs):
        check_writable(first, name_of(func))
    operands: Sequence[Any] = (first,)
    if len(args) == 1 and not kwargs:
        block = block_of(first)
        y = func(block)
        if type(y) is torch.Tensor and y is not block:
            made = GlobalTensor._of(y, first._layout, block)
        else:
            made = result_of(func, first, y, operands)
    elif _lie_alike(func, args, kwargs):
        blocks = [block_of(one) if type(one) is GlobalTensor else one for one in args]
        try:
            y = func(*blocks, **kwargs)
        except RuntimeError as error:
            if not _overlaps(error):
                raise
            y = _apply_to_clones(func, blocks, kwargs)
        made, operands = result_of(func, first, y, operands), args
    elif any(isinstance(one, torch.Tensor) for one in (*args[1:], *kwargs.values())):
        return _align_and_apply(func, args, kwargs)
    elif kwargs and kwargs.get("memory_format") is not None:
        return _in_format(func, first, args[1:], kwargs)
    else:
        made = result_of(func, first, func(block_of(first), *args[1:], **kwargs), operands)
    if "_strides" in first.__dict__:
        keep_order(operands, made, func)
    return made


def _align_and_apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an elementwise function to operands that broadcast to each other and may lie on different workers."""
    wanted = number_parameters.numbers_of(func)
    if wanted.places or wanted.names:  # torch reads these as numbers, and a worker without cells has no value
        args = tuple(number(x) if type(x) is GlobalTensor and at in wanted.places else x for at, x in enumerate(args))
        kwargs = {n: number(x) if type(x) is GlobalTensor and n in wanted.names else x for n, x in kwargs.items()}
        if GlobalTensor not in map(type, (*args, *kwargs.values())):
            return func(*args, **kwargs)
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
    operands = [*args, *(kwargs[name] for name in names)]
    global_operands = [one for one in operands if type(one) is GlobalTensor]
    context = global_operands[0]._context
    lead = 0 if writes(func, kwargs) else None
    if lead == 0 and not (args and type(args[0]) is GlobalTensor):
        return write_into_plain(func, args, kwargs, args[0] if args else None, (args, kwargs))
    target, parts = aligned(context, operands, lead, name_of(func))

    def arguments(values: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments and keyword arguments of the call, with these values in the places of its operands."""
        return values[: len(args)], {**kwargs, **dict(zip(names, values[len(args) :], strict=True))}

    local_args, local_kwargs = arguments(parts)
    try:
        y = func(*local_args, **local_kwargs)
    except (RuntimeError, TypeError) as error:
        if target.rulers or target.active:
            if not _overlaps(error):
                raise
            y = _apply_to_clones(func, local_args, local_kwargs)
        else:  # the result has no dims and lies elsewhere; torch wants numbers where this worker has empty tensors
            local_args, local_kwargs = arguments(operands_without_dims(context, operands, parts))
            y = func(*local_args, **local_kwargs).reshape(1)[:0]
            y = y if lead is None else parts[0].add_(y)
    made = result_of(func, global_operands[0], y, global_operands, target)
    keep_order(operands, made, func)
    return made


def _lie_alike(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call has several tensors, all global, by position and in one layout, so that it takes their blocks.

    It does not where torch wants a number in the place of a tensor: every worker needs that value. Nor does a worker
    without a block of tensors without dims.
    """
    layout = args[0]._layout
    if len(args) == 2 and not kwargs and layout.rulers:
        return type(args[1]) is GlobalTensor and args[1]._layout is layout
    places = [place for place, one in enumerate(args) if isinstance(one, torch.Tensor)]
    if len(places) < 2 or any(type(args[at]) is not GlobalTensor or args[at]._layout is not layout for at in places):
        return False
    if any(isinstance(one, torch.Tensor) for one in kwargs.values()):
        return False
    return bool(layout.rulers or layout.active) and number_parameters.numbers_of(func).places.isdisjoint(places)


def _overlaps(error: Exception) -> bool:
    """Whether torch's error says that a function reads memory which it writes."""
    return "input tensor and the written-to tensor refer to a single memory" in str(error)


def _apply_to_clones(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply a function in place, reading clones of the other blocks, which overlap with the one that it writes.

    Only workers whose blocks have cells there see torch's error. So the call is made to work on all of them.
    """
    clones = [one.clone() if isinstance(one, torch.Tensor) else one for one in args[1:]]
    return func(args[0], *clones, **kwargs)


def result_of(func: Callable[..., Any], like: GlobalTensor, y: Any, operands: Any, layout: Any = None) -> Any:
    """Make a block that a function has returned global; return the operand whose block it is, if it is one's.

    Args:
        like: the tensor whose layout the result has, if no layout is given.
        y: a block, or a structure of blocks.
        operands: the global tensors among the arguments. One that is returned counts as written, but for conversions.
    """
    for one in operands:
        if y is one._block:
            if name_of(func) not in _RETURN_THEIR_ARGUMENT:
                note_written(one, name_of(func))
            return one
    if isinstance(y, torch.Tensor):
        return GlobalTensor._of(y, like._layout if layout is None else layout, like._block)
    return map_tensors(y, lambda one: result_of(func, like, one, operands, layout))


def _in_format(func: Callable[..., Any], x: GlobalTensor, rest: Sequence[Any], kwargs: dict[str, Any]) -> GlobalTensor:
    """Apply a function with a memory format. It returns x itself only if the whole tensor, not just a block, has it."""
    block, wanted = block_of(x), kwargs["memory_format"]
    y = func(block, *rest, **kwargs)
    if y is block:
        if has_format(x, wanted, func):
            return x
        y = block.clone()
    made = GlobalTensor._of(y, x._layout)
    note_format(x, made, wanted)
    return made


def _enter_names() -> None:
    """Enter all elementwise functions, and the methods in place that go with them."""
    for name in _NAMES.split():
        try:
            for function in named(name):
                TABLE[function] = elementwise
        except LookupError:
            continue  # this version of torch does not have it
        if not name.endswith("_") and hasattr(torch.Tensor, f"{name}_"):
            TABLE.setdefault(getattr(torch.Tensor, f"{name}_"), elementwise)


_enter_names()


@handles("contiguous", "Tensor")
def contiguous(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """The tensor itself, or a copy: on every worker what torch would return for the whole tensor."""
    return _in_format(func, args[0], (), {"memory_format": torch.contiguous_format, **kwargs})


@handles("detach", "torch Tensor")
def detached(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """A view without a graph."""
    (x,) = args
    return whole_view(x, block_of(x).detach())


@handles("to type_as long int short char byte")
def convert(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert to another dtype or device, or to those of another tensor, whose values are not read."""
    x, *rest = args
    rest, kwargs = [_local(one) for one in rest], {name: _local(one) for name, one in kwargs.items()}
    if type(x) is not GlobalTensor:  # only the dtype is read: the result must not count as made from the block
        rest, kwargs = map_tensors((rest, kwargs), torch.Tensor.detach)
        return func(x, *rest, **kwargs)
    if kwargs.get("memory_format") is not None:
        return _in_format(func, x, rest, kwargs)
    y = func(block_of(x), *rest, **kwargs)
    if y is x._block:
        return x
    made = GlobalTensor._of(y, x._layout)
    keep_order((x,), made, func)
    return made


def parse_to(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dtype and device that ``module.to(x)`` reads."""
    return func(*map(_local, args), **{name: _local(one) for name, one in kwargs.items()})


TABLE[parse_to_arguments] = parse_to


def _local(value: Any) -> Any:
    """This worker's block of a global tensor, and the plain tensor of a replica. Other values as they are."""
    if type(value) is GlobalTensor:
        return value._block
    return plain_of(value) if isinstance(value, torch.Tensor) else value
