"""Draws: the numbers of random calls, which an activation checkpoint repeats when it recomputes its forward.

What a function draws follows from the number of its call. A recomputed forward has to draw what its forward drew, so it
is handed the same numbers again, in the same order. Which checkpoint records or recomputes now, torch knows: its hooks
for saved tensors are those of the checkpoint.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

_stack = torch._C._autograd


class Draw(NamedTuple):
    """What tells one random call from another.

    Attributes:
        seed: in whose sequence it is.
        number: how many calls of this seed came before, and this one.
    """

    seed: int
    number: int


class Draws:
    """The random calls of a world.

    Attributes:
        seed: that of the next call, as agreed; None if nothing was agreed on.
        repeats: whether what is drawn now was drawn before.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.repeats = False
        self._counts: Counter[int] = Counter()
        self._noted: WeakKeyDictionary[Any, list[Draw]] = WeakKeyDictionary()  # by checkpoint
        self._repeated: WeakKeyDictionary[Any, defaultdict[Any, int]] = WeakKeyDictionary()  # how many, by backward

    def counted(self) -> list[Draw]:
        """The latest draw of each seed, from which other draws go on after :meth:`resume`."""
        return [Draw(seed, number) for seed, number in sorted(self._counts.items())]

    def resume(self, seed: int | None, counted: Iterable[Draw]) -> None:
        """Go on as other draws did, whose seed and latest draws are given."""
        self.seed = seed
        self._counts = Counter(dict(counted))

    @contextmanager
    def again(self, seed: int | None, counted: Iterable[Draw]) -> Iterator[None]:
        """Inside, draws go on from there once more; behind it, as if there had been none inside."""
        now, repeats = (self.seed, self.counted()), self.repeats
        self.resume(seed, counted)
        self.repeats = True
        try:
            yield
        finally:
            self.repeats = repeats
            self.resume(*now)

    def next(self) -> Draw:
        """The draw of this call; inside a checkpoint that recomputes, the one that the forward had at this place.

        Raises: RuntimeError if a checkpoint draws more often than its forward did.
        """
        inside, draw = [], None
        for frame, backward in _checkpoints():
            if backward is not None:
                repeated = self._repeated.setdefault(frame, defaultdict(int))
                noted = self._noted.get(frame, [])
                if repeated[backward] >= len(noted):
                    raise RuntimeError("a checkpoint draws random numbers more often than in its forward")
                draw = noted[repeated[backward]]
                repeated[backward] += 1
                break
            inside.append(frame)
        if draw is None:
            assert self.seed is not None
            self._counts[self.seed] += 1
            draw = Draw(self.seed, self._counts[self.seed])
        for frame in inside:
            self._noted.setdefault(frame, []).append(draw)
        return draw


def _checkpoints() -> list[tuple[Any, Any]]:
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
    """The variables that a function has from around it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return (
        {} if code is None or not cells else {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=True)}
    )
