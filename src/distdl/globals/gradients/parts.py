r"""What every worker has whole, as one variable: its gradient, and the parts of it that the workers have.

What is computed from copies is on every worker, and counts once. So of its gradient, one worker goes on with all, and
the others with zero:

.. math:: y = y_0 = y_1 = ..., \qquad \partial y_0 = \partial y, \quad \partial y_t = 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distdl.globals.layouts.context import Context
from distdl.globals.tensor.gradient_sums import enter, leave
from distdl.globals.tensor.replicas import Replica, context_of, parameter_of, plain_of, tied_of
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


def enter_results(y: Any, context: Context) -> Any:
    """What a function with a backward of its own has given for variables: it enters, so that backward gets the whole.

    So the backward need not be linear, and gives whole gradients on every worker, of which one counts. Global tensors
    and what has no gradient stay as they are.
    """
    results = [tied_of(one) for one in y] if isinstance(y, (tuple, list)) else [tied_of(y)]
    groups: dict[Any, list[int]] = {}
    for place, one in enumerate(results):
        if type(one) is torch.Tensor and one.requires_grad:
            groups.setdefault((one.dtype, one.device), []).append(place)
    for places in groups.values():
        own = [results[place] for place in places]
        for place, one, copy in zip(places, own, enter(context, own), strict=True):
            results[place] = Replica._of(copy, context)
            results[place].__dict__["_node"] = one.grad_fn
    return type(y)(results) if isinstance(y, (tuple, list)) else results[0]


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
