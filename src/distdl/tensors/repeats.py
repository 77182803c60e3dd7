"""Repeats: an activation checkpoint calls its layers again in the backward, and a random layer must then repeat itself.

A random layer numbers its calls, and what it draws follows from the number. A call in a backward is such a repeat. It
gets the number of the layer's latest call; if another call is being repeated, the backward raises. A checkpoint with
``context_fn=repeat_calls`` notes the numbers, and all its repeats are right.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import torch

from distdl.tensors.derivatives import is_checkpointed
from distdl.tensors.function import Function


class CallCount:
    """The calls of one random layer.

    Attributes:
        number: how many calls there were, repeats apart.
    """

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> int:
        """The number of this call.

        Raises: RuntimeError for a repeat without gradients, of which it could not be found out that it is wrong.
        """
        contexts = _local.contexts
        repeats = [(place, one) for place, one in enumerate(contexts) if isinstance(one, _Repeat)]
        place, innermost = repeats[-1] if repeats else (-1, None)
        if innermost is not None:
            number = innermost.next(self)
        elif not _in_backward():
            number = self.number = self.number + 1
        elif torch.is_grad_enabled():
            number = self.number
        else:
            raise RuntimeError(f"a random layer is called in a backward, without gradients; {_ADVICE}")
        for note in contexts[place + 1 :]:
            note.numbers[self].append(number)
        return number


def repeat_calls() -> tuple[Any, Any]:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` with which random layers
    repeat what they drew, however often they are called and in whatever order the backward comes to the checkpoints.
    """
    note = _Note()
    return note, _Repeat(note)


def checked(x: torch.Tensor, number: int) -> torch.Tensor:
    """x, unchanged, in a call of this number. If a checkpoint repeats the call by another number, its backward raises
    RuntimeError.
    """
    inside = _in_backward()
    if not torch.is_grad_enabled() or not (inside or is_checkpointed()):
        return x
    # the anchor: also an x that needs no gradient may be repeated, and then the backward has to go through here
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    y: torch.Tensor = _Checked.apply(x, anchor, number, inside)
    return y


class _Note:
    """In the forward: notes the numbers of all calls, for each layer in their order."""

    def __init__(self) -> None:
        self.numbers: defaultdict[CallCount, list[int]] = defaultdict(list)

    def __enter__(self) -> None:
        self.numbers.clear()
        _local.contexts.append(self)

    def __exit__(self, *error: object) -> None:
        _local.contexts.pop()


class _Repeat:
    """In the repeat: hands the noted numbers out again."""

    def __init__(self, note: _Note) -> None:
        self.numbers = note.numbers

    def __enter__(self) -> None:
        self._left = {calls: iter(numbers) for calls, numbers in self.numbers.items()}
        _local.contexts.append(self)

    def __exit__(self, *error: object) -> None:
        _local.contexts.pop()

    def next(self, calls: CallCount) -> int:
        number = next(self._left.get(calls, iter(())), None)
        if number is None:
            raise RuntimeError("a checkpoint calls a random layer more often than in its forward")
        return number


class _Checked(Function):
    """The identity. What it saves is its number; a checkpoint puts the number of the repeat in its place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, number: int, inside: bool) -> torch.Tensor:
        ctx.call = (number, inside)
        ctx.save_for_backward(torch.tensor(number))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (repeated,) = ctx.saved_tensors
        number, inside = ctx.call
        if inside:  # what a checkpoint without re-entry recomputes has no backward of its own
            raise RuntimeError(f"a random layer needs torch.utils.checkpoint with use_reentrant=False; {_ADVICE}")
        if int(repeated) != number:
            raise RuntimeError(
                f"a checkpoint repeats call {number} of a random layer, and the layer's latest was call "
                f"{int(repeated)}; {_ADVICE}"
            )
        return dy, None, None, None


_ADVICE = "pass context_fn=distdl.nn.repeat_calls to torch.utils.checkpoint.checkpoint"


class _Local(threading.local):
    def __init__(self) -> None:
        self.contexts: list[_Note | _Repeat] = []


_local = _Local()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
