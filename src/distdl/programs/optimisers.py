"""Optimisers inside of a compiled step: each of their steps is one call, which a replay makes as it is.

An optimiser reads numbers of its own, as Adam its count of steps. So its operators are not those of the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from distdl.programs.reach import Reach
from distdl.programs.recorder import Recorder

_NUMBERS = (bool, int, float, tuple)


@contextmanager
def taken_whole(reach: Reach, recorder: Recorder) -> Iterator[None]:
    """Let a recorder take down each step of an optimiser of torch as one call.

    These are problems: an optimiser of another class, whose step may do anything; a closure, which computes a loss; and
    what changes a number of an optimiser or a scheduler beside the optimiser's step, as a scheduler's step does. A
    replay would not call it.
    """
    optimisers = reach.optimisers

    def numbers() -> Any:
        return numbers_of(optimisers), [_numbers_in(vars(one)) for one in reach.schedulers]

    known = numbers()

    def look() -> None:
        """Find out whether a number has changed since the last step of an optimiser."""
        if known != numbers():
            recorder.problem("it changes a number of an optimiser beside the optimiser's step, as a scheduler does")

    def taken(optimiser: torch.optim.Optimizer, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step of an optimiser that is taken down when it is called."""

        @wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal known
            if not type(optimiser).__module__.startswith("torch."):
                recorder.problem(f"the step of a {type(optimiser).__name__}, which is no optimiser of torch, is in it")
                return step(*args, **kwargs)
            if args or kwargs:
                recorder.problem(f"the step of its {type(optimiser).__name__} gets a closure")
                return step(*args, **kwargs)
            look()
            result = recorder.optimise(optimiser, step)
            known = numbers()
            return result

        return run

    before = [(vars(one), vars(one).get("step")) for one in optimisers]
    for one in optimisers:
        vars(one)["step"] = taken(one, one.step)
    try:
        yield
        look()
    finally:
        for names, step in before:
            del names["step"]
            if step is not None:
                names["step"] = step


def numbers_of(optimisers: Sequence[torch.optim.Optimizer]) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """The dicts of optimisers and of their states, and the numbers in each."""
    held = [each for one in optimisers for each in (*one.param_groups, *one.state.values())]
    return [(each, _numbers_in(each)) for each in held]


def _numbers_in(held: dict[Any, Any]) -> dict[Any, Any]:
    return {key: one for key, one in held.items() if type(one) in _NUMBERS}


def tensors_of(optimisers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of their states, with names for people."""
    for one in optimisers:
        for state in one.state.values():
            yield from (
                (f"{key} of {type(one).__name__}", x) for key, x in state.items() if isinstance(x, torch.Tensor)
            )
