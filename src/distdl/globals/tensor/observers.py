"""Where others look on: a room that comes later enters a function, and the code here calls it without knowing it.

The room of consistency finds out by them whether the workers differ.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from distdl.globals.layouts.context import Context
from distdl.globals.tensor.table import Handler

BITS = 16
"""Numbers that travel with gradients, for what is compared."""


class Compared(Protocol):
    """What is compared with the gradients of one backward."""

    @property
    def bits(self) -> torch.Tensor | None:
        """``BITS`` numbers of 0 or 1, which go with each message of the backward; None for zeros."""

    def settle(self, sums: torch.Tensor) -> None:
        """Take the sums of the bits over all workers, which came with the first message. Collective.

        Raises: ValueError, the same on every worker, if the workers differ.
        """


AROUND_CALLS: list[Callable[[Handler, Any, tuple[Any, ...], dict[str, Any]], Any]] = []
"""Called in the place of a handler with it and with its arguments; gives what the handler gives. One at most."""

AROUND_MOVES: list[Callable[[str, Any, Any], AbstractContextManager[None]]] = []
"""Gives the context in which a global tensor is moved; called with the function's name, the tensor and its goal."""

PLAIN_BESIDE: list[Callable[[Context, torch.Tensor], None]] = []
"""Called with each plain tensor that stands beside a global one outside of models, and each parameter that enters."""

COMPARING: list[Callable[[Context], Compared]] = []
"""Gives what is compared with the gradient of a plain tensor that enters. One at most."""

_UNOBSERVED: AbstractContextManager[None] = nullcontext()


def moving(name: str, x: Any, to: Any) -> AbstractContextManager[None]:
    """The context in which a function moves a global tensor.

    Args:
        to: a layout; or the number of the worker that gets all, of which None is every worker.
    """
    return AROUND_MOVES[0](name, x, to) if AROUND_MOVES else _UNOBSERVED


def note_plain(context: Context, plain: torch.Tensor) -> None:
    """Let those who look on see a plain tensor, which has to be the same on every worker."""
    for look in PLAIN_BESIDE:
        look(context, plain)
