"""Whether two recordings of a step are the same line: then whatever differs between steps comes from outside."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

import torch

from distdl.programs.calls import Call, Step, Value
from distdl.tensors.memory import parts_of


def difference(first: Step, second: Step) -> tuple[str, str] | None:
    """In what two recordings differ, with the user's line; None if they are the same line."""
    for one, other in zip(first.calls, second.calls, strict=False):
        if one.kind != other.kind or not alike(one.function, other.function):
            return f"two calls of it did different things: {_told(one)}, and {_told(other)}", other.line
        for name, mine, theirs in (
            ("gets", (one.args, one.kwargs), (other.args, other.kwargs)),
            ("gives", one.results, other.results),
        ):
            found = _apart(mine, theirs)
            if found is not None:
                return f"{_told(other)} {name} another thing each time: {found[0]}, and {found[1]}", other.line
    if len(first.calls) != len(second.calls):
        return f"two calls of it took {len(first.calls)} and {len(second.calls)} operators and messages", ""
    found = _apart(first.result, second.result)
    if found is not None:
        return f"its result is another thing each time: {found[0]}, and {found[1]}", ""
    for value, source in second.sources.items():
        before = first.sources.get(value)
        if before is None or before.kind != source.kind:
            return "two calls of it read different tensors", source.name
        if source.kind == "constant":
            if before.of is not source.of and not (source.of.is_cpu and same_bits(before.of, source.of)):
                shape = list(source.of.shape)
                return f"a tensor of the shape {shape}, which is no argument, parameter or buffer, changes", source.name
        elif before.of is not source.of and not (source.kind == "argument" and before.of == source.of):
            return f"two calls of it read different tensors for {source.name}", ""
    return None


def _told(call: Call) -> str:
    return call.name if call.kind in ("operator", "function") else f"the {call.kind} of {call.name}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, and lie in memory in the same way. On a GPU, it waits for them."""
    if one is other:
        return True
    if one.layout is not other.layout or one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if one.layout is not torch.strided:
        return all(map(same_bits, parts_of(one), parts_of(other)))
    return one.stride() == other.stride() and one.device == other.device and _bits(one) == _bits(other)


def _bits(tensor: torch.Tensor) -> bytes:
    cells = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return bytes(cells.view(torch.uint8).numpy().tobytes())


def _apart(one: Any, other: Any) -> tuple[Any, Any] | None:
    """The first things in two structures that are not alike."""
    kind = type(one)
    if kind is type(other) and kind in (tuple, list, dict):
        if len(one) != len(other):
            return one, other
        if kind is dict:
            if one.keys() != other.keys():
                return list(one), list(other)
            one, other = list(one.values()), list(other.values())
        return next((found for pair in zip(one, other, strict=True) if (found := _apart(*pair)) is not None), None)
    return None if alike(one, other) else (one, other)


def alike(one: Any, other: Any) -> bool:
    """Whether a call may take either of two things for the other, in any later step."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        return bool(one == other or (one != one and other != other))
    if kind is FunctionType:
        return _same_function(one, other)
    if kind is MethodType:
        return one.__self__ is other.__self__ and alike(one.__func__, other.__func__)
    if isinstance(one, torch.Tensor):
        return False
    if kind in (tuple, list):
        return _apart(one, other) is None
    if kind is Value:
        return int(one) == int(other)
    try:
        return bool(one == other)
    except Exception:  # things that cannot be compared are different
        return False


def _same_function(one: FunctionType, other: FunctionType) -> bool:
    """Whether two functions have the same code, and the same values around it."""
    if one.__code__ is not other.__code__ or not alike(one.__defaults__, other.__defaults__):
        return False
    cells = zip(one.__closure__ or (), other.__closure__ or (), strict=True)
    return all(alike(mine.cell_contents, theirs.cell_contents) for mine, theirs in cells)
