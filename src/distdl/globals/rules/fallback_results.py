"""What a function gives that runs on one worker, as the others are told of it: its values, and what its tensors are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from distdl.geometry.boxes import Shape
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.torch_dispatch import NO_BLOCKS
from distdl.globals.views.writes import Writes
from distdl.tensors.dtypes import dtype_code

_KINDS = "torch.return_types"  # the module of the named tuples of torch's functions
_EMPTY = torch.empty(0, device="cpu")


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
    """What a function gives, as it can be sent. Of classes of tuples, only torch's named ones are kept.

    Attributes:
        result: its structure, with empty tensors.
        kind: which of ``torch.return_types`` it is; empty if it is none.
        tensors: those of the result, in their order, and behind them the inputs that were written and are not among
            them, as by ``torch._foreach_add_``.
        beside: which of the tensors that every worker has were written.
    """

    result: Any
    kind: str
    tensors: Sequence[Sequence[Any]]
    beside: Sequence[int]

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The result, of these tensors."""
        rest = iter(tensors)
        result = map_tensors(self.result, lambda _: next(rest))
        return getattr(torch.return_types, self.kind)(result) if self.kind else result


def observed(
    result: Any, inputs: Sequence[torch.Tensor], beside: Sequence[torch.Tensor], writes_seen: Writes
) -> tuple[list[torch.Tensor], Outcome]:
    """The tensors of an outcome, and the outcome.

    Raises: TypeError if one of them is no dense tensor, or for a class of tuples that is not torch's.
    """
    kind, tensors = "", tensors_in(result)
    if type(result).__module__ == _KINDS:
        kind, result = type(result).__name__, tuple(result)
    _check_tuples(result)
    returned = set(map(id, tensors))
    tensors += [one for one in inputs if writes_seen.into(one) and id(one) not in returned]
    described = [Described.of(one, inputs, writes_seen) for one in tensors]
    written = [place for place, one in enumerate(beside) if writes_seen.into(one)]
    return tensors, Outcome(map_tensors(result, lambda _: _EMPTY), kind, described, written)


def _check_tuples(value: Any) -> None:
    if isinstance(value, tuple) and type(value) not in (tuple, torch.Size):
        raise TypeError(
            f"its result has a {type(value).__name__}, a class of tuples that is not kept where one worker computes; "
            "give a tuple or a dict, or enter the function with distdl.register"
        )
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ():
        _check_tuples(one)
