"""What the worker that runs a function tells the others of its results: their structure, and facts of each tensor."""

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
    """A result tensor, on the worker that runs the function.

    Attributes:
        dtype: the code of its dtype.
        gradient: whether it requires a gradient.
        same: the place of the input that it is; -1 if it is none.
        written: whether the function has written that input.
        view: the place of the input in whose storage it lies; -1 if it has its own.
        strides: its strides; ``()`` means contiguous.
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
        """Describe a tensor beside the inputs of the function. Raises TypeError if it is sparse or nested."""
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
    """The result of a function as values that can be sent. Of named tuples, only torch's own are kept.

    Attributes:
        result: the structure of the result, with empty tensors.
        kind: its class in ``torch.return_types``; empty if it is of none.
        tensors: a ``Described`` for each tensor of the result, and then for each input that was written and not
            returned, as by ``torch._foreach_add_``.
        beside: the places of the replicated tensors that were written.
    """

    result: Any
    kind: str
    tensors: Sequence[Sequence[Any]]
    beside: Sequence[int]

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return the result with these tensors in the places of the empty ones."""
        rest = iter(tensors)
        result = map_tensors(self.result, lambda _: next(rest))
        return getattr(torch.return_types, self.kind)(result) if self.kind else result


def observed(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[torch.Tensor],
    beside: Sequence[torch.Tensor] = (),
) -> tuple[list[torch.Tensor], Outcome]:  # fmt: skip
    """Call a function. Returns the tensors of its outcome, and the outcome to tell other workers.

    Args:
        inputs: the gathered arguments; ``beside``: the replicated ones.
    Raises: TypeError if a result is sparse or nested, or a tuple of a class that is not torch's.
    """
    writes_seen = Writes(func, [*inputs, *beside])
    result = func(*args, **kwargs)
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
            f"its result has a {type(value).__name__}, a class of tuples that other workers cannot rebuild; give a "
            "tuple or a dict, or give the function a handler by distdl.register"
        )
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ():
        _check_tuples(one)
