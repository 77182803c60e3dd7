"""What torch says of arguments, asked of tensors without memory."""

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


def judge(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Let torch check the shapes and dtypes of whole tensors, and the options beside them.

    What it refuses without memory, it is asked again of zeros in one place, because some errors then have other texts.

    Args:
        args, kwargs: of a function of torch that reads no tensor's values.
    Returns: True.
    Raises: on every worker what torch raises, before anything moves.
    """
    with uncounted():
        given, named = map_tensors((args, kwargs), lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"))
        try:
            func(*given, **named)
            return True
        except NotImplementedError:  # torch computes nothing of this without memory
            raise
        except Exception as problem:
            refused = problem
        given, named = map_tensors((args, kwargs), lambda one: torch.zeros((), dtype=one.dtype).expand(one.shape))
        func(*given, **named)
    raise refused


def judged(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    input: torch.Tensor | None = None,
    sized: Collection[int] = (),
) -> None:
    """The same, asked once for each combination.

    Args:
        input, sized: an argument, and those of its dims whose sizes torch looks at.
    """
    found: list[Context] = []
    own = (input, sized)
    key = ("judged", func, _described(args, found, own), _described(kwargs, found, own) if kwargs else (), *sized)
    found[0].keep(key, lambda: judge(func, args, kwargs))


def _described(value: Any, found: list[Context], own: tuple[torch.Tensor | None, Collection[int]]) -> Hashable:
    """A value of arguments as a key: of a tensor, what torch sees without its memory.

    Args:
        own: an argument, and those of its dims whose sizes torch looks at.
    """
    if isinstance(value, torch.Tensor):
        if type(value) is GlobalTensor:
            found.append(value._context)
        return rough(value.shape, own[1]) if value is own[0] else value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_described(one, found, own) for one in value])
    if isinstance(value, dict):
        return tuple([(name, _described(one, found, own)) for name, one in value.items()])
    return type(value), value  # (1, 1.0 and True are equal)


def rough(shape: Shape, sized: Collection[int] = ()) -> Shape:
    """Of some dims their sizes, of the others whether they have no cells, one or more.

    (A part of torch's judgement is written in Python and takes milliseconds, and pictures may all be of other sizes.)
    """
    return tuple([n if dim in sized else min(n, 2) for dim, n in enumerate(shape)])


def judge_dtype(func: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
    """Let torch check that it computes with the dtype of a whole tensor, which it does not where a block has no cells.

    Args:
        func: gets zeros, one or two along each dim of the tensor. (Of no cells torch takes more dtypes, but workers
            would have to add them up.)
    Raises: on every worker what torch raises.
    """
    if x.dtype in RARE:
        func(torch.zeros([min(max(n, 1), 2) for n in x.shape] or [1], dtype=x.dtype, device=x.device))


def judge_dtypes(func: Callable[..., Any], *tensors: torch.Tensor | None) -> None:
    """Let torch check that it computes with the dtypes of whole tensors beside each other, which it does not without
    memory.

    Args:
        func: gets zeros, one or two along each dim, on the tensors' device; None as it is. (Equal sizes stay equal.)
    Raises: on every worker what torch raises.
    """
    with uncounted():
        func(*[one if one is None else _small(one) for one in tensors])


def _small(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros([min(max(n, 1), 2) for n in x.shape], dtype=x.dtype, device=x.device)


def frozen(value: Any) -> Hashable:
    """A value of arguments as a key."""
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    if isinstance(value, dict):
        return tuple((name, frozen(item)) for name, item in value.items())
    if isinstance(value, slice):
        return (slice, frozen(value.start), frozen(value.stop), frozen(value.step))
    if isinstance(value, torch.Tensor):
        return int(value)  # (a number of dims or cells, which a model computed)
    return (type(value), value) if isinstance(value, (bool, float)) else value  # (1, 1.0 and True are equal)


def shape_of(func: Callable[..., Any], x: GlobalTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Shape:
    """The shape that torch's function gives to a whole tensor; torch's error if it refuses. Asked once."""

    key: Any = frozen(args)

    def make() -> Shape:
        given = map(_with_numbers, args, key)  # (to ask for one again would send messages, and not all come here)
        return tuple(func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *given, **kwargs).shape)

    return x._context.keep(("shape", func, x.shape, x.dtype.is_complex, key, frozen(kwargs)), make)


def _with_numbers(value: Any, key: Any) -> Any:
    """A value of arguments, with the numbers of its key in the places of tensors."""
    if isinstance(value, torch.Tensor):
        return key
    if isinstance(value, (list, tuple)):
        return tuple(map(_with_numbers, value, key))
    return value


def check_range(
    x: torch.Tensor, first: int, stop: int, refuse: Callable[[torch.Tensor], Any], ignored: int | None = None
) -> None:
    """Check indices that this worker reads, where the function of its block would not: ``range(first, stop)`` is right.

    On a GPU nothing waits for the answer: a wrong index ends the work there, as it does in torch.

    Args:
        refuse: torch's function of a tensor of the host that has one wrong index: it raises.
        ignored: an index that is right, too.
    Raises: what torch raises, on the workers that read a wrong index. The others learn of it as of any failure.
    """
    if x.is_meta or not x.numel():
        return
    if not x.is_cuda:
        low, high = torch.aminmax(x)
        if first <= int(low) and int(high) < stop:
            return
    x = x.long()  # (uint8 would take -100 for 156)
    wrong = (x < first) | (x >= stop)
    if ignored is not None:
        wrong &= x != ignored
    if x.is_cuda:
        torch._assert_async(~wrong.any(), "an index is out of range")
    elif wrong.any():
        refuse(x[wrong][:1].cpu())
