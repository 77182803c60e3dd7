"""The order in which a forward needs weights: what is needed next comes along, as one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distdl.globals.models.gathering import gather_each, state_of, that_come_along
from distdl.globals.tensor import GlobalTensor


class Course:
    """In which order a forward gathers weights. The next one most likely does the same.

    What has come along is taken only if the shares are by then what they were. The rest goes with the end of the
    forward. All workers run the same modules, and so agree on what comes along.
    """

    def __init__(self) -> None:
        self._known: list[Sequence[GlobalTensor]] = []
        self._now: list[Sequence[GlobalTensor]] = []
        self._ahead: dict[int, tuple[list[tuple[int, ...]], tuple[torch.Tensor, ...]]] = {}  # by the place in these
        self._runs = False

    def begin(self) -> None:
        self._known, self._now, self._runs = self._now, [], True

    def end(self) -> None:
        self._runs = False
        self.forget()

    def forget(self) -> None:
        """Let go what has come along."""
        self._ahead.clear()

    def take(self, parameters: Sequence[GlobalTensor]) -> tuple[torch.Tensor, ...] | None:
        """The whole of these parameters, if they have come along with others before, or others come along with them."""
        if not self._runs:  # (a checkpoint that is recomputed in backward)
            return None
        place = len(self._now)
        self._now.append(parameters)
        if [id(one) for some in self._known[place : place + 1] for one in some] != [id(one) for one in parameters]:
            self._known = []
            return None
        if place not in self._ahead:
            rest = (self._known[one] for one in range(place + 1, len(self._known)))  # (islice would walk up to there)
            each = [parameters, *that_come_along(parameters, rest)]
            if len(each) < 2:
                return None
            states = [[state_of(one) for one in some] for some in each]
            self._ahead.update(enumerate(zip(states, gather_each(each), strict=True), start=place))
        before, wholes = self._ahead.pop(place)
        return wholes if before == [state_of(one) for one in parameters] else None
