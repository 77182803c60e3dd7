r"""What every worker has whole, as one variable: its gradient, and the parts of it that the workers have.

What is computed from copies is on every worker, and counts once. So of its gradient, one worker goes on with all, and
the others with zero:

.. math:: y = y_0 = y_1 = ..., \qquad \partial y_0 = \partial y, \quad \partial y_t = 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl.globals.block import check_unmixed
from distdl.globals.context import Context
from distdl.globals.entering import enter, leave
from distdl.globals.lineage import check_origin
from distdl.globals.replicas import Replica, context_of, parameter_of, plain_of, tied_of
from distdl.globals.tensor import GlobalTensor
from distdl.nn.compiling import leave_uncompiled
from distdl.tensors.function import Function


def variable_of(value: torch.Tensor) -> torch.Tensor:
    """A copy as one variable, the same on every worker: of its gradient, one worker has all."""
    context = context_of(value)
    if context is None:
        return value
    with torch.enable_grad():  # (a gradient is asked for in any mode)
        same: torch.Tensor = _Same.apply(plain_of(value), context.me == 0)
    return same


def summed(tensors: Sequence[torch.Tensor], parts: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of tensors: of what is computed from copies each worker has a part, and the sum is meant.

    Args:
        tensors: of any kind.
        parts: the gradients by them that this worker has found.
    """
    found = list(parts)
    groups: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        context = context_of(tensor) if parameter_of(tensor) is tensor else None
        if context is not None and len(context.everyone) > 1:
            groups.setdefault((context, tensor.dtype, tensor.device), []).append(place)
    for (context, *_), places in groups.items():
        like = [plain_of(tensors[place]) for place in places]
        for place, whole in zip(places, leave(context, like, [parts[place] for place in places]), strict=True):
            found[place] = whole
    return tuple(found)


def apply_to_variables(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Apply what has a backward of its own to copies: it takes variables, and what it gives enters once more.

    So its backward gets whole gradients, in which it need not be linear, and gives whole ones on every worker, of which
    one counts.

    Args:
        name: of the function, in errors.
    Raises: RuntimeError if it writes into a copy, or gives a global tensor.
    """
    contexts: list[Context] = []
    made: dict[int, torch.Tensor] = {}

    def variable(value: Any) -> Any:
        if type(value) is not Replica:
            return value
        contexts.append(value._context)
        if not value.requires_grad:
            return plain_of(value)
        if id(value) not in made:
            made[id(value)] = variable_of(value)
        return made[id(value)]

    for one in (*args, *kwargs.values()):
        if type(one) is torch.Tensor:
            check_origin(one, next(value._context for value in (*args, *kwargs.values()) if type(value) is Replica))
    y = function(*map(variable, args), **{key: variable(one) for key, one in kwargs.items()})
    return enter_results(y, contexts[0], name, list(made.values()))


leave_uncompiled(apply_to_variables)


def enter_results(y: Any, context: Context, name: str, variables: Sequence[torch.Tensor] = ()) -> Any:
    """What a function of variables has given: it enters, so that the function's backward gets whole gradients.

    Args:
        variables: what it has been given in the place of copies.
    Raises: RuntimeError if it has written into one of these, or gives a global tensor.
    """
    results = list(y) if isinstance(y, (tuple, list)) else [y]
    groups: dict[Any, list[int]] = {}
    for place, one in enumerate(results):
        if type(one) is GlobalTensor:
            raise RuntimeError(
                f"{name} takes weights alone and gives a global tensor, whose gradient would be lost; give it the "
                "global tensor that it reads as an argument"
            )
        check_unmixed(name, (type(one), Replica))
        if not isinstance(one, torch.Tensor):
            continue
        one = results[place] = tied_of(one)
        if not one.requires_grad:
            continue
        if any(one is other for other in variables):
            raise RuntimeError(
                f"{name} writes into a weight of a distributed model, or into what was computed from one "
                "(ctx.mark_dirty), and what it writes would not reach it; return a new tensor"
            )
        groups.setdefault((one.dtype, one.device), []).append(place)
    for places in groups.values():
        own = [results[place] for place in places]
        for place, one, copy in zip(places, own, enter(context, own), strict=True):
            results[place] = Replica._of(copy, context)
            results[place].__dict__["_node"] = one.grad_fn
    return type(y)(results) if isinstance(y, (tuple, list)) else results[0]


def enter_copies(y: Any, name: str) -> Any:
    """What a function of plain tensors has given: those results enter that it has computed from weights around it."""
    results = list(y) if isinstance(y, tuple) else [y]
    places = [place for place, one in enumerate(results) if type(one) is Replica]
    entered = enter_results([results[place] for place in places], results[places[0]]._context, name)
    for place, one in zip(places, entered, strict=True):
        results[place] = one
    return tuple(results) if isinstance(y, tuple) else results[0]


class _Same(Function):
    """From each worker's copy to the one variable. The gradient is one worker's part, and so counts once."""

    @staticmethod
    def forward(ctx: Any, copy: torch.Tensor, first: bool) -> torch.Tensor:
        ctx.first = first
        ctx.set_materialize_grads(False)  # (of a function that gives no gradient there is none, and not one of zeros)
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return None if dy is None else _Part.apply(dy, ctx.first), None


class _Part(Function):
    """The adjoint: the gradient on one worker, zeros on the others."""

    @staticmethod
    def forward(ctx: Any, dy: torch.Tensor, first: bool) -> torch.Tensor:
        ctx.first = first
        return dy.clone() if first else torch.zeros_like(dy)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        same: torch.Tensor = _Same.apply(cotangent, ctx.first)
        return same, None
