"""A recorded forward and its backward as two lines, and the values that go from the first to the second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distdl.programs.calls import Source, Step, values_in
from distdl.programs.line import Source as Text
from distdl.programs.passes import improved
from distdl.programs.passes.dead import without_dead

Strides = tuple[int, ...] | None


@dataclass
class Joint(Step):
    """A recorded forward with its backward. Its result is the values of results, and those of gradients.

    Attributes:
        begin: the place of the first call of the backward.
        count: how many arguments the forward has. Behind them stand the gradients of its results.
        strides: of the gradients of results; None for a result that has none.
    """

    begin: int = 0
    count: int = 0
    strides: list[Strides] = field(default_factory=list)


def halved(step: Joint) -> tuple[Step, Step]:
    """The two steps of a forward and a backward.

    Returns: the forward gives the results, and behind them what the backward reads. The backward takes the gradients of
        results, and behind them the same; it gives the gradients.
    """
    results, gradients = step.result[:2]
    kept = set(map(id, without_dead(step).calls))
    first, second = (
        [one for one in part if id(one) in kept] for part in (step.calls[: step.begin], step.calls[step.begin :])
    )
    seeds = {value: one for value, one in step.sources.items() if one.kind == "argument" and one.of >= step.count}
    made = {*seeds, *(value for call in second for value in call.given())}
    read = [*(value for call in second for value in call.read()), *values_in(gradients)]
    saved = [value for value in dict.fromkeys(read) if value not in made]
    sources = {value: one._replace(of=one.of - step.count) for value, one in seeds.items()}
    sources |= {value: Source("argument", len(results) + n, f"saved {n}") for n, value in enumerate(saved)}
    outside = {value: one for value, one in step.sources.items() if value not in seeds}
    return Step(first, outside, [*results, *saved], step.lies), Step(second, sources, gradients, step.lies)


class Halves:
    """The lines of a forward and of its backward.

    Args:
        step: both.
        requires: whether each result requires a gradient.
        owners: the parameters that get gradients.
        repeatable: whether the forward may be computed once more: it draws nothing, and keeps no statistics.
    Attributes:
        steps: of the two lines.
        forward: takes the arguments; gives the results, and what the backward reads.
        backward: takes the gradients of results, and what it reads; gives gradients.
        asks: whether all workers have to ask each other before a backward, because the line of one of them may
            not fit all gradients that come in. They agree on it in the maximum before each replay.
    """

    def __init__(self, step: Joint, requires: Sequence[bool], owners: Sequence[Any], repeatable: bool) -> None:
        forward, backward = halved(step)
        self.steps = improved(forward), improved(backward)
        self.forward, self.backward = self._lines(*self.steps)
        self.requires, self.owners, self.repeatable = requires, owners, repeatable
        self._strides = step.strides
        self.asks = sum(requires) > 1 or any(0 in strides for strides in step.strides if strides)

    @staticmethod
    def _lines(forward: Step, backward: Step) -> tuple[Callable[[Any], list[Any]], Callable[[Any], list[Any]]]:
        return Text(forward).compiled(), Text(backward).compiled()

    def change(self, change: Callable[[Step], Step]) -> None:
        """Let both lines be those of changed steps."""
        self.forward, self.backward = self._lines(*map(change, self.steps))

    def lie_as_recorded(self, seeds: Sequence[torch.Tensor | None]) -> bool:
        """Whether gradients of results have the strides of the recording."""
        return [one if one is None else one.stride() for one in seeds] == self._strides

    def fitting(self, seeds: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """The gradients of results as they lay in the recording. None if the backward cannot do with these."""
        found: list[torch.Tensor | None] = []
        for one, strides in zip(seeds, self._strides, strict=True):
            if (one is None) != (strides is None):
                return None
            if one is None or strides is None or not one.numel():
                found.append(one)
                continue
            if any(new == 0 != old and n > 1 for new, old, n in zip(strides, one.stride(), one.shape, strict=True)):
                return None
            lies = one.stride() == strides and not one.storage_offset() and not one.is_conj() and not one.is_neg()
            found.append(one if lies else laid(one, strides))
        return found


def laid(one: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy that lies in memory of its own, with these strides.

    Args:
        strides: where one is 0, it is that of the tensor, too: one number stands for all along that dim.
    """
    made = torch.empty_strided(one.shape, strides, dtype=one.dtype, device=one.device)
    single = tuple([slice(0, 1) if not stride else slice(None) for stride in strides])
    made[single].copy_(one[single])
    return made


class Emptied(dict[int, Any]):
    """Arguments of a line that are gone once it has read them, so that it frees each after its last use."""

    def __getitem__(self, place: int) -> Any:
        return self.pop(place)
