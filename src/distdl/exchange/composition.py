"""Composition: several operators side by side, or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from distdl.environment.arguments import checks_arguments
from distdl.exchange.nodes import move_all
from distdl.exchange.operator import Operator
from distdl.exchange.packing import Tensors
from distdl.tensors.derivatives import is_checkpointed


class Together:
    """Operators side by side: the first takes as many tensors as it has inputs, the next those behind them, and so on.

    Their messages are under way at the same time, in one autograd node. Every member passes the same operators in the
    same order; they may differ in their members. Tensors for which there is no operator pass as they are.

    Attributes:
        first: the operators that the first tensor passes.
    """

    @checks_arguments
    def __init__(self, *operators: Operator) -> None:
        self.operators = operators
        self.first = operators[:1]
        ends = [sum(len(op.inputs) for op in operators[: place + 1]) for place in range(len(operators))]
        self._taken = [(op, slice(end - len(op.inputs), end)) for op, end in zip(operators, ends, strict=True)]
        self._moving = [(op, taken) for op, taken in self._taken if not op.still]
        self._rest = slice(ends[-1] if ends else 0, None)
        alone = operators[0] if len(operators) == len(self._moving) == 1 else None
        self._one = alone if alone is not None and len(alone.inputs) == len(alone.outputs) == 1 else None

    def __call__(self, *xs: torch.Tensor) -> Tensors:
        if self._one is not None and len(xs) == 1:  # the common case: most layers move one tensor
            return (self._one(xs[0]),)
        if not self._moving and not is_checkpointed():
            return xs
        if len(self._moving) < 2:  # no messages that could be under way with others
            found = [op(*xs[taken]) for op, taken in self._taken]
        else:
            moved = iter(move_all([op for op, _ in self._moving], [xs[taken] for _, taken in self._moving]))
            found = [op(*xs[taken]) if op.still else next(moved) for op, taken in self._taken]
        ys = [y for one in found for y in (one if isinstance(one, tuple) else (one,))]
        return (*ys, *xs[self._rest])


class Step(Protocol):
    """A part of a chain: operators side by side, or something that is done to tensors before they move."""

    @property
    def operators(self) -> Sequence[Operator]: ...

    @property
    def __call__(self) -> Callable[..., Tensors]: ...


class Chain:
    """Steps one after the other: each takes what the one before it returns."""

    @checks_arguments
    def __init__(self, *steps: Step) -> None:
        self.steps = steps
        self.first = tuple(op for step in steps for op in getattr(step, "first", step.operators))

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All operators, in the order in which they are called."""
        return tuple(op for step in self.steps for op in step.operators)

    def __call__(self, *xs: torch.Tensor) -> Tensors:
        for step in self.steps:
            xs = step(*xs)
        return xs
