"""Activation checkpoints of blocks, which a backward recomputes.

A backward does not know that the checkpoint stood in a forward, or in a function on blocks. And a checkpoint with
re-entry replaces blocks and replicas by new plain leaves. So both are noted when the checkpoint begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints

from distdl.globals.functions.plain_random import drawing, drawn_by
from distdl.globals.tensor.block import Block
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.running import is_on_blocks, is_running, on_blocks, running, tells_blocks
from distdl.tensors.derivatives import recomputing
from distdl.tensors.draws import Draws


def _as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs later as it runs here: in a forward, on blocks, with this world's random numbers."""
    function = recomputing()(function)
    function = running()(function) if is_running() else function
    function = on_blocks()(function) if is_on_blocks() else function
    context = drawn_by()
    return function if context is None else drawing(context)(function)


def _redrawn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that draws the same random numbers when it is recomputed: when it is called with gradients."""
    context = drawn_by()
    if context is None:
        return function
    draws = context.own(Draws)
    seed, counted = draws.seed, draws.counted()

    def run(*args: Any) -> Any:
        nonlocal seed
        if torch.is_grad_enabled():
            with draws.again(seed, counted):
                return function(*args)
        y = function(*args)
        seed = draws.seed if seed is None else seed
        return y

    return run


def _kinds(args: Sequence[Any]) -> list[Any]:
    """Return for each argument what it is: for a replica its context, for a block ``Block``, else None."""
    blocks = tells_blocks()
    return [one._context if type(one) is Replica else Block if type(one) is Block and blocks else None for one in args]


def _as_given(args: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
    """Make plain arguments, as a checkpoint saves them, replicas and blocks again, as they were."""

    def given(one: Any, kind: Any) -> Any:
        if kind is None or type(one) is not torch.Tensor:
            return one
        return Block._of(one) if kind is Block else Replica._of(one, kind)

    return [given(one, kind) for one, kind in zip(args, kinds, strict=True)]


def install() -> None:
    """Let torch's checkpoints recompute blocks as blocks, and replicas as replicas."""
    frame: Any = checkpoints._CheckpointFrame
    reentrant: Any = checkpoints.CheckpointFunction
    begin, save, load = frame.__init__, frame.save_inputs, frame.get_inputs
    forward = reentrant.forward

    def begin_here(self: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        begin(self, _as_here(recompute), *args, **kwargs)

    def save_here(self: Any, *args: Any) -> None:
        save(self, *args)
        self._distdl_kinds = _kinds(args)

    def load_here(self: Any) -> list[Any]:
        args: list[Any] = load(self)
        if all(kind is None for kind in self._distdl_kinds):
            return args
        with torch.enable_grad():
            return _as_given(args, self._distdl_kinds)

    def forward_here(ctx: Any, function: Callable[..., Any], keeps_draws: bool, *args: Any) -> Any:
        function = _redrawn(_as_here(function))
        kinds = _kinds(args)
        if any(kind is not None for kind in kinds):
            return forward(ctx, lambda *given: function(*_as_given(given, kinds)), keeps_draws, *args)
        return forward(ctx, function, keeps_draws, *args)

    frame.__init__, frame.save_inputs, frame.get_inputs = begin_here, save_here, load_here
    reentrant.forward = staticmethod(forward_here)
