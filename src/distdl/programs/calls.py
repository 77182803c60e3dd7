"""What a step is made of: its calls in a line, and the values that go from one to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Value(int):
    """The number of a value of a step: of a tensor, or of an object that a call has given."""

    def __repr__(self) -> str:
        return f"v{int(self)}"


class Lies(NamedTuple):
    """How a value lies in memory.

    Attributes:
        memory: the number of its memory: the same for values that share it.
    """

    memory: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Source(NamedTuple):
    """Where a tensor comes from that a step has not computed.

    Attributes:
        kind: ``argument``; ``tensor`` (a parameter or a buffer); ``block`` and ``gradient`` of a tensor; ``constant``.
        of: the number of the argument, or the tensor.
        name: for people.
    """

    kind: str
    of: Any
    name: str = ""

    def now(self, arguments: list[torch.Tensor]) -> torch.Tensor:
        """The tensor as it is now."""
        tensor: torch.Tensor
        if self.kind == "argument":
            tensor = arguments[self.of]
        elif self.kind == "block":
            tensor = self.of._block
        elif self.kind == "gradient":
            tensor = leaf_of(self.of).grad
        else:
            tensor = self.of
        return tensor


def leaf_of(tensor: Any) -> Any:
    """The plain tensor that has the gradient of a parameter: of a global tensor, its block."""
    return tensor.__dict__.get("_block", tensor)


@dataclass
class Call:
    """One call of a line.

    Attributes:
        kind: ``operator`` (of torch), ``function`` (of ours), ``begin`` and ``wait`` (of messages), ``gradient`` (sets
            that of a parameter).
        function: what is called; of a gradient, whose it is.
        args, kwargs: with a :class:`Value` in the place of each tensor, also in tuples and lists.
        results: the values that it gives, in a structure of tuples and lists; None for what nobody needs.
        writes: whether it writes into tensors, or does something else beside giving its results.
        shapes: of the results that are tensors.
        path: of the module in whose forward, or in the backward of whose forward it is.
        line: the user's.
        sends, receives: of messages that begin: the other worker and bytes, of each.
    """

    kind: str
    function: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: Any = None
    writes: bool = True
    shapes: dict[Value, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    path: str = ""
    line: str = ""
    sends: list[tuple[int, int]] = field(default_factory=list)
    receives: list[tuple[int, int]] = field(default_factory=list)

    def read(self) -> Iterator[Value]:
        """The values that it takes."""
        yield from values_in(self.args)
        yield from values_in(tuple(self.kwargs.values()))

    def given(self) -> Iterator[Value]:
        """The values that it gives."""
        yield from values_in(self.results)

    @property
    def label(self) -> str:
        """The name of the layer whose messages begin."""
        owner = getattr(self.function, "__self__", None)
        label = getattr(owner, "label", None) or getattr(getattr(owner, "operator", None), "label", None)
        return str(label) if label is not None else self.name

    @property
    def name(self) -> str:
        """What it calls, for people."""
        if self.kind == "operator":
            return str(self.function)
        return str(getattr(self.function, "__qualname__", None) or type(self.function).__name__)


@dataclass
class Step:
    """A recorded step of one worker.

    Attributes:
        calls: in their order.
        sources: of the values that come from outside.
        result: what the step gives, with values in the place of tensors.
        lies: how values lie in memory: those that are tensors of torch's own memory.
    """

    calls: list[Call]
    sources: dict[Value, Source]
    result: Any = None
    lies: dict[Value, Lies] = field(default_factory=dict)


def values_in(structure: Any) -> Iterator[Value]:
    """The values in tuples, lists and dicts."""
    kind = type(structure)
    if kind is Value:
        yield structure
    elif kind is tuple or kind is list:
        for one in structure:
            yield from values_in(one)
    elif kind is dict:
        for one in structure.values():
            yield from values_in(one)


def mapped(structure: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure of tuples and lists, with each thing in it changed."""
    kind = type(structure)
    if kind is tuple or kind is list:
        return kind([mapped(one, change) for one in structure])
    return change(structure)
