r"""A tensor that every worker has whole, as one variable, and the partial gradients that the workers have of it.

The replicas of the variable count once. So one worker goes on with all of its gradient, and the others with zero:

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
    """Return a replica as a plain variable, whose gradient worker 0 passes on, and the others zeros; others as is."""
    context = context_of(value)
    if context is None:
        return value
    with torch.enable_grad():  # autograd.grad works in any mode
        same: torch.Tensor = _Same.apply(plain_of(value), context.me == 0)
    return same


def sum_partial_gradients(
    tensors: Sequence[torch.Tensor], parts: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Add up the partial gradients of replicas over all workers. Other gradients are returned as they are.

    Args:
        tensors: tensors of any kind.
        parts: this worker's gradient by each of them, or None. A parameter's has been added up before.
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
    """Make the plain results of a user's function replicas, so that its backward gets the sum of partial gradients.

    So this backward, which need not be linear, computes the whole gradient on every worker, and :func:`variable_of`
    lets one of them count. Global tensors, and results without a gradient, are returned as they are.
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
    """From replicas to the one variable. Its gradient counts on one worker."""

    @staticmethod
    def forward(ctx: Any, copy: torch.Tensor, first: bool) -> torch.Tensor:
        ctx.first = first
        ctx.set_materialize_grads(False)  # so None, where a user's function gives no gradient, stays None
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
