"""Composition: several operators side by side, or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from distdl.environment.arguments import checks_arguments
from distdl.exchange.nodes import move_all
from distdl.exchange.operator import Operator
from distdl.exchange.packing import Tensors
from distdl.tensors.derivatives import is_checkpointed


class Together:
    """Operators side by side: the first takes as many tensors as it has inputs, the next those behind them, and so on.

    Their messages are under way at the same time. Tensors for which there is no operator pass as they are.

    Attributes:
        first: those that the first tensor passes.
    """

    @checks_arguments
    def __init__(self, *operators: Operator) -> None:
        self.operators = operators
        self.first = operators[:1]
        ends = [sum(len(op.inputs) for op in operators[: place + 1]) for place in range(len(operators))]
        self._taken = [slice(end - len(op.inputs), end) for op, end in zip(operators, ends, strict=True)]
        self._alone = sum(not op.still for op in operators) < 2  # no messages that could be under way with others
        self._rest = slice(ends[-1] if ends else 0, None)
        self._still = all(op.still for op in operators)
        alone = operators[0] if len(operators) == 1 and not self._still else None
        self._one = alone if alone is not None and len(alone.inputs) == len(alone.outputs) == 1 else None

    def __call__(self, *xs: torch.Tensor) -> Tensors:
        if self._one is not None and len(xs) == 1:  # (what most layers do)
            return (self._one(xs[0]),)
        if self._still and not is_checkpointed():
            return xs
        if self._alone:
            found = [op(*xs[taken]) for op, taken in zip(self.operators, self._taken, strict=True)]
        else:
            found = move_together(self.operators, [xs[taken] for taken in self._taken])
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


def move_together(operators: Sequence[Operator], arguments: Sequence[Tensors]) -> list[Any]:
    """Call several operators at once: their messages are under way at the same time, in one autograd node.

    Every member passes the same operators in the same order. They may differ in their members.

    Args:
        arguments: the tensors of each operator.
    Returns: the result of each.
    """
    moving = [place for place, op in enumerate(operators) if not op.still]
    if len(moving) < 2:
        return [op(*xs) for op, xs in zip(operators, arguments, strict=True)]
    moved = move_all(tuple(operators[place] for place in moving), [arguments[place] for place in moving])
    found = dict(zip(moving, moved, strict=True))
    results = []
    for place, (op, xs) in enumerate(zip(operators, arguments, strict=True)):
        if op.still:
            results.append(op(*xs))
        else:
            results.append(found[place][0] if len(op.outputs) == 1 else found[place])
    return results
