"""What a function gives that runs on one worker, as the others are told of it: its values, and what its tensors are."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from distdl.geometry.boxes import Shape
from distdl.globals.nested import tensors_in
from distdl.globals.tensor import NO_BLOCKS
from distdl.globals.writes import Writes
from distdl.tensors.dtypes import dtype_code


class Described(NamedTuple):
    """A tensor of the worker that runs the function.

    Attributes:
        dtype: its code.
        gradient: whether it requires one.
        same: which input it is; -1 if it is none.
        written: whether the function has written into that input.
        view: in the memory of which input it lies; -1 if in none.
        strides: in memory, where they are not those of a contiguous tensor.
    """

    shape: Shape
    dtype: int
    gradient: bool
    same: int
    written: bool
    view: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, value: torch.Tensor, inputs: Sequence[torch.Tensor], writes_seen: Writes) -> Described:
        """That of a value, from beside the inputs of the function.

        Raises: TypeError if it is no dense tensor.
        """
        if value.layout is not torch.strided or value.is_nested:
            layout = "nested" if value.is_nested else str(value.layout)
            raise TypeError(f"its result is a {layout} tensor, {NO_BLOCKS}")
        same = next((place for place, one in enumerate(inputs) if one is value), -1)
        storage = value.untyped_storage()._cdata
        view = next((place for place, one in enumerate(inputs) if one.untyped_storage()._cdata == storage), -1)
        written = same >= 0 and writes_seen.returned(value)
        strides = () if value.is_contiguous() else value.stride()
        return cls(tuple(value.shape), dtype_code(value.dtype), value.requires_grad, same, written, view, strides)


class Outcome(NamedTuple):
    """What a function gives, in numbers and texts alone.

    Attributes:
        result: its structure, without its tensors.
        tensors: those of the result, in their order, and behind them the inputs that were written and are not among
            them, as by ``torch._foreach_add_``.
        beside: which of the tensors that every worker has were written.
    """

    result: tuple[str, Any]
    tensors: Sequence[Described]
    beside: Sequence[int]


def observed(
    result: Any, inputs: Sequence[torch.Tensor], beside: Sequence[torch.Tensor], writes_seen: Writes
) -> tuple[list[torch.Tensor], Outcome]:
    """The tensors of an outcome, and the outcome.

    Raises: TypeError if one of them is no dense tensor.
    """
    tensors = tensors_in(result)
    returned = set(map(id, tensors))
    tensors += [one for one in inputs if writes_seen.into(one) and id(one) not in returned]
    written = [place for place, one in enumerate(beside) if writes_seen.into(one)]
    described = [Described.of(one, inputs, writes_seen) for one in tensors]
    return tensors, Outcome(_without_tensors(result), described, written)


def _without_tensors(value: Any) -> tuple[str, Any]:
    """What kind of a thing a value is, and what it consists of: of a tensor, nothing."""
    if isinstance(value, torch.Tensor):
        return "tensor", None
    if isinstance(value, dict):
        return "dict", [(name, _without_tensors(one)) for name, one in value.items()]
    if isinstance(value, list):
        return "list", [_without_tensors(one) for one in value]
    if isinstance(value, tuple):
        path = f"{type(value).__module__}:{type(value).__qualname__}"
        return path if _tuples_at(path) is type(value) else "tuple", [_without_tensors(one) for one in value]
    return "value", value


def with_tensors(described: tuple[str, Any], tensors: Iterator[Any]) -> Any:
    """The value of this structure, with tensors in their places."""
    kind, content = described
    if kind == "tensor":
        return next(tensors)
    if kind == "value":
        return content
    if kind == "dict":
        return {name: with_tensors(one, tensors) for name, one in content}
    items = [with_tensors(one, tensors) for one in content]
    if kind == "list":
        return items
    named: Any = _tuples_at(kind) or tuple
    return named._make(items) if hasattr(named, "_make") else named(items)


def _tuples_at(path: str) -> type | None:
    """A class of tuples by the path at which each worker finds it, as one of named tuples; None if it is not there."""
    module, _, name = path.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    if not (isinstance(found, type) and issubclass(found, tuple)):
        return None
    is_made_of_items = hasattr(found, "_make") or module == "torch.return_types" or found is torch.Size
    return found if is_made_of_items else None
