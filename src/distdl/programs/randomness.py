"""Whether random states advance, and whether they do so by the draws that are recorded."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

_ADDRESS = "_cdata"


class States:
    """The random states of Python and NumPy as they are now."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=True)

    def advanced(self) -> str:
        """Which of them is another one by now; empty if none is."""
        if random.getstate() != self._python:
            return "Python's random"
        now: Any = np.random.get_state(legacy=True)
        return "" if now[2:] == self._numpy[2:] and np.array_equal(now[1], self._numpy[1]) else "NumPy's"


class Generators:
    """The states in which the generators of torch have to be: those in which the last recorded draw has left them.

    A replay repeats draws, and sets no states. So what sets a state must be noticed, as ``torch.manual_seed``, or a
    checkpoint that draws again what its forward drew: behind it, the state is not that of the last draw.

    Args:
        known: generators that the step may draw from, beside torch's own.
    """

    def __init__(self, known: Iterable[torch.Generator]) -> None:
        self._known = list(known)
        self._left: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self.begin()

    def begin(self) -> None:
        """Go on with the states as they are now."""
        self._left = {}
        of_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        for one in (torch.default_generator, *of_gpus, *self._known):
            self.leave(one)

    def leave(self, one: torch.Generator) -> None:
        """Note how a recorded draw leaves a generator."""
        self._left[number_of(one)] = one, one.get_state()

    def is_set(self, one: torch.Generator) -> bool:
        """Whether the state of a generator is not the one behind the last recorded draw."""
        _, state = self._left.get(number_of(one), (one, None))
        return state is not None and not torch.equal(one.get_state(), state)

    def any_is_set(self) -> bool:
        """Whether one of them is."""
        return any(self.is_set(one) for one, _ in self._left.values())


def number_of(generator: torch.Generator) -> int:
    """What tells a generator from others, also where it comes in another object each time."""
    number: int = getattr(generator, _ADDRESS)
    return number


def generator_for(given: Iterable[Any], device: torch.device) -> torch.Generator:
    """The generator from which an operator draws: one that it is given, or torch's own for a device."""
    found = next((one for one in given if isinstance(one, torch.Generator)), None)
    if found is not None:
        return found
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
