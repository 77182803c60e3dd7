"""Random functions of global tensors. Their results do not depend on the partition.

The value of an element follows from torch's seed on the worker where tensors entered, from the count of random calls
since then, and from the element's index in the whole tensor. Torch's generators do not advance. A forward that a
checkpoint recomputes draws the same values again.

A function that is given a generator draws from it as in torch. The generator has to be in the same state on every
worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.globals.functions.distributions import (
    between,
    cauchy,
    exponential,
    geometric,
    integers,
    integers_of,
    log_normal,
    normal,
)
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.moving.alignment import aligned, gather_plain, local_block
from distdl.globals.moving.writes_into_plain import write_into_plain
from distdl.globals.rules.applying import zeroed
from distdl.globals.rules.fallback import split_like
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import Replica, copy_of
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import REPLICATED, TABLE, Handler, handles, named, writes
from distdl.globals.views.aliasing import note_written, write_back
from distdl.partition.sharing import broadcast_value
from distdl.tensors.draws import Draw, Draws, seed
from distdl.tensors.recorders import as_one_call
from distdl.tensors.uniform import Value, mask_block, uniform_block

_KIND = 2  # tells these draws apart from those of parameters (0) and of layers of nn (1)


@as_one_call
def next_draw(context: Context) -> Draw:
    """The seed and number of the next random call, the same on every worker. Collective if no seed is agreed on yet."""
    draws = context.own(Draws)
    if draws.seed is None:
        context.comm.where = "the seed of random numbers"
        draws.seed = broadcast_value(context.comm, context.everyone, "the seed of random numbers", 0, seed())
    return draws.next()


@as_one_call
def drawn(
    layout: KnownLayout,
    draw: Draw,
    value: Value | None,
    dtype: torch.dtype,
    device: torch.device,
    leading: int | None = None,
    least: float | None = None,
) -> torch.Tensor:
    """This worker's block of a random tensor. Each element has a number that is uniform in [0, 1).

    Args:
        value: the function from an element's number to the element; the number itself if None.
        leading: how many dims are drawn, beginning with the first; the others have extent 1. None for all.
        least: if given, the tensor is boolean: whether the number is at least this. Value and dtype are not used then.
    """
    if not layout.rulers and not layout.active:
        return torch.empty(0, dtype=dtype, device=device)
    rank = len(layout.rulers)
    dims = rank if leading is None else leading
    key, box, extents = (draw.seed, _KIND, draw.number), layout.box[:dims], layout.extents[:dims]
    if least is None:
        block = uniform_block(key, box, extents, value, dtype, device)
    else:
        block = mask_block(key, box, extents, least, device)
    return block.reshape((*block.shape, *[1] * (rank - dims)))


def random_like(x: GlobalTensor, value: Value | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """This worker's block of a random tensor in the layout of x. Elements are as for :func:`drawn`."""
    return drawn(x._layout, next_draw(x._context), value, dtype or x.dtype, x.device)


# functions that read the values of their first argument, not only its shape
_READING = frozenset(["normal", "poisson", "multinomial", "bernoulli", "rrelu", "rrelu_"])


def takes_generator(handler: Handler) -> Handler:
    """Let a handler of a random function take a generator, and draw from it what torch draws.

    An element's value depends on all draws before it, so every worker computes the whole result and keeps its block.
    """

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_generator = any(isinstance(one, torch.Generator) for one in (*args, *kwargs.values()))
        x: Any = next(one for one in tensors_in((args, kwargs)) if type(one) is GlobalTensor)
        name, context, in_place = func.__name__, x._context, writes(func, kwargs)
        if not by_generator or context.comm.imagined:
            args = tuple([one for one in args if not isinstance(one, torch.Generator)])
            return handler(func, args, {key: one for key, one in kwargs.items() if key != "generator"})
        if in_place and args[0] is not x:
            return write_into_plain(func, args, kwargs, args[0], (args, kwargs))

        def gather(one: torch.Tensor) -> Any:
            if name in _READING or one is not x:
                return gather_plain(one)
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

        plain_args, plain_kwargs = map_tensors((args, kwargs), gather)
        plain: torch.Tensor = func(*plain_args, **plain_kwargs)
        same_shape = plain.shape == x.shape
        layout = x._layout if same_shape else split_like(context, plain.shape, x._layout.partition.workers)
        block = local_block(plain.detach() if plain.is_leaf else plain, layout, name)
        y = GlobalTensor._of(block.requires_grad_() if plain.is_leaf and plain.requires_grad else block, layout)
        return write_back(x, y, name) if in_place else y

    return run


def of_replica(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a random function to replicas: every worker draws the whole result, and all draw the same."""
    context = next(one._context for one in tensors_in((args, kwargs)) if type(one) is Replica)
    return draw_whole(func, args, kwargs, context)


def draw_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context) -> Any:
    """Apply a random function to tensors that every worker has whole, as to global tensors of one block.

    Returns: what the function returns: replicas if one is among the arguments, else plain tensors; and an argument
        itself where the function returns it.
    """
    originals: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []  # alive, so that their ids stay theirs
    is_replicated, by_generator = False, any(isinstance(one, torch.Generator) for one in (*args, *kwargs.values()))

    def as_one_block(one: torch.Tensor) -> Any:
        nonlocal is_replicated
        is_replicated = is_replicated or type(one) is Replica
        plain = copy_of(one) if type(one) is Replica else one
        made = plain if by_generator else GlobalTensor._of(plain, context.whole(plain.shape, context.me))
        originals[id(made)] = one
        kept.append(made)
        return made

    def back(y: torch.Tensor) -> torch.Tensor:
        if id(y) in originals:
            return originals[id(y)]
        plain = y._block if type(y) is GlobalTensor else y
        return Replica._of(plain, context) if is_replicated else plain

    args, kwargs = map_tensors((args, kwargs), as_one_block)
    return map_tensors(func(*args, **kwargs) if by_generator else TABLE[func](func, args, kwargs), back)


def draws(names: str, spaces: str) -> Callable[[Handler], Handler]:
    """Enter a handler of random functions for global tensors; replicas of them are drawn by it, too."""

    def enter(handler: Handler) -> Handler:
        REPLICATED.update(dict.fromkeys(named(names, spaces), of_replica))
        return handles(names, spaces)(handler)

    return enter


# -- new tensors


def _like(value: Callable[..., Value | None]) -> Callable[..., Any]:
    """A handler of a function that draws a new tensor in the shape and layout of another.

    Args:
        value: takes the dtype and the bounds, if there are any; gives the function from uniform numbers to elements.
    """

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
        x, *numbers = args
        dtype = kwargs.pop("dtype", None) or x.dtype
        requires_grad = kwargs.pop("requires_grad", False)
        _check_options(func, kwargs, "device", "layout", "memory_format", "pin_memory", "low", "high")
        numbers += [kwargs[key] for key in ("low", "high") if key in kwargs]
        block = random_like(x, value(dtype, *numbers), dtype)
        return GlobalTensor._of(block.requires_grad_(bool(requires_grad)), x._layout)

    return takes_generator(handler)


draws("rand_like", "torch")(_like(lambda dtype: between(0.0, 1.0, dtype)))
draws("randn_like", "torch")(_like(lambda dtype: normal()))
draws("randint_like", "torch")(_like(lambda dtype, *numbers: integers(*numbers)))


# -- in place


def _in_place(value: Callable[..., Value]) -> Callable[..., Any]:
    """A handler of a function that fills a tensor with random elements.

    Args:
        value: takes the dtype and the function's arguments; gives the function from uniform numbers to elements.
    """

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
        x: GlobalTensor = args[0]
        named = {"low" if key == "from" else key: one for key, one in kwargs.items()}
        how = value(x.dtype, *args[1:], **named)
        block_of(x).copy_(random_like(x, how, x.dtype if x.dtype.is_floating_point else torch.float64))
        note_written(x, func.__name__)
        return x

    return takes_generator(handler)


draws("uniform_", "Tensor")(_in_place(lambda dtype, low=0.0, to=1.0: between(low, to, dtype)))
draws("normal_", "Tensor")(_in_place(lambda dtype, mean=0.0, std=1.0: normal(mean, std)))
draws("exponential_", "Tensor")(_in_place(lambda dtype, lambd=1.0: exponential(lambd)))
draws("random_", "Tensor")(_in_place(integers_of))
draws("log_normal_", "Tensor")(_in_place(lambda dtype, *numbers, **named: log_normal(*numbers, **named)))
draws("cauchy_", "Tensor")(_in_place(lambda dtype, *numbers, **named: cauchy(*numbers, **named)))
draws("geometric_", "Tensor")(_in_place(lambda dtype, p: geometric(p)))


# -- draws with probabilities


@draws("bernoulli bernoulli_", "torch Tensor")
@takes_generator
def bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros and ones: ``bernoulli(p)``, ``bernoulli(x, p)`` in the shape of x, and into x ``x.bernoulli_(p)``."""
    x, *rest = args
    _check_options(func, kwargs, "p")
    name, in_place = func.__name__, func.__name__.endswith("_")
    p = rest[0] if rest else kwargs.get("p", 0.5 if in_place else x)
    if type(x) is not GlobalTensor:
        return write_into_plain(func, args, kwargs, x, p)
    layout, (_, odds) = aligned(x._context, (x, p), 0, name)
    if not isinstance(p, torch.Tensor) and not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    draw = next_draw(x._context)
    if isinstance(odds, torch.Tensor):
        ones = (drawn(layout, draw, None, torch.float64, x.device) < odds.detach()).to(x.dtype)
        if odds.requires_grad:  # as in torch, p has a gradient of zeros, not None
            ones = ones + zeroed(odds).to(x.dtype)
    else:
        ones = drawn(layout, draw, lambda u: u < odds, torch.bool, x.device).to(x.dtype)
    if not in_place:
        return GlobalTensor._of(ones, layout)
    block_of(x).copy_(ones)
    note_written(x, name)
    return x


def _check_options(func: Any, kwargs: dict[str, Any], *known: str) -> None:
    """Raises: TypeError for a keyword argument that is not among the known ones."""
    for key in kwargs:
        if key not in known:
            raise TypeError(f"{func.__name__}() of a global tensor got an unexpected keyword argument {key!r}")
