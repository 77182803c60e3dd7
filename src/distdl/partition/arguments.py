"""The arguments of public functions and constructors: each is checked against the type that its signature names."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Real
from operator import index
from typing import Any, ParamSpec, Required, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import ArrayLike

from distdl.partition.layout import Layout
from distdl.partition.partition import Partition
from distdl.transport.communicator import Communicator

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")

_SHOWN = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", types.NoneType: "None"}
_JUDGED = (slice, Communicator, Partition, Layout, torch.Tensor, torch.nn.Module, torch.dtype, torch.optim.Optimizer)


def checks_arguments(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Check that all arguments fit the signature, and that each has the type that is named there.

    Judged are whole numbers, numbers, booleans, strings, partitions, tensors, modules, dtypes, optimisers, functions,
    and unions of these; what else a signature names, the function checks itself. Where several classes share a
    constructor, the error names the class.

    Raises: TypeError, on every worker, that names the argument, says what it has to be, and what it is.
    """
    expected = signature(make)
    is_constructor = next(iter(expected.parameters), "") == "self"

    @wraps(make)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Made:
        name = type(args[0]).__name__ if is_constructor and args else make.__name__
        try:
            given = expected.bind(*args, **options)
        except TypeError:
            _check_partitions(name, make, {**dict(zip(expected.parameters, args, strict=False)), **options})
            called = f"{name}.__init__()" if is_constructor else f"{name}()"
            try:
                return make(*args, **options)
            except TypeError as problem:  # Python's, which names the function and not the class
                raise TypeError(str(problem).replace(f"{make.__qualname__}()", called)) from None
        hints = _hints(make)
        for argument, value in given.arguments.items():
            inside = value if expected.parameters[argument].kind is Parameter.VAR_KEYWORD else {argument: value}
            for key, one in inside.items():
                if key in hints and not fits(one, hints[key]):
                    raise _misfit(name, make, key, one, hints[key])
        return make(*args, **options)

    return checked


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has a type. What cannot be judged fits."""
    origin = get_origin(hint)
    if hint == ArrayLike:  # (a union with everything in it; here it stands for whole numbers)
        return _is_array_of_whole_numbers(value)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in get_args(hint))
    if origin is Required:
        return fits(value, get_args(hint)[0])
    if Callable in (hint, origin):
        return callable(value)
    if origin is np.ndarray:
        return isinstance(value, np.ndarray)
    if origin is Sequence:
        return _is_sequence(value) and all(fits(one, get_args(hint)[0]) for one in value)
    if Iterable in (hint, origin):
        return isinstance(value, Iterable) and not isinstance(value, str)
    if hint is int:
        return _is_whole(value)
    if hint is float:
        return isinstance(value, (Real, np.number)) or (isinstance(value, torch.Tensor) and not value.dim())
    if hint is bool:
        return isinstance(value, (bool, np.bool_)) or (_is_whole(value) and value in (0, 1))
    if hint in (str, types.NoneType) or (isinstance(hint, type) and issubclass(hint, _JUDGED)):
        return isinstance(value, hint)
    return True


def _is_sequence(value: Any) -> bool:
    try:
        return len(value) >= 0 and not isinstance(value, (str, Mapping))
    except TypeError:
        return False


def _is_array_of_whole_numbers(value: Any) -> bool:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return False
    return array.dtype.kind in "iub" or (array.dtype.kind == "f" and bool((array == array.round()).all()))


def _is_whole(value: Any) -> bool:
    try:
        index(value)
    except (TypeError, RuntimeError):
        return False
    return True


@cache
def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    """The types that a signature names, those of a TypedDict of options included."""
    hints = get_type_hints(make)
    for name, parameter in signature(make).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD and name in hints:
            (options,) = get_args(hints.pop(name)) or (None,)
            hints |= get_type_hints(options, include_extras=True) if options is not None else {}
    return hints


def _misfit(name: str, make: Callable[..., Any], argument: str, value: Any, hint: Any) -> TypeError:
    _check_partitions(name, make, {argument: value})
    return TypeError(f"{name} needs {argument} to be {_shown(hint)}; got {_brief(value)}")


def _check_partitions(name: str, make: Callable[..., Any], given: dict[str, Any]) -> None:
    """Code that is ported from torch passes numbers by position, and Python would only say what is then missing."""
    for argument in ("P_x", "P_y", "P_w"):
        value = given.get(argument)
        if value is not None and not isinstance(value, Partition):
            listed = ", ".join(one if one.startswith("P_") else f"{one}=..." for one in _required(make))
            raise TypeError(
                f"{name} takes {_brief(value)} for {argument}, which has to be a partition; behind the partitions, "
                f"give the arguments by name: {name}({listed})"
            )


def _required(make: Callable[..., object]) -> Iterator[str]:
    """The names of the arguments that have no default, those of a TypedDict included."""
    for name, parameter in signature(make).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            yield from (option for option, hint in _hints(make).items() if get_origin(hint) is Required)
        elif parameter.default is Parameter.empty and name != "self":
            yield name


def _shown(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_shown(one) for one in get_args(hint))
    if get_origin(hint) is Required:
        return _shown(get_args(hint)[0])
    if hint == ArrayLike:
        return "whole numbers"
    if get_origin(hint) is Sequence:
        return f"a sequence, each item {_shown(get_args(hint)[0])}"
    if hint in _SHOWN:
        return _SHOWN[hint]
    return f"a {hint.__name__}" if isinstance(hint, type) else "a function" if "Callable" in str(hint) else str(hint)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
