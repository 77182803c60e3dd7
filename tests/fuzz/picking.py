"""Choosing at random, in a way that Hypothesis can make smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from partitions import Blocks, blocks
from programs import Input, Ref

T = TypeVar("T")


class Pick:
    """Chooses for a program whose tensors so far, computed sequentially, are known.

    Attributes:
        values: the tensors.
        inputs: those that the program begins with; a step that needs a plain tensor adds one.
    """

    def __init__(self, draw: st.DrawFn, values: list[torch.Tensor], inputs: int) -> None:
        self._draw = draw
        self.values = values
        self.inputs = inputs

    def of(self, *choices: T) -> T:
        return choices[self._draw(st.integers(0, len(choices) - 1))]

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def flag(self) -> bool:
        return self._draw(st.booleans())

    def rarely(self) -> bool:
        return self._draw(st.integers(0, 9)) == 9

    def order(self, values: Sequence[T]) -> tuple[T, ...]:
        return tuple(self._draw(st.permutations(values)))

    def some(self, values: Sequence[T]) -> tuple[T, ...]:
        """At least one of them, in any order."""
        return self.order(values)[: self.number(1, len(values))]

    def dim(self, x: torch.Tensor) -> int:
        at = self.number(0, x.dim() - 1)
        return at - x.dim() if self.flag() else at

    def tensor(self, wanted: Callable[[torch.Tensor], bool] = lambda x: True) -> Ref | None:
        """One of the tensors so far, the later ones more often."""
        found = [at for at, value in enumerate(self.values) if wanted(value)]
        if not found:
            return None
        back = min(self.number(0, len(found) - 1), self.number(0, len(found) - 1))
        return Ref(found[len(found) - 1 - back])

    def blocks(self, shape: Sequence[int]) -> Blocks:
        """How a tensor of this shape may lie, as evenly as possible."""
        return self._draw(blocks(tuple(shape), even=True))

    def value(self, ref: Ref) -> torch.Tensor:
        return self.values[ref.at]


def plain(shape: Sequence[int], pick: Pick, kind: str = "normal", wants: bool = False) -> Input:
    return Input(tuple(shape), pick.number(0, 99), kind, wants)


Draws = Callable[[Pick, Ref, torch.Tensor], Any]
