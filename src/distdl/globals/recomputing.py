"""Activation checkpoints of blocks: a backward recomputes what their forward has computed.

There, nothing says that a function on blocks runs. And a checkpoint with re-entry gives new leaves in the place of
blocks, and differentiates what it has recomputed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints

from distdl.globals.context import Context
from distdl.globals.functions.drawing import drawing, drawn_by
from distdl.globals.lineage import may_differ
from distdl.globals.nested import map_tensors
from distdl.globals.replicas import Replica, plain_of
from distdl.globals.running import is_on_blocks, may_be_block, note_given, on_blocks
from distdl.tensors.derivatives import recomputing


def _as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs on blocks wherever it is called, if one runs on blocks here, and draws as one does here."""
    function = recomputing()(function)
    function = on_blocks()(function) if is_on_blocks() else function
    context = drawn_by()
    return function if context is None else drawing(context)(function)


def _redrawn(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that recomputes what it draws as it draws it here."""
    context = drawn_by()
    if context is None:
        return function
    draws = context.draws
    seed, counted = draws.seed, draws.counted()

    def run(*args: Any) -> Any:
        nonlocal seed
        if torch.is_grad_enabled():
            with draws.again(seed, counted):
                return function(*args)
        y = function(*args)  # (it is the forward)
        seed = draws.seed if seed is None else seed
        return y

    return run


def _as_copies(args: Sequence[Any], contexts: Sequence[Context | None]) -> list[Any]:
    """Arguments of which those with contexts are copies: they may come as the plain tensors that are saved of them."""
    return [
        one if context is None or type(one) is Replica else Replica._of(one, context)
        for one, context in zip(args, contexts, strict=True)
    ]


def _contexts(args: Sequence[Any]) -> list[Context | None]:
    """Those of arguments that are copies."""
    return [one._context if type(one) is Replica else None for one in args]


def _of_parts(function: Callable[..., Any], contexts: Sequence[Context | None]) -> Callable[..., Any]:
    """A function of blocks and copies, which recomputes with copies, and gives what a worker has of gradients.

    Args:
        contexts: those of arguments that are copies.
    """

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():  # (it is the forward)
            return function(*args)
        return map_tensors(function(*_as_copies(args, contexts)), plain_of)

    return run


def is_of_copies(function: Any, args: Sequence[Any]) -> bool:
    """Whether a function is a checkpoint with re-entry, and copies alone have a gradient among its arguments.

    What it gives may be blocks, which it knows from around it: of gradients, a worker has a part in any case.
    """
    plain = (one for one in args if type(one) is torch.Tensor)
    return function is checkpoints.CheckpointFunction and not any(one.requires_grad for one in plain)


def may_have_parts(function: Any, args: Sequence[Any]) -> bool:
    """Whether plain tensors among the arguments of an autograd function are blocks, so that its backward gets parts.

    One of a checkpoint with re-entry may get them wherever there may be blocks: parts of gradients add up.
    """
    plain = [one for one in args if type(one) is torch.Tensor]
    return any(map(may_differ, plain)) or (function is checkpoints.CheckpointFunction and any(map(may_be_block, plain)))


def install() -> None:
    """Let checkpoints recompute blocks as blocks."""
    frame: Any = checkpoints._CheckpointFrame
    reentrant: Any = checkpoints.CheckpointFunction
    begin, save, load = frame.__init__, frame.save_inputs, frame.get_inputs
    forward, detach = reentrant.forward, checkpoints.detach_variable

    def begin_here(self: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        begin(self, _as_here(recompute), *args, **kwargs)

    def save_here(self: Any, *args: Any) -> None:
        save(self, *args)
        self._distdl_contexts = _contexts(args)

    def load_here(self: Any) -> list[Any]:
        args: list[Any] = load(self)
        if not any(self._distdl_contexts):
            return args
        with torch.enable_grad():
            return _as_copies(args, self._distdl_contexts)

    def forward_here(ctx: Any, function: Callable[..., Any], keeps_draws: bool, *args: Any) -> Any:
        function = _redrawn(_as_here(function))
        contexts = _contexts(args)
        # (variables and whole tensors, to which one without blocks is applied, are neither)
        if any(contexts) or may_have_parts(reentrant, args):
            function = _of_parts(function, contexts)
        return forward(ctx, function, keeps_draws, *args)

    def detached(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        with on_blocks():  # (in the place of copies, too, leaves get a worker's part of the gradient, which goes on)
            leaves = detach(inputs)
        for one, leaf in zip(inputs, leaves, strict=True):
            if type(leaf) is torch.Tensor and may_differ(one):
                note_given(leaf)
        return leaves

    frame.__init__, frame.save_inputs, frame.get_inputs = begin_here, save_here, load_here
    reentrant.forward = staticmethod(forward_here)
    checkpoints.detach_variable = detached
