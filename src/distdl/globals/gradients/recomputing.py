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
from distdl.globals.layouts.context import worlds
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


class CheckpointFunction(checkpoints.CheckpointFunction):
    """torch's checkpoint with re-entry, which recomputes blocks as blocks."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], keeps_draws: bool, *args: Any) -> Any:
        function = _redrawn(_as_here(function))
        kinds = _kinds(args)
        if any(kind is not None for kind in kinds):
            given = function
            function = lambda *args: given(*_as_given(args, kinds))  # noqa: E731
        return checkpoints.CheckpointFunction.forward(ctx, function, keeps_draws, *args)


def frame_of(torchs: Any) -> Any:
    """The class of what a checkpoint without re-entry keeps for its backward, which recomputes blocks as blocks.

    Args:
        torchs: the class that torch has.
    """

    class Frame(torchs):  # type: ignore[misc]
        def __init__(self, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            super().__init__(_as_here(recompute) if worlds.ever else recompute, *args, **kwargs)

        def save_inputs(self, *args: Any) -> None:
            super().save_inputs(*args)
            self._kinds = _kinds(args)

        def get_inputs(self) -> list[Any]:
            args: list[Any] = super().get_inputs()
            if all(kind is None for kind in self._kinds):
                return args
            with torch.enable_grad():
                return _as_given(args, self._kinds)

    Frame.__name__ = Frame.__qualname__ = torchs.__name__
    Frame.__module__ = torchs.__module__
    return Frame
