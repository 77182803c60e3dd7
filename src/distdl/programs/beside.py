"""Comparing a replay with the step as it is: what a step writes is saved, put back, and compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from distdl.globals.layouts.context import Context
from distdl.partition.sharing import gather_values
from distdl.programs.calls import Call, Step, Value, leaf_of, values_in
from distdl.programs.matching import alike, same_bits
from distdl.programs.optimisers import numbers_of, tensors_of
from distdl.programs.structures import leaves_of
from distdl.tensors.draws import Draws
from distdl.transport.communicator import Communicator

_WHAT = "comparing a replay of a compiled step with the step as it is"


class Written:
    """What a step may write, as it is now.

    Args:
        tensors: parameters, buffers and other tensors, with their names.
        optimisers: whose states are taken.
        step: what was recorded, of which generators are taken, and tensors that have no name.
        comm: whose draws are taken; None if there is none.
        shared: whether other workers draw from torch's own generators, too. Then these are left alone.
    """

    def __init__(
        self,
        tensors: list[tuple[str, torch.Tensor]],
        optimisers: list[torch.optim.Optimizer],
        step: Step,
        comm: Communicator | None,
        shared: bool,
    ) -> None:
        tensors = [*tensors, *tensors_of(optimisers)]
        self._numbers = numbers_of(optimisers)
        unnamed = [(one.name or "a constant", one.of) for one in step.sources.values() if one.kind == "constant"]
        self._tensors = list({id(leaf_of(one)): (name, leaf_of(one)) for name, one in (*tensors, *unnamed)}.values())
        self._generators = list({id(one): one for call in step.calls for one in _generators_of(call)}.values())
        self._draws = None if comm is None else Context.of(comm).own(Draws)
        self._shared = shared
        self._gradients = [(name, one, one.grad) for name, one in self._tensors if one.is_leaf]
        self.bits = list(self._bits())
        self._drawn = None if self._draws is None else (self._draws.seed, self._draws.counted())
        self._states = [one.get_state() for one in self._all_generators()]

    def restore(self) -> None:
        """Put all of it back."""
        for _, one, gradient in self._gradients:
            one.grad = gradient
        with torch.no_grad():
            for (_, now), (_, before) in zip(self._leaves(), self.bits, strict=True):
                if before is not None and not same_bits(now, before):
                    now.data.copy_(before)  # the version stays, as a graph may have saved the tensor
        for held, numbers in self._numbers:
            held.update(numbers)
        if self._draws is not None and self._drawn is not None:
            self._draws.resume(*self._drawn)
        for one, state in zip(self._all_generators(), self._states, strict=True):
            one.set_state(state)

    def again(self) -> Written:
        """The same things as they are by now."""
        other = object.__new__(Written)
        other.__dict__.update(self.__dict__)
        other.bits = list(other._bits())
        other._drawn = None if other._draws is None else (other._draws.seed, other._draws.counted())
        other._states = [one.get_state() for one in other._all_generators()]
        return other

    def differs(self, other: Written) -> str:
        """The name of the first thing that is another one there; empty if none is."""
        for (name, mine), (_, theirs) in zip(self.bits, other.bits, strict=True):
            if (mine is None) != (theirs is None) or (mine is not None and not same_bits(mine, theirs)):
                return name
        if self._drawn != other._drawn:
            return "how many random numbers were drawn"
        same = all(map(torch.equal, self._states, other._states))
        return "" if same else "the state of a random generator"

    def _bits(self) -> Iterator[tuple[str, Any]]:
        for name, one in self._leaves():
            yield name, None if one is None else one.detach().clone()

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        yield from self._tensors
        for name, one, _ in self._gradients:
            yield f"{name}.grad", one.grad

    def _all_generators(self) -> list[torch.Generator]:
        default = [] if self._shared else [torch.default_generator]
        if default and torch.cuda.is_available() and torch.cuda.is_initialized():
            default += torch.cuda.default_generators
        return [*default, *self._generators]


def _generators_of(call: Call) -> Iterator[torch.Generator]:
    for one in (*call.args, *call.kwargs.values()):
        if isinstance(one, torch.Generator):
            yield one


def differing(mine: Any, theirs: Any) -> tuple[str, int]:
    """The first part of a result that differs from that of another call, as ``its result['loss']``; empty if none.

    Returns: the name, and how many tensors stand before it.
    """
    place = 0
    for (name, one), (_, other) in zip(leaves_of(mine, "its result"), leaves_of(theirs, "its result"), strict=False):
        tensors = isinstance(one, torch.Tensor), isinstance(other, torch.Tensor)
        same = same_bits(leaf_of(one), leaf_of(other)) if all(tensors) else not any(tensors) and alike(one, other)
        if not same:
            return name, place
        place += tensors[0]
    return "", place


def giver_of(step: Step, name: str, place: int | None = None) -> Call | None:
    """The call of a step that gives, or writes last, what has this name; None if that is not known.

    Args:
        place: of a tensor of the result: how many stand before it.
    """
    value: Value | None = None if place is None else next(islice(values_in(step.result), place, None), None)
    owner = name.removesuffix(".grad")
    for call in step.calls:
        if call.kind == "gradient" and call.path == owner and name != owner:
            value = next(iter(values_in(call.args)), None)
    if value is None:
        value = next((value for value, source in step.sources.items() if source.name == name), None)
    found = None
    for call in step.calls:
        written = values_in(call.args[:1]) if call.kind == "operator" and call.writes else ()
        if value is not None and value in (*call.given(), *written):
            found = call
    return found


def agree(comm: Communicator | None, text: str) -> str:
    """The text of the first worker that has one; empty if none has. Collective."""
    if comm is None or comm.size == 1:
        return text
    comm.where = _WHAT
    told = gather_values(comm, Context.of(comm).everyone, _WHAT, text)
    return next((f"on worker {worker}, {one}" for worker, one in enumerate(told) if one), "")
