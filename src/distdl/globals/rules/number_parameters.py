"""Find the parameters of torch's functions that are numbers: torch takes the value of a tensor without dims there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import Parameter, signature
from types import FunctionType
from typing import Any, NamedTuple

import torch

from distdl.tensors.private_torch import OpOverloadPacket

_NUMBERS = frozenset(["int", "SymInt", "float", "number", "List[int]", "List[SymInt]"])


class Numbers(NamedTuple):
    """The parameters of a function that are numbers in all of its forms: by their places, and by their names."""

    places: frozenset[int]
    names: frozenset[str]


@cache
def numbers_of(function: Callable[..., Any]) -> Numbers:
    """Return the parameters that are numbers or lists of integers, and tensors in no form of the function."""
    at: dict[int, set[str]] = {}
    called: dict[str, set[str]] = {}
    for parameters in _forms(function):
        for place, (name, kind, is_placed) in enumerate(parameters):
            called.setdefault(name, set()).add(kind)
            if is_placed:
                at.setdefault(place, set()).add(kind)
    known = _NUMBERS | {"Dimname", "str", "Optional[str]"}  # kinds that are no tensor

    def are_numbers(kinds: set[str]) -> bool:
        return kinds <= known and bool(kinds & _NUMBERS)

    return Numbers(
        frozenset(place for place, kinds in at.items() if are_numbers(kinds)),
        frozenset(name for name, kinds in called.items() if are_numbers(kinds)),
    )


def _forms(function: Any) -> list[list[tuple[str, str, bool]]]:
    """Return the parameters of each form of a function: their names, kinds, and whether they may be passed by place."""
    if isinstance(function, FunctionType):
        try:
            found = signature(function).parameters.values()
        except ValueError:
            return []
        return [[(one.name, _annotated(one), one.kind is not Parameter.KEYWORD_ONLY) for one in found]]
    packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    if not isinstance(packet, OpOverloadPacket):
        return []
    schemas = [getattr(packet, name)._schema.arguments for name in packet.overloads()]
    return [
        [(one.name, _required(str(one.type)), not one.kwarg_only) for one in arguments]
        for arguments in schemas
        if arguments and str(arguments[0].type) in ("Tensor", "List[Tensor]")
    ]


def _required(kind: str) -> str:
    return kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind


def _annotated(parameter: Parameter) -> str:
    """Return the kind of a parameter of a function in Python: that of a number, or ``unknown``."""
    annotation, default = parameter.annotation, parameter.default
    if annotation is Parameter.empty:
        return type(default).__name__ if type(default) in (int, float) else "unknown"
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", None) or str(annotation)
    if str(annotation) == "list[int]":
        return "List[int]"
    kinds = set(_required(text).replace(" ", "").split("|")) - {"None"}
    return "float" if kinds & {"int", "float"} and kinds <= {"int", "float", "str"} else "unknown"
