"""The form of an index, checked: one that was altered or forged is an error before anything else relies on it."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from distdl.checkpoint.values import decode


def number(value: Any, least: int = 0) -> int:
    """A whole number.

    Raises: ValueError if it is none, or below the least.
    """
    if type(value) is not int or value < least:
        raise ValueError(f"a number from {least} is needed; it is {str(value)[:80]!r}")
    return value


def is_kind(thing: Any, name: str | None) -> bool:
    """Whether the class of something, or one that it derives from, has a name; True where no name is known."""
    return not name or name in {kind.__name__ for kind in type(thing).__mro__}


def check_facts(facts: dict[str, Any], tensors: Container[str]) -> None:
    """Check what stands in an index besides tensors.

    Args:
        facts: as of :class:`distdl.checkpoint.index.Index`.
        tensors: the keys of those that there are.
    Raises: ValueError.
    """

    def is_value(found: Any) -> bool:
        decode(found, lambda key: _known(key, tensors))
        return True

    scheduler, kind, random = facts["scheduler"], facts["scheduler_kind"], facts["random"]
    _need(scheduler is None or is_value(scheduler), "scheduler", scheduler)
    _need(kind is None or type(kind) is str, "kind of a scheduler", kind)
    _need(_is_dict(facts["extra_state"], is_value), "extra_state", facts["extra_state"])
    if random is not None:
        layers, draws = random["layers"], random["draws"]
        _need(_is_dict(layers, lambda one: _is_list(one, _is_int) and len(one) > 1), "random layers", layers)
        _need(draws is None or _is_draws(draws), "random draws", draws)
    if facts["optimiser"] is not None:
        _check_optimiser(facts["optimiser"], tensors, is_value)


def _check_optimiser(found: Any, tensors: Container[str], is_value: Callable[[Any], bool]) -> None:
    def is_kept(one: Any) -> bool:
        if "tensor" in one:
            return type(one["follows"]) is bool and _known(one["tensor"], tensors) == one["tensor"]
        return is_value(one["value"])

    _need(type(found["kind"]) is str, "kind of an optimiser", found["kind"])
    for group in found["groups"]:
        _need(_is_list(group["params"], lambda one: type(one) is str), "group of an optimiser", group["params"])
        _need(type(group["named"]) is bool, "named of a group", group["named"])
        options = group["options"]
        _need(isinstance(options, dict) and "dict" in options and is_value(options), "options of a group", options)
    further = found.get("besides", {"dict": []})  # absent in checkpoints of early versions
    _need(isinstance(further, dict) and "dict" in further and is_value(further), "besides of an optimiser", further)
    state = found["state"]
    _need(_is_dict(state, lambda kept: _is_dict(kept, is_kept)), "state of an optimiser", state)


def _known(key: str, tensors: Container[str]) -> Any:
    if type(key) is not str or key not in tensors:
        raise ValueError(f"it has no {str(key)[:80]}")
    return key


def _need(claim: bool, what: str, value: Any) -> None:
    if not claim:
        raise ValueError(f"{str(value)[:80]!r} is no {what}")


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(of, value))


def _is_dict(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(of, value.values()))


def _is_draws(value: Any) -> bool:
    seed, counted = value
    return (seed is None or _is_int(seed)) and _is_list(counted, lambda one: _is_list(one, _is_int) and len(one) == 2)
