"""Arguments and results of a step: the tensors in them, and all else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import torch

from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def described(structure: Any, tensors: list[torch.Tensor], named: list[Any]) -> Any:
    """What tells arguments from others for which a line would be another one: a key.

    Of a global tensor the layout counts, and the block; of all else that is no number or text, which object it is.

    Args:
        tensors: the plain tensors are appended to it.
        named: what the key names by its id, which has to live as long as the key.
    """
    kind = type(structure)
    if kind is GlobalTensor:
        block = block_of(structure)
        tensors.append(block)
        named.append(structure._layout)
        return kind, id(structure._layout), _tensor(block)
    if kind in _TENSORS:
        tensors.append(structure)
        return kind, _tensor(structure)
    if kind in _PLAIN:
        return kind, structure
    if isinstance(structure, (tuple, list)):
        return kind, *[described(one, tensors, named) for one in structure]
    if kind is dict:
        return kind, tuple(structure), *[described(one, tensors, named) for one in structure.values()]
    named.append(structure)
    return kind, id(structure)


def _tensor(one: torch.Tensor) -> Any:
    strides = one.layout is torch.strided and one.stride()
    return one.shape, strides, one.dtype, one.device, one.requires_grad, one.is_leaf


def overlaps(tensors: list[torch.Tensor]) -> Any:
    """Which of several tensors begin at the same place in memory, and which are the same tensor."""
    if len(tensors) < 2:
        return None
    places = [one.data_ptr() if one.numel() else -1 - n for n, one in enumerate(tensors)]
    ids = list(map(id, tensors))
    if len(set(places)) == len(set(ids)) == len(places):
        return None
    return tuple(map(places.index, places)), tuple(map(ids.index, ids))


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Numbers that change when tensors are written; -1 for those of inference mode, which have none."""
    return [-1 if one.is_inference() else one._version for one in tensors]


def others_in(structure: Any) -> Iterator[torch.Tensor]:
    """The tensors of classes of which nobody knows what they mean, as those of users."""
    if isinstance(structure, torch.Tensor):
        if type(structure) not in (GlobalTensor, *_TENSORS):
            yield structure
    elif isinstance(structure, (tuple, list, dict)):
        for one in structure.values() if isinstance(structure, dict) else structure:
            yield from others_in(one)


def leaves_of(structure: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What is in tuples, lists and dicts, each with a name as in Python: ``x[0]['a']``."""
    if isinstance(structure, (tuple, list)):
        for place, one in enumerate(structure):
            yield from leaves_of(one, f"{name}[{place}]")
    elif isinstance(structure, dict):
        for key, one in structure.items():
            yield from leaves_of(one, f"{name}[{key!r}]")
    else:
        yield name, structure


def for_people(args: Any, kwargs: Any) -> dict[str, str]:
    """What arguments are, by their names, for people: of tensors how they look, of numbers and texts their values."""
    leaves = (*leaves_of(args, "argument"), *(each for key in kwargs for each in leaves_of(kwargs[key], key)))
    return {name: _told(one) for name, one in leaves}


def _told(one: Any) -> str:
    if isinstance(one, torch.Tensor):
        gradient = ", requires a gradient" if one.requires_grad else ""
        return f"a tensor of the shape {tuple(one.shape)}, {one.dtype}{gradient}"
    return repr(one)[:60] if type(one) in _PLAIN else f"a {type(one).__name__}"


def changed(before: dict[str, str], now: dict[str, str]) -> str:
    """What of the arguments is another thing, as a part of a sentence."""
    if before.keys() != now.keys():
        return f"other arguments are given: {', '.join(now) or 'none'}"
    for name, text in now.items():
        if before[name] != text:
            return f"{name} was {before[name]}, and is {text}"
    return (
        "no argument looks different: a layout or strides did, or what the function reads beside its arguments, as a "
        "parameter's requires_grad, a number of a module or an optimiser, or what an object, list or dict holds"
    )


class Result:
    """How what a step gives is made of the plain tensors in it.

    Args:
        structure: what it has given.
    Attributes:
        tensors: these.
        others: all else in it, a thing that is no number or text by its id.
    """

    def __init__(self, structure: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self._make = self._maker(structure)

    def made(self, tensors: list[torch.Tensor]) -> Any:
        """The same of other tensors."""
        return self._make(tensors)

    def _maker(self, one: Any) -> Callable[[list[torch.Tensor]], Any]:
        kind = type(one)
        if isinstance(one, torch.Tensor):
            place = len(self.tensors)
            self.tensors.append(block_of(one) if type(one) is GlobalTensor else one)
            if type(one) is GlobalTensor:
                layout, strides, offset = one._layout, one._strides, one._offset

                def made(tensors: list[torch.Tensor]) -> GlobalTensor:
                    y = GlobalTensor._of(tensors[place], layout)
                    y._strides, y._offset = strides, offset
                    return y

                return made
            return lambda tensors: tensors[place]
        if isinstance(one, (tuple, list)):
            makers = [self._maker(item) for item in one]
            if hasattr(kind, "_fields"):
                return lambda tensors: kind(*[make(tensors) for make in makers])
            return lambda tensors: kind([make(tensors) for make in makers])
        if isinstance(one, dict):
            named = {key: self._maker(item) for key, item in one.items()}
            if kind is dict:
                return lambda tensors: {key: make(tensors) for key, make in named.items()}
            try:
                empty = _filled(one, dict.fromkeys(one))
            except Exception:  # a class that cannot be copied or written: another object in each recording
                self.others.append((kind, id(one)))
                return lambda tensors: one
            return lambda tensors: _filled(empty, {key: make(tensors) for key, make in named.items()})
        self.others.append((kind, one if kind in _PLAIN else id(one)))
        return lambda tensors: one


def _filled(one: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of a dict of a class of its own, as models give them, with other values."""
    made = copy(one)
    for key, item in items.items():
        made[key] = item
    return made
