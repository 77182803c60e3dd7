"""Tensors in nested tuples, lists and dicts, as functions take and give them: to find them, and to change each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from gc import get_referents
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_NO_TENSORS = frozenset([type(None), bool, int, float, str, torch.dtype, torch.device])
_OF_PROGRAMS = type, ModuleType, FunctionType, CodeType  # (which refer to all that a program has)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in their order."""
    found: list[torch.Tensor] = []
    _collect((value,), found)
    return found


def holds_tensors(value: Any) -> bool:
    """Whether an object that is no structure refers to a tensor, also by others: what it consists of, its attributes.

    (An iterator, which may be read once, refers to what it is of, and a generator to its variables.)
    """
    seen: dict[int, Any] = {}
    rest = [value]
    while rest:
        one = rest.pop()
        if issubclass(type(one), torch.Tensor):
            return True
        if id(one) not in seen and not issubclass(type(one), _OF_PROGRAMS):
            seen[id(one)] = one
            rest += get_referents(one)
    return False


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for one in values:
        if type(one) in _NO_TENSORS:
            continue
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (tuple, list)):
            if not _NO_TENSORS.issuperset(map(type, one)):  # (strides, paddings: most, at a glance)
                _collect(one, found)
        elif isinstance(one, dict):
            _collect(one.values(), found)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure of tuples, lists and dicts, with each tensor in it changed."""
    kind = type(value)
    if kind in _NO_TENSORS:  # (most arguments, at a glance)
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
    """A dict of a class of its own with other values: it may have attributes, or more ways to read it."""
    if all(found[name] is item for name, item in value.items()):
        return value
    try:
        made = copy(value)
        for name, item in found.items():
            made[name] = item
    except Exception:  # (some classes may not be written)
        return found
    return made
