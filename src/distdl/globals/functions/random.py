"""Random functions of global tensors: each element is drawn by its place, so no partition changes what is drawn.

What is drawn follows from the seed of torch (that of the worker from which tensors entered), from how many random calls
there were since, and from the element's place in the whole tensor. Torch's generators are not drawn from. A forward
that a checkpoint recomputes draws what it drew before.

A function that is given a generator draws from it what torch draws. It has to be in the same state on every worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.adopting import write
from distdl.globals.context import Context, KnownLayout
from distdl.globals.functions.applying import zeroed
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
from distdl.globals.nested import map_tensors, tensors_in
from distdl.globals.operands import aligned, block_of, entire
from distdl.globals.replicas import Replica, copy_of
from distdl.globals.strides import keep_strides
from distdl.globals.table import REPLICATED, TABLE, by_name, handles
from distdl.globals.tensor import GlobalTensor
from distdl.globals.ties import note_written, write_back
from distdl.ops.dropout import masked
from distdl.partition.sharing import broadcast_value
from distdl.tensors.draws import Draw, seed
from distdl.tensors.repeats import repeatable
from distdl.tensors.uniform import Value, mask_block, uniform_block

_KIND = 2  # (parameters and layers of nn have 0 and 1)
_ALPHA = 1.7580993408473766  # the negative of what SELU tends to


def next_draw(context: Context) -> Draw:
    """The next random call, the same on every worker. Collective if no tensor has brought a seed along."""
    if context.draws.seed is None:
        context.comm.where = "the seed of random numbers"
        context.draws.seed = broadcast_value(context.comm, context.everyone, "the seed of random numbers", 0, seed())
    return context.draws.next()


def drawn(
    layout: KnownLayout,
    draw: Draw,
    value: Value | None,
    dtype: torch.dtype,
    device: torch.device,
    leading: int | None = None,
    least: float | None = None,
) -> torch.Tensor:
    """This worker's block of a random tensor.

    Args:
        value: what an element is of its number, uniform in [0, 1); itself if not given.
        leading: how many dims are drawn, beginning with the first; the others have extent 1. None for all.
        least: where it is given, an element is whether its number is at least that; there is no value or dtype then.
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
    """The block of a random tensor that lies as x does."""
    return drawn(x._layout, next_draw(x._context), value, dtype or x.dtype, x.device)


def whole_by_generator(
    x: GlobalTensor, draw: Callable[[torch.Tensor], torch.Tensor], name: str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """This worker's block of what a generator draws, which lies as x does.

    What a generator gives an element depends on all those before it, so each worker draws the whole tensor.

    Args:
        draw: draws from the generator, of a tensor with x's shape and strides.
    """
    if x._context.comm.imagined:
        return torch.empty_like(block_of(x), dtype=dtype)
    plain = torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device=x.device)
    block: torch.Tensor = aligned(x._context, (x, draw(plain)), 0, name)[1][1]
    return block


# -- dropout


def _dropping(
    name: str, batched: int | None = None, leading: int | None = None, alpha: bool = False
) -> Callable[..., Any]:
    """A handler of a dropout.

    Args:
        batched: with how many dims there is a batch; with fewer, one number is drawn for each channel.
        leading: how many dims are drawn; None for all.
        alpha: whether it keeps mean and variance of what comes out of SELU.
    """

    @by_name
    def handler(
        func: Any,
        input: GlobalTensor,
        p: float = 0.5,
        training: bool = not alpha,
        inplace: bool = False,
        train: Any = None,
    ) -> Any:
        training = training if train is None else train
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or p == 0:
            return input
        if leading == 2 and input.dim() < 2:
            raise RuntimeError(f"{name} needs a tensor of at least 2 dims; got {tuple(input.shape)}")
        dims = leading if leading is None or batched is None or input.dim() >= batched else 1
        return dropped(input, float(p), dims, alpha, inplace or func.__name__.endswith("_"), name)

    return handler


def dropped(
    x: GlobalTensor, p: float, leading: int | None, alpha: bool = False, inplace: bool = False, name: str = "dropout"
) -> GlobalTensor:
    r"""Set random parts of a tensor to zero, and scale the others: :math:`y_c = x_c m_c / (1 - p)`."""
    draw, block, layout = next_draw(x._context), block_of(x), x._layout
    mask = drawn(layout, draw, None, torch.bool, block.device, leading, p)
    scale, shift = (0.0 if p == 1 else 1 / (1 - p)), None
    if alpha:  # y = scale (x m + (m - 1) alpha) + scale alpha p
        scale = 0.0 if p == 1 else 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
        shift = (mask.to(block.dtype) - 1 + p) * (_ALPHA * scale)
    if inplace:
        block.mul_(mask).mul_(scale)
        if shift is not None:
            block.add_(shift)
        note_written(x, name)
        return x
    # (what a backward computes once more draws what it drew)
    y = masked(block if x._context.draws.repeats else repeatable(block), mask, scale)
    made = GlobalTensor._of(y if shift is None else y + shift, layout)
    keep_strides(x, made, dropped)
    return made


handles("dropout dropout_", "torch functional")(_dropping("dropout"))
handles("dropout1d", "functional")(_dropping("dropout1d", 3, 2))
handles("dropout2d", "functional")(_dropping("dropout2d", None, 2))
handles("dropout3d", "functional")(_dropping("dropout3d", 5, 2))
handles("feature_dropout feature_dropout_", "torch")(_dropping("feature_dropout", None, 2))
handles("alpha_dropout alpha_dropout_", "torch functional")(_dropping("alpha_dropout", alpha=True))
handles("feature_alpha_dropout feature_alpha_dropout_", "torch functional")(
    _dropping("feature_alpha_dropout", None, 2, alpha=True)
)


# -- new tensors


def _like(value: Callable[..., Value | None]) -> Callable[..., Any]:
    """A handler of a function that draws a tensor of the shape of another."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
        x, *numbers = args
        dtype = kwargs.pop("dtype", None) or x.dtype
        requires_grad = kwargs.pop("requires_grad", False)
        _check_options(func, kwargs, "device", "layout", "memory_format", "pin_memory", "low", "high", "generator")
        numbers += [kwargs[key] for key in ("low", "high") if key in kwargs]
        generator = kwargs.get("generator")
        if generator is None:
            block = random_like(x, value(dtype, *numbers), dtype)
        else:
            block = whole_by_generator(
                x, lambda plain: func(plain, *numbers, generator=generator), func.__name__, dtype
            )
        return GlobalTensor._of(block.requires_grad_(bool(requires_grad)), x._layout)

    return handler


handles("rand_like", "torch")(_like(lambda dtype: between(0.0, 1.0, dtype)))
handles("randn_like", "torch")(_like(lambda dtype: normal()))
handles("randint_like", "torch")(_like(lambda dtype, *numbers: integers(*numbers)))


# -- in place


def _in_place(value: Callable[..., Value]) -> Callable[..., Any]:
    """A handler of a function that fills a tensor with what is drawn."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
        x: GlobalTensor = args[0]
        numbers = args[1:]
        if kwargs.get("generator") is not None:
            block = whole_by_generator(x, lambda plain: func(plain, *numbers, **kwargs), func.__name__)
        else:
            named = {"low" if key == "from" else key: one for key, one in kwargs.items() if key != "generator"}
            how = value(x.dtype, *numbers, **named)
            block = random_like(x, how, x.dtype if x.dtype.is_floating_point else torch.float64)
        block_of(x).copy_(block)
        note_written(x, func.__name__)
        return x

    return handler


handles("uniform_", "Tensor")(_in_place(lambda dtype, low=0.0, to=1.0: between(low, to, dtype)))
handles("normal_", "Tensor")(_in_place(lambda dtype, mean=0.0, std=1.0: normal(mean, std)))
handles("exponential_", "Tensor")(_in_place(lambda dtype, lambd=1.0: exponential(lambd)))
handles("random_", "Tensor")(_in_place(integers_of))
handles("log_normal_", "Tensor")(_in_place(lambda dtype, *numbers, **named: log_normal(*numbers, **named)))
handles("cauchy_", "Tensor")(_in_place(lambda dtype, *numbers, **named: cauchy(*numbers, **named)))
handles("geometric_", "Tensor")(_in_place(lambda dtype, p: geometric(p)))


# -- draws with probabilities


@handles("bernoulli bernoulli_", "torch Tensor")
def bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros and ones: ``bernoulli(p)``, ``bernoulli(x, p)`` in the shape of x, and into x ``x.bernoulli_(p)``."""
    x, *rest = args
    _check_options(func, kwargs, "p", "generator")
    name, generator = func.__name__, kwargs.get("generator")
    writes = name.endswith("_")
    p = rest[0] if rest else kwargs.get("p", 0.5 if writes else x)
    if type(x) is not GlobalTensor:
        return write(func, args, kwargs, x, p)
    layout, (_, odds) = aligned(x._context, (x, p), 0, name)
    if not isinstance(p, torch.Tensor) and not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    draw = next_draw(x._context) if generator is None else None

    def blank(like: torch.Tensor) -> torch.Tensor:  # (what torch draws into)
        return like if writes else torch.empty_like(like, memory_format=torch.contiguous_format)

    if isinstance(odds, torch.Tensor):
        if draw is not None:
            u = drawn(layout, draw, None, torch.float64, x.device)
        else:
            fine = torch.float64 if odds.dtype == torch.float64 else torch.float32  # (as torch draws)
            u = whole_by_generator(x, lambda plain: blank(plain).uniform_(generator=generator), name, fine)
        ones = (u < odds.detach()).to(x.dtype)
        if odds.requires_grad:  # (the derivative is zero, and not none)
            ones = ones + zeroed(odds).to(x.dtype)
    elif draw is not None:
        ones = drawn(layout, draw, lambda u: u < odds, torch.bool, x.device).to(x.dtype)
    else:
        ones = whole_by_generator(x, lambda plain: blank(plain).bernoulli_(p, generator=generator), name)
    if not writes:
        return GlobalTensor._of(ones, layout)
    block_of(x).copy_(ones)
    note_written(x, name)
    return x


@handles("rrelu rrelu_", "torch functional")
@by_name
def rrelu(
    func: Any,
    input: GlobalTensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    last: Any = None,
    *,
    inplace: bool = False,
    generator: Any = None,
) -> Any:
    """A leaky ReLU whose slope is drawn for each element while training.

    Args:
        last: ``inplace`` of torch.nn.functional.rrelu, and ``generator`` of the others.
    """
    if func is functional.rrelu:
        inplace = inplace or bool(last)
    else:
        inplace, generator = func.__name__.endswith("_"), last if generator is None else generator
    if lower > upper:
        raise RuntimeError("Lower bound should be less than or equal to the upper bound")
    if not training:
        return functional.leaky_relu(input, (lower + upper) / 2, inplace=inplace)
    block = block_of(input)
    if generator is None:
        slope = random_like(input, between(lower, upper, input.dtype))
    else:
        signs = 1 - 2 * entire(input.detach() <= 0).to(input.dtype)  # (torch draws for these elements alone)
        slope = whole_by_generator(
            input, lambda _: torch.rrelu(signs, lower, upper, True, generator=generator) * signs, "rrelu"
        )
    y = block * torch.where(block.detach() <= 0, slope, torch.ones_like(slope))
    z = GlobalTensor._of(y, input._layout)
    return write_back(input, z, "rrelu_") if inplace else z


@handles("gumbel_softmax", "functional")
@by_name
def gumbel_softmax(
    func: Any, logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Any:
    """Softmax of logits with Gumbel noise."""
    noise = GlobalTensor._of(random_like(logits, lambda u: -exponential()(u).log_()), logits._layout)
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.detach().max(dim, keepdim=True)[1]
    return torch.zeros_like(soft.detach()).scatter_(dim, index, 1.0) - soft.detach() + soft


# -- beside global tensors


def of_replica(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A random function of tensors that every worker has whole: each draws all of it, so they draw the same."""
    context = next(one._context for one in tensors_in((args, kwargs)) if type(one) is Replica)
    return of_copies(func, args, kwargs, context)


def of_copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context) -> Any:
    """The same, also where no tensor has entered: then the results are plain."""
    found: dict[int, torch.Tensor] = {}
    kept: list[GlobalTensor] = []  # (so that no other gets their ids)
    entered = False

    def own(one: torch.Tensor) -> torch.Tensor:
        nonlocal entered
        entered = entered or type(one) is Replica
        plain = copy_of(one) if type(one) is Replica else one
        made = GlobalTensor._of(plain, context.whole(plain.shape, context.me))
        found[id(made)] = one
        kept.append(made)
        return made

    def back(y: torch.Tensor) -> torch.Tensor:
        if id(y) in found:
            return found[id(y)]
        plain = y._block if type(y) is GlobalTensor else y
        return Replica._of(plain, context) if entered else plain

    given, named = map_tensors((args, kwargs), own)
    return map_tensors(TABLE[func](func, given, named), back)


for _function, _handler in list(TABLE.items()):
    if getattr(_handler, "__module__", "") == __name__:
        REPLICATED[_function] = of_replica


def _check_options(func: Any, kwargs: dict[str, Any], *known: str) -> None:
    for key in kwargs:
        if key not in known:
            raise TypeError(f"{func.__name__}() of a global tensor got an unexpected keyword argument {key!r}")
