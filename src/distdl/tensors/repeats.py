"""Repeats: an activation checkpoint recomputes its forward, where random calls have to draw what they drew before.

What a call draws follows from its number. So the numbers of a checkpoint's forward are noted, and when it recomputes,
they are handed out again, in the same order. Which checkpoint runs its forward or recomputes now, torch knows: its
hooks for saved tensors are those of the checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from inspect import unwrap
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils.checkpoint import checkpoint

from distdl.tensors.derivatives import is_checkpointed
from distdl.tensors.function import Function
from distdl.tensors.private_torch import current_graph_task_id

_Number = TypeVar("_Number")
_stack = torch._C._autograd
_noted: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # by checkpoint
_repeated: WeakKeyDictionary[Any, defaultdict[Any, int]] = WeakKeyDictionary()  # how many, by backward


def repeated(count: Callable[[], _Number]) -> _Number:
    """The number of a random call: the next one, or that of the forward at this place, if a checkpoint recomputes it.

    Raises: RuntimeError if a checkpoint draws more often than its forward did.
    """
    inside: list[Any] = []
    for frame, backward in checkpoints():
        if backward is None:
            inside.append(frame)
            continue
        places, noted = _repeated.setdefault(frame, defaultdict(int)), _noted.get(frame, [])
        if places[backward] >= len(noted):
            raise RuntimeError("a checkpoint draws random numbers more often than in its forward")
        number: _Number = noted[places[backward]]
        places[backward] += 1
        break
    else:
        number = count()
    for frame in inside:
        _noted.setdefault(frame, []).append(number)
    return number


class CallCount:
    """The calls of one random layer.

    Attributes:
        number: how many calls there were, repeats apart.
    """

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> int:
        """The number of this call.

        Raises: RuntimeError in a re-entrant checkpoint without gradients, of which no backward could find it out.
        """
        return repeated(self._count)

    def _count(self) -> int:
        if current_graph_task_id() == -1:
            self.number += 1
        elif not torch.is_grad_enabled():
            raise RuntimeError(f"a random layer is called in a backward, without gradients; {_ADVICE}")
        return self.number


def repeat_calls() -> tuple[Any, Any]:
    """A ``context_fn`` for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``, which changes nothing.

    Random layers repeat what they drew in any such checkpoint. Earlier versions needed this one for some.
    """
    return nullcontext(), nullcontext()


def repeatable(x: torch.Tensor) -> torch.Tensor:
    """x, unchanged, for a random call. Its backward raises RuntimeError if a re-entrant checkpoint has repeated it."""
    if not torch.is_grad_enabled():
        return x
    # a checkpoint that recomputes without re-entry repeats the numbers that it drew
    inside = current_graph_task_id() != -1 and all(backward is None for _, backward in checkpoints())
    if not (inside or is_checkpointed()):
        return x
    # the anchor: also an x that needs no gradient may be repeated, and then the backward has to go through here
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    y: torch.Tensor = _Repeatable.apply(x, anchor, inside)
    return y


class _Repeatable(Function):
    """The identity. It saves a tensor, so that every worker's checkpoint recomputes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, inside: bool) -> torch.Tensor:
        ctx.inside = inside
        ctx.save_for_backward(anchor.detach())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        if ctx.inside:
            raise RuntimeError(f"what is random needs torch.utils.checkpoint with use_reentrant=False; {_ADVICE}")
        return dy, None, None


_ADVICE = "a re-entrant checkpoint does not draw again what it drew"


def checkpoints() -> list[tuple[Any, Any]]:
    """The checkpoints whose hooks are open, innermost first: with the number of the backward for which one recomputes,
    or None for one that runs its forward.
    """
    found, taken = [], []
    while True:
        hooks = _stack._top_saved_tensors_default_hooks(True)
        if hooks is None:
            break
        _stack._pop_saved_tensors_default_hooks()
        taken.append(hooks)
        variables = _variables(hooks[0])
        if "target_frame_ref" in variables:
            found.append((variables["target_frame_ref"](), variables["gid"]))
        elif "frame" in variables:
            found.append((variables["frame"], None))
    for hooks in reversed(taken):
        _stack._push_saved_tensors_default_hooks(*hooks)
    return found


def _variables(function: Any) -> dict[str, Any]:
    """The variables that a function of torch's checkpoints has from around it; none of any other function."""
    function = unwrap(function)
    if not isinstance(function, FunctionType) or function.__module__ != checkpoint.__module__:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}
