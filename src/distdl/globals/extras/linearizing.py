"""``torch.func.linearize`` of functions of global tensors.

torch traces the function, without asking tensors of other types; global tensors cannot be traced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from distdl.globals.extras.transforms import is_split
from distdl.globals.tensor.table import composite
from distdl.tensors.function import TransformError
from distdl.tensors.private_torch import are_functorch_transforms_active
from distdl.tensors.private_transforms import tree_leaves, tree_map, tree_structure, tree_unflatten
from distdl.workers.worlds import launched


def _linear(function: Any, adjoint: Any, *inputs: torch.Tensor) -> Any:
    """Apply a linear function of tensors, with its adjoint as the backward.

    Raises: TransformError inside of torch's transforms, so that these call it for one sample after another.
    """
    if are_functorch_transforms_active():
        raise TransformError
    return _Linear.apply(function, adjoint, *inputs)


class _Linear(torch.autograd.Function):
    """A linear function as an autograd function; its backward is its adjoint, which is linear, too."""

    @staticmethod
    def forward(ctx: Any, function: Any, adjoint: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.function, ctx.adjoint = function, adjoint
        result: tuple[torch.Tensor, ...] = function(*inputs)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_linear(ctx.adjoint, ctx.function, *gradients)


def linearized(original: Any, func: Callable[..., Any], *primals: Any) -> Any:
    """Call torch's ``linearize``, or ours for a function of global tensors.

    In ours, the derivative at the primals is the adjoint of the linear function  dy -> dx  of a backward.

    The derivative and its adjoint keep the graph of the function.

    Args:
        original: torch's own.
    """
    first = [func(*primals)]  # torch computes it first, too, and takes this result

    def again(*args: Any) -> Any:
        return first.pop() if first else func(*args)

    if not is_split((primals, first)):
        if launched() != "threads":  # torch's count of its levels is shared by all threads
            return original(again, *primals)
        if are_functorch_transforms_active():
            raise TransformError
    given, made = (tree_structure(one) for one in (primals, first[0]))
    with torch.no_grad():  # the derivative is constant in the tensors outside
        y, pull_back = _vjp(func, *primals)
        _, push_forward = _vjp(pull_back, tree_map(torch.zeros_like, y))

    def forward(*tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tree_leaves(push_forward(tree_unflatten(tangents, given))))

    def backward(*gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tree_leaves(pull_back(tree_unflatten(gradients, made))))

    own = composite(
        original,
        lazy_dynamo_disallow=lambda made: made,
        make_fx=lambda traced: lambda tangents: partial(_linear, forward, backward),
        const_fold=SimpleNamespace(split_const_subgraphs=lambda made: made),
    )
    return own(again, *primals)


_vjp: Any = torch.func.vjp
