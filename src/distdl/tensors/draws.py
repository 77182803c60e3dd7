"""Draws: the numbers of the random calls of a world, from which follows what they draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from distdl.tensors.repeats import repeated


class Draw(NamedTuple):
    """What tells one random call from another.

    Attributes:
        seed: in whose sequence it is.
        number: how many calls of this seed came before, and this one.
    """

    seed: int
    number: int


class Draws:
    """The random calls of a world.

    Attributes:
        seed: that of the next call, as agreed; None if nothing was agreed on.
        repeats: whether what is drawn now was drawn before.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.repeats = False
        self._counts: Counter[int] = Counter()

    def counted(self) -> list[Draw]:
        """The latest draw of each seed, from which other draws go on after :meth:`resume`."""
        return [Draw(seed, number) for seed, number in sorted(self._counts.items())]

    def resume(self, seed: int | None, counted: Iterable[Draw]) -> None:
        """Go on as other draws did, whose seed and latest draws are given."""
        self.seed = seed
        self._counts = Counter(dict(counted))

    @contextmanager
    def again(self, seed: int | None, counted: Iterable[Draw]) -> Iterator[None]:
        """Inside, draws go on from there once more; behind it, as if there had been none inside."""
        now, repeats = (self.seed, self.counted()), self.repeats
        self.resume(seed, counted)
        self.repeats = True
        try:
            yield
        finally:
            self.repeats = repeats
            self.resume(*now)

    def next(self) -> Draw:
        """The draw of this call.

        Raises: RuntimeError if a checkpoint draws more often than its forward did.
        """
        return repeated(self._count)

    def _count(self) -> Draw:
        assert self.seed is not None
        self._counts[self.seed] += 1
        return Draw(self.seed, self._counts[self.seed])


def seed() -> int:
    """The seed of torch on this worker, as a number that fits into a message."""
    return (torch.initial_seed() + 2**63) % 2**64 - 2**63
