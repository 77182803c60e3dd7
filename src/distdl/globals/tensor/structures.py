"""Tensors in nested tuples, lists and dicts, as functions take and give them: to find them, or to replace each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from numbers import Number
from typing import Any

import torch

_NO_TENSORS = frozenset([type(None), bool, int, float, str, torch.dtype, torch.device])
_OF_TORCH = torch.dtype, torch.device, torch.layout, torch.memory_format
_PLAIN = torch.Tensor, Number, str, type(None), *_OF_TORCH


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in their order."""
    found: list[torch.Tensor] = []
    _collect((value,), found)
    return found


def opaque_in(value: Any) -> Any:
    """The first value in a structure that is no tensor, number, text or constant of torch; None if there is none."""
    if isinstance(value, (tuple, list, dict)):
        each = value.values() if isinstance(value, dict) else value
        return next((one for one in map(opaque_in, each) if one is not None), None)
    return None if isinstance(value, _PLAIN) else value


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for one in values:
        if type(one) in _NO_TENSORS:
            continue
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (tuple, list)):
            if not _NO_TENSORS.issuperset(map(type, one)):  # most are strides, paddings and the like
                _collect(one, found)
        elif isinstance(one, dict):
            _collect(one.values(), found)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure of tuples, lists and dicts, with the result of a function in the place of each tensor."""
    kind = type(value)
    if kind in _NO_TENSORS:  # first, as most arguments are
        return value
    if kind is tuple:
        return tuple([map_tensors(item, change) for item in value]) if value else value
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        changed = [map_tensors(item, change) for item in value]
        return kind._make(changed) if hasattr(value, "_fields") else kind(changed)
    if isinstance(value, dict):
        found = {name: map_tensors(item, change) for name, item in value.items()}
        return found if kind is dict else _of_kind(value, found)
    return value


def _of_kind(value: dict[Any, Any], found: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of a dict of another class with other values; a plain dict if the class lets none be written.

    The class is kept because such a dict may have attributes, or other ways to read it.
    """
    if all(found[name] is item for name, item in value.items()):
        return value
    try:
        made = copy(value)
        for name, item in found.items():
            made[name] = item
    except Exception:  # whatever a user's class raises
        return found
    return made
