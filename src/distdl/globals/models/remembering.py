"""What torch's operators make of tensors without memory, asked once for the same shapes.

A part of torch computes these shapes in Python, for a batch norm in milliseconds, and rehearsals of a model for many
grids meet the same ones again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distdl.workers.footprint import Footprint, is_made_of_others

Key = tuple[Any, ...]
Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides and dtype of a new tensor
Results = tuple[type[Any] | None, list[Made | int | None]]
"""A tuple or list, or one result alone: of each what is new, or which of the arguments it is, or that it is None."""


class Memory(dict[Key, Results | None]):
    """What is known of each call; None of those whose results torch has to make."""


class Remembering(Footprint):
    """Counts tensors without memory, and makes the results of operators that are known."""

    def __init__(self, known: Memory) -> None:
        super().__init__(meta=True)
        self._known = known

    def _compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func.is_view or (func._schema.is_mutable and torch.Tag.pointwise not in func.tags):
            return func(*args, **kwargs)
        given: list[torch.Tensor] = []
        try:
            key = (func, torch.get_default_dtype(), _key(args, given), _key(tuple(kwargs.items()), given))
        except _Unknown:
            return func(*args, **kwargs)
        if key not in self._known:
            result = func(*args, **kwargs)
            same = key == (*key[:2], _key(args, []), _key(tuple(kwargs.items()), []))  # (out= may have been resized)
            self._known[key] = _noted(result, given) if same else None
            return result
        results = self._known[key]
        if results is None:
            return func(*args, **kwargs)
        kind, each = results
        made = [_made(one, given) for one in each]
        return made[0] if kind is None else kind(made)


class _Unknown(Exception):
    """An argument that has a memory, or whose results depend on more than shapes."""


def _key(value: Any, given: list[torch.Tensor]) -> Any:
    """What the shapes of results depend on. Tensors are added to a list.

    Raises: _Unknown
    """
    if isinstance(value, torch.Tensor):
        if not _is_told_by_shape(value):
            raise _Unknown
        given.append(value)
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), tuple([_key(one, given) for one in value])
    if type(value).__hash__ is None:  # (as of dicts)
        raise _Unknown
    return type(value), value


def _is_told_by_shape(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what its shape, strides and dtype say, and nothing else."""
    if is_made_of_others(tensor) or not tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())


def _noted(result: Any, given: Sequence[torch.Tensor]) -> Results | None:
    """What a call has given; None if that cannot be made again from shapes alone."""
    kind = type(result) if type(result) in (tuple, list) else None
    listed = [result] if kind is None else list(result)
    met = {one.untyped_storage()._cdata for one in given}
    each: list[Made | int | None] = []
    for one in listed:
        place = next((place for place, other in enumerate(given) if other is one), None)
        if one is None or place is not None:
            each.append(place)
            continue
        if not isinstance(one, torch.Tensor) or not _is_told_by_shape(one):
            return None
        storage = one.untyped_storage()
        least = 1 + sum((n - 1) * step for n, step in zip(one.shape, one.stride(), strict=True)) if one.numel() else 0
        if storage._cdata in met or storage.nbytes() != least * one.itemsize:
            return None
        met.add(storage._cdata)
        each.append((tuple(one.shape), one.stride(), one.dtype))
    return kind, each


def _made(one: Made | int | None, given: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if one is None or isinstance(one, int):
        return None if one is None else given[one]
    shape, strides, dtype = one
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
