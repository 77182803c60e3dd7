"""Autograd functions of a user's own (``torch.autograd.Function``), applied to global tensors.

Their forward and their backward are code that calls functions of torch. Both get whole tensors, as in a program of one
worker, so this code computes what it computes there, and moves what the functions that it calls move::

    x, w  --forward-->  y         global tensors and plain ones, and no graph, as in torch
    dy  --backward-->  dx, dw     the gradients that they mean, of which each worker takes its block

In the graph stands one node of blocks, which saves blocks. Many a backward computes its forward once more; random
numbers in it are those that the forward drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from distdl.globals.adopting import split_beside
from distdl.globals.context import KnownLayout
from distdl.globals.functions.autograd import part_of
from distdl.globals.operands import block_of
from distdl.globals.parts import variable_of
from distdl.globals.tensor import GlobalTensor
from distdl.tensors.function import Function

_DERIVES = torch.autograd.Function.setup_context


class _Own(FunctionCtx):
    """What such a function knows as ``ctx``.

    Attributes:
        saved_tensors: what it has saved; there while its backward runs.
    """

    saved_tensors: Any

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: Any = ()
        self.non_differentiable: tuple[torch.Tensor, ...] = ()
        self.materialize_grads = True


class _Call:
    """One call of such a function.

    Attributes:
        args: all arguments, until they have been used.
        count: how many there are.
        places: where tensors stand among them: the inputs of the node.
        layouts: for each of these, its layout; None for a plain tensor.
        shapes: the shapes of the whole tensors.
        drawn: the random calls before this one.
    """

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function, self.args, self.count = function, list(args), len(args)
        self.places = [place for place, one in enumerate(args) if isinstance(one, torch.Tensor)]
        tensors = [args[place] for place in self.places]
        self.layouts = [one._layout if type(one) is GlobalTensor else None for one in tensors]
        self.shapes = [one.shape for one in tensors]
        graph = torch.is_grad_enabled()
        self.own = _Own(tuple(isinstance(one, torch.Tensor) and graph and one.requires_grad for one in args))
        self.draws = next(one.context.draws for one in self.layouts if one is not None)
        self.drawn = self.draws.seed, self.draws.counted()
        self.single = True  # whether it gives one tensor, and no tuple
        self.results: list[Any] = []  # its results; for a tensor, its layout

    def inputs(self) -> list[torch.Tensor]:
        tensors = [self.args[place] for place in self.places]
        return [block_of(one) if type(one) is GlobalTensor else variable_of(one) for one in tensors]

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """Its results, and its arguments that are tensors."""
        given = [_global(one, layout) for one, layout in zip(inputs, self.layouts, strict=True)]
        args, self.args = self.args, []  # (what it does not save goes when nobody else has it)
        for place, one in zip(self.places, given, strict=True):
            args[place] = one
        function = self.function
        if function.setup_context is _DERIVES:
            y = function.forward(self.own, *args)
        else:
            y = function.forward(*args)
            function.setup_context(self.own, tuple(args), y)
        if getattr(self.own, "dirty_tensors", ()):
            raise RuntimeError(
                f"the autograd function {function.__name__} writes into a global tensor (ctx.mark_dirty), and what it "
                "writes would not reach it; return a new tensor"
            )
        self.single = not isinstance(y, tuple)
        return [y] if self.single else list(y), given

    def backward(self, saved: tuple[torch.Tensor | None, ...], gradients: Sequence[Any]) -> list[torch.Tensor | None]:
        """The gradients of the inputs of the node."""
        self.own.saved_tensors = saved
        try:
            with self.draws.again(*self.drawn):
                found = self.function.backward(self.own, *gradients)
        finally:
            del self.own.saved_tensors
        found = found if isinstance(found, tuple) else (found,)
        if len(found) < self.count:
            raise RuntimeError(
                f"function {self.function.__name__}Backward returned an incorrect number of gradients (expected "
                f"{self.count}, got {len(found)})"
            )
        return [
            self._gradient(found[place], layout, shape)
            for place, layout, shape in zip(self.places, self.layouts, self.shapes, strict=True)
        ]

    def _gradient(self, value: Any, layout: KnownLayout | None, shape: torch.Size) -> torch.Tensor | None:
        """Of an input: its block, or the whole of a plain one."""
        if value is None:
            return None
        if value.shape != shape:  # (as torch does for what has been expanded)
            value = value.sum_to_size(shape)
        if layout is not None:
            return part_of(value, layout, self.function.__name__)
        return value.full_tensor() if type(value) is GlobalTensor else value


def _global(block: torch.Tensor, layout: KnownLayout | None) -> torch.Tensor:
    return block if layout is None else GlobalTensor._of(block, layout)


class _Applied(Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, given = call.forward(inputs)
        blocks = {id(one): block for one, block in zip(given, inputs, strict=True)}
        outputs = []
        beside = [one for one in given if type(one) is GlobalTensor]
        for place, one in enumerate(results):
            if not isinstance(one, torch.Tensor):
                continue
            if type(one) is not GlobalTensor:  # (of values alone: the same on every worker)
                one = split_beside(one, beside)
            block = blocks.get(id(one), one._block)
            block = block.clone() if block._is_view() else block
            blocks[id(results[place])] = block
            results[place] = one._layout
            outputs.append(block)
        call.results = results
        own = call.own
        ctx.call, ctx.kinds = call, [one._layout if type(one) is GlobalTensor else None for one in own.to_save]
        ctx.save_for_backward(*(None if one is None else blocks.get(id(one), _block(one)) for one in own.to_save))
        ctx.mark_non_differentiable(*(blocks[id(one)] for one in own.non_differentiable))
        ctx.set_materialize_grads(own.materialize_grads)
        own.to_save = own.non_differentiable = ()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        saved = tuple(
            None if one is None else _global(one, layout)
            for one, layout in zip(ctx.saved_tensors, ctx.kinds, strict=True)
        )
        given = iter(gradients)
        dy = [next(given) if isinstance(layout, KnownLayout) else None for layout in call.results]
        dy = [
            one if one is None else GlobalTensor._of(one, layout) for one, layout in zip(dy, call.results, strict=True)
        ]
        return None, *call.backward(saved, dy)


def _block(one: torch.Tensor) -> torch.Tensor:
    return one._block if type(one) is GlobalTensor else one


def apply_whole(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an autograd function to arguments of which some are global tensors."""
    if function.setup_context is not _DERIVES:
        bound = signature(function.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args = bound.args
    elif kwargs:
        raise TypeError("apply() takes no keyword arguments")
    call = _Call(function, args)
    outputs = iter(_Applied.apply(call, *call.inputs()))
    results = [GlobalTensor._of(next(outputs), one) if isinstance(one, KnownLayout) else one for one in call.results]
    return results[0] if call.single else tuple(results)


def install() -> None:
    """Let autograd functions look for global tensors among their arguments: torch asks nobody there."""
    known: Any = torch.autograd.Function
    torch_apply = known.__dict__["apply"].__func__

    @wraps(torch_apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(type(one) is GlobalTensor for one in (*args, *kwargs.values())):
            return apply_whole(cls, args, kwargs)
        return torch_apply(cls, *args, **kwargs)

    known.apply = classmethod(apply)
