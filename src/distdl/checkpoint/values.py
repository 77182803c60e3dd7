"""Values that are not tensors of a model: options of optimisers, states of schedulers. As JSON, and back.

Reading builds numbers, strings and containers, and nothing else.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Container
from itertools import count
from typing import Any

import numpy as np
import torch


def encode(value: Any, path: str, keep: Callable[[str, torch.Tensor], str]) -> Any:
    """What stands in JSON for a value.

    Args:
        value: None, a bool, number or string; a tuple, list, dict or Counter of these; or a tensor.
        path: what it is, for errors, and to name the tensors in it.
        keep: is handed each tensor in it, with a name; returns the name under which it is to be found.
    Raises: ValueError for anything else.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return {"tensor": keep(path, value)}
    if type(value) in (list, tuple):
        items = [encode(item, f"{path}/{place}", keep) for place, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) in (dict, OrderedDict, Counter):
        kind = "counter" if type(value) is Counter else "dict"
        pairs = [
            [encode(key, f"{path}/key", _no_tensor), encode(one, f"{path}/{key}", keep)] for key, one in value.items()
        ]
        return {kind: pairs}
    raise ValueError(
        f"a checkpoint keeps None, numbers, strings, tensors, and tuples, lists and dicts of these; {path} is a "
        f"{type(value).__name__}"
    )


def decode(found: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value for which this stands in JSON.

    Args:
        tensor: gives the tensor of a name.
    Raises: ValueError if it stands for none.
    """
    if found is None or isinstance(found, (bool, int, float, str)):
        return found
    if isinstance(found, list):
        return [decode(item, tensor) for item in found]
    if isinstance(found, dict) and len(found) == 1:
        ((kind, inside),) = found.items()
        if kind == "float" and inside in ("nan", "inf", "-inf"):
            return float(inside)
        if kind == "tensor" and isinstance(inside, str):
            return tensor(inside)
        if kind == "tuple" and isinstance(inside, list):
            return tuple(decode(item, tensor) for item in inside)
        if kind in ("dict", "counter") and _are_pairs(inside):
            pairs = {decode(key, tensor): decode(one, tensor) for key, one in inside}
            return Counter(pairs) if kind == "counter" else pairs
    raise ValueError(f"{str(found)[:80]} stands for no value")


def _are_pairs(inside: Any) -> bool:
    """Whether it is a list of pairs, each of a key and a value."""
    return isinstance(inside, list) and all(
        isinstance(pair, list) and len(pair) == 2 and not isinstance(pair[0], list) for pair in inside
    )


def free(name: str, taken: Container[str]) -> str:
    """A name that is not taken: this one, or it with a number. (Keys of a dict may read alike: 1 and "1".)"""
    names = (f"{name}~{number}" for number in count(1))
    return name if name not in taken else next(one for one in names if one not in taken)


def _no_tensor(path: str, tensor: torch.Tensor) -> str:
    raise ValueError(f"a checkpoint keeps no dict whose keys are tensors; {path} is one")
