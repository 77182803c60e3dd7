"""Whether a random state has advanced."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class States:
    """The random states of Python, NumPy and torch as they are now."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=True)
        self._torch = torch.get_rng_state()

    def advanced(self, draws: bool) -> str:
        """Which of them is another one by now; empty if none is.

        Args:
            draws: whether torch's operators may have drawn from its generator.
        """
        if random.getstate() != self._python:
            return "Python's random"
        now: Any = np.random.get_state(legacy=True)
        if now[2:] != self._numpy[2:] or not np.array_equal(now[1], self._numpy[1]):
            return "NumPy's"
        return "" if draws or torch.equal(torch.get_rng_state(), self._torch) else "torch's"
