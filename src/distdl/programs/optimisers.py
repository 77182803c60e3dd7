"""Optimisers inside of a compiled step: each of their steps is one call, which a replay makes as it is.

An optimiser reads numbers of its own, as Adam its count of steps. So its operators are not those of the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from distdl.programs.recorder import Recorder

_NUMBERS = (bool, int, float)


@contextmanager
def taken_whole(optimisers: Sequence[torch.optim.Optimizer], recorder: Recorder) -> Iterator[None]:
    """Let a recorder take down each step of these optimisers as one call.

    A step that gets a closure, which computes a loss, is recorded operator by operator. That something else changes a
    number of an optimiser, as a scheduler does with ``lr``, is a problem: a replay would not call it.
    """
    known = numbers_of(optimisers)

    def told() -> None:
        nonlocal known
        if known != numbers_of(optimisers):
            recorder.problem("it changes a number of an optimiser, as a scheduler does")

    def taken(optimiser: torch.optim.Optimizer, step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal known
            if args or kwargs:
                return step(*args, **kwargs)
            told()
            result = recorder.optimise(optimiser, step)
            known = numbers_of(optimisers)
            return result

        return run

    before = [(vars(one), vars(one).get("step")) for one in optimisers]
    for one in optimisers:
        vars(one)["step"] = taken(one, one.step)
    try:
        yield
        told()
    finally:
        for names, step in before:
            del names["step"]
            if step is not None:
                names["step"] = step


def numbers_of(optimisers: Sequence[torch.optim.Optimizer]) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """The dicts of optimisers and of their states, and the numbers in each."""
    held = [each for one in optimisers for each in (*one.param_groups, *one.state.values())]
    return [(each, {key: n for key, n in each.items() if type(n) in _NUMBERS}) for each in held]


def tensors_of(optimisers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of their states, with names for people."""
    for one in optimisers:
        for state in one.state.values():
            yield from (
                (f"{key} of {type(one).__name__}", x) for key, x in state.items() if isinstance(x, torch.Tensor)
            )
