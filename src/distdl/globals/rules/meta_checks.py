"""Let torch check arguments on meta tensors of the whole shapes, so that every worker raises torch's own errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch

from distdl.geometry.boxes import Shape
from distdl.globals.layouts.context import Context
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import map_tensors
from distdl.tensors.dtypes import RARE
from distdl.tensors.modes import uncounted
from distdl.tensors.recorders import as_one_call


def check_on_meta(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Let torch check the shapes and dtypes of whole tensors, and the options beside them. Returns True.

    If torch refuses meta tensors, it is asked again of expanded zeros, because some errors then have other texts.

    Args:
        func: a function of torch that reads no values of its arguments.
    Raises: on every worker the error that torch raises, before any message.
    """
    with uncounted():
        given, named = map_tensors((args, kwargs), lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"))
        try:
            func(*given, **named)
            return True
        except NotImplementedError:  # torch has no meta kernel
            raise
        except Exception as problem:
            refused = problem
        given, named = map_tensors((args, kwargs), lambda one: torch.zeros((), dtype=one.dtype).expand(one.shape))
        func(*given, **named)
    raise refused


def check_once(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], input: torch.Tensor | None = None,
    sized: Collection[int] = (),
) -> None:  # fmt: skip
    """Check arguments as :func:`check_on_meta` does, once for each combination of shapes, dtypes and options.

    Args:
        input: an argument of which torch looks at the sizes of some dims only, as :func:`rough_shape` says.
        sized: these dims.
    """
    found: list[Context] = []
    own = (input, sized)
    key = ("judged", func, _described(args, found, own), _described(kwargs, found, own) if kwargs else (), *sized)
    found[0].keep(key, lambda: check_on_meta(func, args, kwargs))


def _described(value: Any, found: list[Context], own: tuple[torch.Tensor | None, Collection[int]]) -> Hashable:
    """Return a structure of arguments as a key; ``own`` are (input, sized). Append contexts of tensors to ``found``."""
    if isinstance(value, torch.Tensor):
        if type(value) is GlobalTensor:
            found.append(value._context)
        return rough_shape(value.shape, own[1]) if value is own[0] else value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_described(one, found, own) for one in value])
    if isinstance(value, dict):
        return tuple([(name, _described(one, found, own)) for name, one in value.items()])
    return type(value), value  # with its type, for 1, 1.0 and True are equal


def rough_shape(shape: Shape, sized: Collection[int] = ()) -> Shape:
    """Return a shape in which sizes above 2 become 2, but along some dims, so that one check counts for many images."""
    return tuple([n if dim in sized else min(n, 2) for dim, n in enumerate(shape)])


def check_dtype(func: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
    """Let torch check a rare dtype of x by a call with zeros, because it takes more dtypes for a block without cells.

    Args:
        func: is called with zeros of one or two elements along each dim of x.
    Raises: on every worker the error that torch raises.
    """
    if x.dtype in RARE:
        func(torch.zeros([min(max(n, 1), 2) for n in x.shape] or [1], dtype=x.dtype, device=x.device))


def check_dtypes(func: Callable[..., Any], *tensors: torch.Tensor | None) -> None:
    """Let torch check the dtypes of several tensors, which it does not check on meta tensors.

    Args:
        func: is called with zeros of one or two elements along each dim, so equal sizes stay equal; None as it is.
    Raises: on every worker the error that torch raises.
    """

    def small(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros([min(max(n, 1), 2) for n in x.shape], dtype=x.dtype, device=x.device)

    with uncounted():
        func(*[one if one is None else small(one) for one in tensors])


def as_key(value: Any) -> Hashable:
    """Return an argument as a key. A tensor in it has to be a number, as of dims or cells, which a model computed."""
    if isinstance(value, (list, tuple)):
        return tuple(map(as_key, value))
    if isinstance(value, dict):
        return tuple((name, as_key(item)) for name, item in value.items())
    if isinstance(value, slice):
        return (slice, as_key(value.start), as_key(value.stop), as_key(value.step))
    if isinstance(value, torch.Tensor):
        return int(value)
    return (type(value), value) if isinstance(value, (bool, float)) else value  # 1, 1.0 and True are equal


def result_shape(func: Callable[..., Any], x: GlobalTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Shape:
    """Return the shape of the result of torch's function of the whole x, or raise its error. It is asked once."""
    key: Any = as_key(args)

    def make() -> Shape:
        given = map(_with_numbers, args, key)  # reading a global number again would send messages, not on all workers
        return tuple(func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *given, **kwargs).shape)

    return x._context.keep(("shape", func, x.shape, x.dtype.is_complex, key, as_key(kwargs)), make)


def _with_numbers(value: Any, key: Any) -> Any:
    """Return an argument in which the numbers of its key replace tensors."""
    if isinstance(value, torch.Tensor):
        return key
    if isinstance(value, (list, tuple)):
        return tuple(map(_with_numbers, value, key))
    return value


@as_one_call
def check_range(
    x: torch.Tensor, first: int, stop: int, refuse: Callable[[torch.Tensor], Any], ignored: int | None = None
) -> None:
    """Check that the indices which this worker reads are in ``range(first, stop)``, as torch checks whole tensors.

    On a GPU nothing waits for the answer: a wrong index fails a device-side assertion, as in torch.

    Args:
        refuse: is called with a wrong index, on the host, and raises torch's error.
        ignored: an index that is allowed, too.
    Raises: torch's error, on the workers that read a wrong index. The others learn of it as of any failure.
    """
    if x.is_meta or not x.numel():
        return
    if not x.is_cuda:
        low, high = torch.aminmax(x)
        if first <= int(low) and int(high) < stop:
            return
    x = x.long()  # uint8 would take -100 for 156
    wrong = (x < first) | (x >= stop)
    if ignored is not None:
        wrong &= x != ignored
    if x.is_cuda:
        torch._assert_async(~wrong.any(), "an index is out of range")
    elif wrong.any():
        refuse(x[wrong][:1].cpu())
