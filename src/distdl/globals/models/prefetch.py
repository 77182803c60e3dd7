"""Prefetching sharded weights: a forward expects the order of the one before, and gathers small ones together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import torch

from distdl.globals.models.gathered import Gathered
from distdl.globals.models.gathering import Gather, Gathering, fit_one_message, gather_steps, share_version
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.tensors.private_torch import DisableTorchFunction


class _Step(NamedTuple):
    """What a forward gathers at once."""

    parameters: Sequence[GlobalTensor]
    joins: bool  # whether its gradients may travel with those of other steps: not in a checkpoint, or without graph


class Prefetching:
    """The order in which a model's forward gathers its weights. The next forward most likely has the same.

    Prefetched weights are used only if their shares were not written since. What is left at the end of a forward is
    dropped. All workers run the same modules, so they prefetch the same weights.
    """

    def __init__(self) -> None:
        self._expected: list[_Step] = []
        self._taken: list[_Step] = []
        self._messages: dict[int, _Message] = {}  # what was prefetched, by the place of the step
        self._in_forward, self._graph = False, False

    def begin_forward(self) -> None:
        self._expected, self._taken, self._in_forward = self._taken, [], True
        self._graph = torch.is_grad_enabled()

    def end_forward(self) -> None:
        self._in_forward = False
        with DisableTorchFunction():
            self._taken = list(takewhile(_are_leaves, self._taken))
        self._messages.clear()

    def gather(self, gathered: Gathered, joined: bool) -> tuple[torch.Tensor, ...]:
        """The whole tensors, connected to their shares, from a message that was sent before or from a new one.

        Args:
            joined: whether their gradients may travel with those of other steps.
        """
        joins = joined and torch.is_grad_enabled()
        message = self._message_of(gathered.parameters, joins)
        if message is None:
            return gathered.connected()
        place = len(self._taken) - 1
        if joins and _are_trained(gathered.parameters):
            return message.connected(place, gathered)
        return gathered.connected(message.values(place))

    def _message_of(self, parameters: Sequence[GlobalTensor], joins: bool) -> _Message | None:
        """The message by which parameters are gathered with others, now or before.

        Returns: None if they are gathered alone: outside of a forward (in a checkpoint that is recomputed), in another
            order than expected, or if their shares were written since.
        """
        if not self._in_forward:
            return None
        place = len(self._taken)
        expected = self._expected[place] if place < len(self._expected) else None
        if not self._graph:  # a forward without graph does not tell what the next one with a graph may join
            joins = expected is None or expected.joins
        self._taken.append(_Step(parameters, joins))
        if expected is None or [id(one) for one in expected.parameters] != [id(one) for one in parameters]:
            self._expected = []
            return None
        if place not in self._messages:
            # by numbers, as islice would walk through all steps before
            steps = fit_one_message(self._expected[number] for number in range(place, len(self._expected)))
            if len(steps) < 2:
                return None
            message = _Message(place, steps)
            self._messages.update(dict.fromkeys(range(place, place + len(steps)), message))
        message = self._messages.pop(place)
        return message if message.is_current(place) else None


class _Message:
    """The parameters of steps from a first place on, gathered by one message. They have one node in backward, too."""

    def __init__(self, first: int, steps: Sequence[_Step]) -> None:
        self._parameters = {place: one.parameters for place, one in enumerate(steps, start=first)}
        self._joins = {place for place, one in enumerate(steps, start=first) if one.joins}
        self._versions = {place: [share_version(one) for one in each] for place, each in self._parameters.items()}
        self._values = dict(enumerate(gather_steps(steps), start=first))
        self._connected: dict[int, tuple[torch.Tensor, ...]] | None = None
        self._users: list[Gathered] = []  # a list of its own: the node keeps it, and so not this message

    def is_current(self, place: int) -> bool:
        """Whether the shares of a step were not written since the message was sent."""
        return self._versions[place] == [share_version(one) for one in self._parameters[place]]

    def values(self, place: int) -> tuple[torch.Tensor, ...]:
        """The whole tensors of a step, without a graph. Called once."""
        return tuple(one.detach() for one in self._values.pop(place))  # some may be results of the node

    def connected(self, place: int, gathered: Gathered) -> tuple[torch.Tensor, ...]:
        """The whole tensors of a step, connected to their shares by the node of all steps. Called once.

        A step that did not require gradients when the node was made, or had no graph the last time, gets a node alone.
        """
        if self._connected is None:
            self._connected = self._connect(place)
        found = self._connected.pop(place, None)
        if found is None:
            return gathered.connected(self.values(place))
        del self._values[place]
        self._users.append(gathered)
        return found

    def _connect(self, now: int) -> dict[int, tuple[torch.Tensor, ...]]:
        joins = {now, *self._joins}
        places = [place for place in self._values if place in joins and _are_trained(self._parameters[place])]
        parameters = [one for place in places for one in self._parameters[place]]
        values = tuple(one for place in places for one in self._values[place])
        users = self._users

        def release() -> None:
            for one in users:
                one.release()

        blocks = [one._block for one in parameters]
        connected = iter(Gather.apply(Gathering.of(parameters), values, release, *blocks))
        return {place: tuple(next(connected) for _ in self._parameters[place]) for place in places}


def _are_leaves(step: _Step) -> bool:
    """Whether no parameter of a step has a graph of its own, as those have that ``torch.func.functional_call`` sets.

    Such parameters are not prefetched: a node of several would lead a backward to the graphs of all of them, and these
    would be kept until the next forward.
    """
    return all(one._block.is_leaf for one in step.parameters)


def _are_trained(parameters: Sequence[GlobalTensor]) -> bool:
    return all(one._block.requires_grad for one in parameters)
