"""What is done to a recorded step before it becomes a line. Each pass gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

from distdl.programs.calls import Step
from distdl.programs.passes.dead import without_dead
from distdl.programs.passes.views import with_direct_views

Pass = Callable[[Step], Step]
# each in the order in which they are done
PASSES: tuple[Pass, ...] = (without_dead,)
PASSES_OF_A_LINE: tuple[Pass, ...] = (with_direct_views,)


def improved(step: Step) -> Step:
    """The same step after the passes that every back-end gets. ``print`` shows it."""
    return _changed(step, PASSES)


def for_a_line(step: Step) -> Step:
    """The same step after the passes that make a line faster, but harder to read, and to compile."""
    return _changed(step, PASSES_OF_A_LINE)


def _changed(step: Step, passes: tuple[Pass, ...]) -> Step:
    for change in passes:
        step = change(step)
    return step
