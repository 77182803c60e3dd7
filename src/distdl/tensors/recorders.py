"""Who records a step of this worker, if anybody does (see ``distdl.programs``): what it takes as one call.

A recorder sees torch's operators, one by one. It must not take down what only happened to be so: where recycled memory
lay, which numbers were drawn, which way a function took because of a value. So functions that do such things are
recorded as one call, which a replay makes again. So are messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Recorder(Protocol):
    """What records the step that runs."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function, and take it down as one call. Operators inside it are not seen."""

    def begin(
        self, function: Callable[..., Any], args: tuple[Any, ...], again: tuple[Any, ...] | None = None
    ) -> tuple[Any, Any]:
        """The same for a function that begins messages. It gives their result, and what waits for it.

        Args:
            again: what a replay gives the function, if that is not the same.
        """

    def reserve(self) -> int:
        """A number that no other call of the step gets. All workers ask for theirs in one order."""

    def paused(self) -> AbstractContextManager[None]:
        """A context in which nothing is taken down."""


class Here(threading.local):
    """Of this thread.

    Attributes:
        recorder: what records the step that runs; None if nothing does, or inside a call that is taken as one.
    """

    recorder: Recorder | None = None


here = Here()


class Held:
    """A value of Python that goes from one such call to another. (A number would be taken down as it is.)"""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def as_one_call(function: Callable[P, T]) -> Callable[P, T]:
    """A function that a recorded step calls again, in the place of the operators inside it.

    It takes positional arguments, and gives None, a tensor, an object, or a tuple of these: no numbers, for the next
    step may have others.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        recorder = here.recorder
        if recorder is None:
            return function(*args, **kwargs)
        if kwargs:
            raise TypeError(f"{function.__name__} takes positional arguments alone while a step is recorded")
        found: T = recorder.call(function, args)
        return found

    return run


@contextmanager
def aside() -> Iterator[None]:
    """For what workers do in the first steps only, as comparing plain tensors: no step repeats it."""
    recorder = here.recorder
    if recorder is None:
        yield
        return
    with recorder.paused():
        yield
