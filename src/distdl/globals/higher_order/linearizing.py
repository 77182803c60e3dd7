"""``torch.func.linearize`` and ``functionalize`` of functions of global tensors.

In torch both trace a function, and ask no tensor: what is split cannot be traced. All may have been imported by their
names before distdl. So they stay the functions that they are, and get other code.
"""

# mypy: disable-error-code="name-defined"

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.utils import _pytree as pytree

from distdl.globals.context import worlds
from distdl.globals.higher_order.transforms import Level, is_split
from distdl.globals.table import composite, copied, lend
from distdl.tensors.function import TransformError
from distdl.workers.worlds import launched


class _Derivative:
    """The derivative of a function at a point: the adjoint of  dy -> dx,  which is linear.

    Both keep the graph of the function and of its backward.
    """

    def __init__(self, func: Callable[..., Any], primals: tuple[Any, ...]) -> None:
        with torch.no_grad():
            level = Level()  # (of what does not follow from what is outside)
        with level.opened():
            given = level.differentiable(level.aliases(primals))
            self._given = pytree.tree_leaves(given)
            self._results = pytree.tree_leaves(func(*given))
            level.check_unwritten()
            self._curved = [y for y in self._results if isinstance(y, torch.Tensor) and y.requires_grad]
            self._seeds = level.differentiable([torch.zeros_like(y) for y in self._curved])
            found = self._of(self._curved, self._given, self._seeds, create_graph=True) if self._curved else ()
            self._adjoint = [dx for dx in found if dx is not None and dx.requires_grad]
            self._places = [place for place, dx in enumerate(found) if dx is not None and dx.requires_grad]
        level.release()

    def __call__(self, *tangents: torch.Tensor) -> list[Any]:
        """The tangents of the results; another result is itself."""
        along = iter(_linear(self._forward, self._backward, *tangents) if self._adjoint else ())
        curved = {id(y) for y in self._curved} if self._adjoint else ()
        return [
            next(along) if id(y) in curved else torch.zeros_like(y) if isinstance(y, torch.Tensor) else y
            for y in self._results
        ]

    def _forward(self, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._of(self._adjoint, self._seeds, [tangents[place] for place in self._places])

    def _backward(self, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._of(self._curved, self._given, gradients)

    def _of(self, ys: Any, xs: Any, dys: Any, create_graph: bool = False) -> tuple[torch.Tensor, ...]:
        options = {"allow_unused": True} if create_graph else {"materialize_grads": True}
        found: Any = torch.autograd.grad(ys, xs, dys, retain_graph=True, create_graph=create_graph, **options)
        return tuple(found)


def _linear(function: Any, adjoint: Any, *inputs: torch.Tensor) -> Any:
    """Apply a linear function.

    Raises: TransformError inside of torch's transforms, which then take one sample after another.
    """
    if torch._C._are_functorch_transforms_active():
        raise TransformError
    return _Linear.apply(function, adjoint, *inputs)


class _Linear(torch.autograd.Function):
    """A linear function, whose backward is its adjoint."""

    @staticmethod
    def forward(ctx: Any, function: Any, adjoint: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.function, ctx.adjoint = function, adjoint
        result: tuple[torch.Tensor, ...] = function(*inputs)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_linear(ctx.adjoint, ctx.function, *gradients)


def _linearize(func: Callable[..., Any], *primals: Any) -> Any:
    if not worlds.count or torch.compiler.is_dynamo_compiling():
        return _torchs_linearize(func, *primals)
    first = [func(*primals)]  # (which torch computes first, too)

    def again(*args: Any) -> Any:
        return first.pop() if first else func(*args)

    if not is_split((primals, first)):
        if launched() != "threads":  # (torch counts its levels for all threads together)
            return _torchs_linearize(again, *primals)
        if torch._C._are_functorch_transforms_active():
            raise TransformError
    derivative = _Derivative(func, primals)
    own = composite(
        _torchs_linearize,
        lazy_dynamo_disallow=lambda made: made,
        make_fx=lambda traced: lambda tangents: derivative,
        const_fold=SimpleNamespace(split_const_subgraphs=lambda made: made),
    )
    return own(again, *primals)


def _functionalize(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    traced = _torchs_functionalize(func, *args, **kwargs)

    @wraps(traced)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not worlds.count or torch.compiler.is_dynamo_compiling():
            return traced(*args, **kwargs)
        if not is_split((args, kwargs)):
            try:
                return traced(*args, **kwargs)
            except TransformError:
                if torch._C._are_functorch_transforms_active():
                    raise
        return func(*args, **kwargs)  # (which writes and takes views as it does outside)

    return run


_torchs_linearize, _torchs_functionalize = copied(eager_transforms.linearize), copied(eager_transforms.functionalize)


def install() -> None:
    """Let torch's functions look for global tensors."""
    for function, own in ((eager_transforms.linearize, _linearize), (eager_transforms.functionalize, _functionalize)):
        lend(function, own, None)  # (the entry is there: see ``globals.late``)
