"""What is done to a recorded step before it becomes a line. Each pass gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

from distdl.programs.calls import Step
from distdl.programs.passes.dead import without_dead

# in the order in which they are done
PASSES: tuple[Callable[[Step], Step], ...] = (without_dead,)


def improved(step: Step) -> Step:
    """The same step after all passes, one behind the other."""
    for change in PASSES:
        step = change(step)
    return step
