"""The order in which a forward needs weights: what is needed next comes along, as one message."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import torch

from distdl.globals.models.gathered import Gathered
from distdl.globals.models.gathering import Gather, Gathering, gather_each, state_of, that_come_along
from distdl.globals.tensor.global_tensor import GlobalTensor


class _Step(NamedTuple):
    """What a forward gathers at once.

    Attributes:
        joins: whether the gradients may go back with others: not those of what runs in a checkpoint, or without graph.
    """

    parameters: Sequence[GlobalTensor]
    joins: bool


class Course:
    """In which order a forward gathers weights. The next one most likely does the same.

    What has come along is taken only if the shares are by then what they were. The rest goes with the end of the
    forward. All workers run the same modules, and so agree on what comes along.
    """

    def __init__(self) -> None:
        self._known: list[_Step] = []
        self._now: list[_Step] = []
        self._ahead: dict[int, _Message] = {}  # by the place in these
        self._runs, self._graph = False, False

    def begin(self) -> None:
        self._known, self._now, self._runs = self._now, [], True
        self._graph = torch.is_grad_enabled()

    def end(self) -> None:
        self._runs = False
        with torch._C.DisableTorchFunction():
            self._now = list(takewhile(_are_leaves, self._now))
        self._ahead.clear()

    def copies(self, gathered: Gathered, joined: bool) -> tuple[torch.Tensor, ...]:
        """The whole tensors, which depend on the shares.

        Args:
            joined: whether the gradients may go back as one message with those of what has come along.
        """
        parameters = gathered.parameters
        joins = joined and torch.is_grad_enabled()
        message = self._message(parameters, joins)
        if message is None:
            return gathered.copies()
        place = len(self._now) - 1
        if joins and _are_trained(parameters):
            return message.copies(place, gathered)
        return gathered.copies(message.wholes(place))

    def _message(self, parameters: Sequence[GlobalTensor], joins: bool) -> _Message | None:
        """That in which these parameters have come with others, now or before."""
        if not self._runs:  # (a checkpoint that is recomputed in backward)
            return None
        place = len(self._now)
        known = self._known[place] if place < len(self._known) else None
        if not self._graph:  # (a forward without any says nothing of the next one that has)
            joins = known is None or known.joins
        self._now.append(_Step(parameters, joins))
        if known is None or [id(one) for one in known.parameters] != [id(one) for one in parameters]:
            self._known = []
            return None
        if place not in self._ahead:
            # (by numbers, as islice would walk up to there)
            steps = that_come_along(self._known[one] for one in range(place, len(self._known)))
            if len(steps) < 2:
                return None
            message = _Message(place, steps)
            self._ahead.update(dict.fromkeys(range(place, place + len(steps)), message))
        message = self._ahead.pop(place)
        return message if message.holds(place) else None


class _Message:
    """Parameters that have come together as one message. Their gradients go back as one, too: they have one node."""

    def __init__(self, first: int, steps: Sequence[_Step]) -> None:
        self._lists = {place: one.parameters for place, one in enumerate(steps, start=first)}
        self._joins = {place for place, one in enumerate(steps, start=first) if one.joins}
        self._states = {place: [state_of(one) for one in some] for place, some in self._lists.items()}
        self._wholes = dict(enumerate(gather_each(steps), start=first))
        self._copies: dict[int, tuple[torch.Tensor, ...]] | None = None
        self._users: list[Gathered] = []  # (the node knows these, and so not the copies, which know the node)

    def holds(self, place: int) -> bool:
        """Whether the shares of these parameters are still what they were when the message was sent."""
        return self._states[place] == [state_of(one) for one in self._lists[place]]

    def wholes(self, place: int) -> tuple[torch.Tensor, ...]:
        """The whole tensors, once."""
        return tuple(one.detach() for one in self._wholes.pop(place))  # (the node may have made them its own)

    def copies(self, place: int, gathered: Gathered) -> tuple[torch.Tensor, ...]:
        """The whole tensors, once, as results of the node of all that were not taken before."""
        if self._copies is None:
            self._copies = self._joined(place)
        found = self._copies.pop(place, None)
        if found is None:  # (they did not require a gradient by then, or had no graph the last time)
            return gathered.copies(self.wholes(place))
        del self._wholes[place]
        self._users.append(gathered)
        return found

    def _joined(self, now: int) -> dict[int, tuple[torch.Tensor, ...]]:
        joins = {now, *self._joins}
        places = [place for place in self._wholes if place in joins and _are_trained(self._lists[place])]
        parameters = [one for place in places for one in self._lists[place]]
        wholes = tuple(one for place in places for one in self._wholes[place])
        users = self._users

        def release() -> None:
            for one in users:
                one.release()

        blocks = [one._block for one in parameters]
        copies = iter(Gather.apply(Gathering.of(parameters), wholes, release, *blocks))
        return {place: tuple(next(copies) for _ in self._lists[place]) for place in places}


def _are_leaves(step: _Step) -> bool:
    """Whether none of them has a graph of its own.

    ``torch.func.functional_call`` sets such ones. They do not come with others: a node that has several leads a
    backward to the graphs of all of them, and these would be kept until the next forward.
    """
    return all(one._block.is_leaf for one in step.parameters)


def _are_trained(parameters: Sequence[GlobalTensor]) -> bool:
    return all(one._block.requires_grad for one in parameters)
