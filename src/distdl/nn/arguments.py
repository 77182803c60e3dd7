"""The arguments of the constructors of layers: partitions, and after them numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import ParamSpec, Required, TypeVar, get_args, get_origin, get_type_hints

from distdl.partition import Partition

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


def takes_partitions(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Check that the arguments ``P_x``, ``P_y`` and ``P_w`` are partitions, and that all arguments fit.

    Code that is ported from torch passes numbers by position, and Python would only say what is then missing. Where
    several classes share a constructor, Python would also name the function and not the class.

    Raises: TypeError, on every worker, that names the class and says what was taken for a partition and what to write,
        or which argument does not fit.
    """
    expected = signature(make)
    names = list(expected.parameters)

    @wraps(make)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Made:
        given = {**dict(zip(names, args, strict=False)), **options}
        layer = type(args[0]).__name__ if names[0] == "self" else make.__name__
        for name in ("P_x", "P_y", "P_w"):
            value = given.get(name)
            if value is not None and not isinstance(value, Partition):
                listed = ", ".join(one if one.startswith("P_") else f"{one}=..." for one in _required(make))
                raise TypeError(
                    f"{layer} takes {value!r} for {name}, which has to be a partition; behind the partitions, give the "
                    f"arguments by name: {layer}({listed})"
                )
        try:
            return make(*args, **options)
        except TypeError as problem:
            if _fit(expected, args, options):
                raise
            called = f"{layer}.__init__" if names[0] == "self" else layer
            raise TypeError(str(problem).replace(f"{make.__qualname__}()", f"{called}()")) from None

    return checked


def _fit(expected: Signature, args: tuple[object, ...], options: dict[str, object]) -> bool:
    """Whether Python can call a function of this signature with these arguments."""
    try:
        expected.bind(*args, **options)
    except TypeError:
        return False
    return True


def _required(make: Callable[..., object]) -> Iterator[str]:
    """The names of the arguments that have no default, those of a TypedDict included."""
    for name, parameter in signature(make).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            (options,) = get_args(get_type_hints(make)[name])
            hints = get_type_hints(options, include_extras=True)
            yield from (option for option, hint in hints.items() if get_origin(hint) is Required)
        elif parameter.default is Parameter.empty and name != "self":
            yield name
