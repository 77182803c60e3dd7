"""A program: what a worker knows of the calls of one signature of a compiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.programs.calls import Step
from distdl.programs.counts import Counts
from distdl.programs.following import follow, is_followed
from distdl.programs.halves import Halves
from distdl.programs.line import Source
from distdl.programs.printing import shown
from distdl.programs.reach import State
from distdl.programs.structures import Result
from distdl.transport.communicator import Communicator


class Program:
    """What a worker knows of the calls of one signature.

    Attributes:
        number: among the signatures, in the order in which they came: the same on all workers.
        step: what was recorded; None before.
        line: what replays it; None if it stays as it is, or is not recorded yet.
        modules: in which it computes, by their paths.
        reasons: why it stays as it is, with the user's line.
        comm: what its messages go through; None if there are none.
        draws: whether it draws from torch's own generators.
        checked: whether a replay was compared with the step as it is.
        halves: of a model that is trained: the lines of its forward and backward.
        used: in which call of the step last.
        given: what the arguments were, by their names, for people.
    """

    def __init__(self, number: int, comm: Communicator | None, keeps: Any) -> None:
        self.number = number
        self.step: Step | None = None
        self.result: Result | None = None
        self.line: Callable[[list[torch.Tensor]], Any] | None = None
        self.halves: Halves | None = None
        self.modules: dict[str, torch.nn.Module] = {}
        self._done: Step | None = None
        self._followed: Callable[..., Any] | None = None
        self.reasons: list[tuple[str, str]] = []
        self.state: State | None = None
        self.recorded = self.replays = self.used = 0
        self.given: dict[str, str] = {}
        self.draws = self.checked = False
        self.comm = comm
        self._keeps = keeps  # what the signature names by its id

    def __str__(self) -> str:
        if self.halves is not None:
            parts = zip(("forward", "backward"), self.halves.steps, strict=True)
            return "\n\n".join(shown(step, f"signature {self.number}, {part}") for part, step in parts)
        return shown(self.step, f"signature {self.number}") if self.line and self.step else "# no line"

    def does(self, step: Step) -> None:
        """From now on, replay this step."""
        self.line, self._done, self._followed = Source(step).compiled(), step, None

    def replay(self, tensors: list[torch.Tensor]) -> Any:
        """Call the line, and tell those who follow this worker for which module it is.

        Args:
            tensors: the plain tensors among the arguments.
        """
        assert self.line is not None and self._done is not None
        if self.halves is not None or not is_followed():
            return self.line(tensors)
        if self._followed is None:
            self._followed = Source(self._done, followed=True).compiled()
        comes_to = follow(self.modules)
        comes_to("")
        try:
            return self._followed(tensors, comes_to)
        finally:
            comes_to("")

    @property
    def counts(self) -> Counts | None:
        """Of operators, messages and bytes; None if nothing is recorded."""
        return None if self.step is None else Counts.of(self.step)
