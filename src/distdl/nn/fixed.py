"""What the constructors of layers take: options that are given once, and partitions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

from distdl.partition import Partition

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


class Fixed:
    """An attribute of a layer on which its set-ups depend: the constructor sets it, and nobody after that.

    A change on one worker would let the workers plan differently, and a change on all of them would be ignored where
    a set-up is used again. So both are refused, before anything is sent.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        if layer is None:
            return self
        try:
            return layer.__dict__[self._name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}") from None

    def __set__(self, layer: Any, value: Any) -> None:
        if self._name in layer.__dict__:
            raise AttributeError(
                f"{self._name} of {type(layer).__name__} cannot be changed, as what its workers send each other "
                "follows from it: make a new layer on every worker, and load the parameters into that"
            )
        layer.__dict__[self._name] = value


def takes_partitions(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Check that the arguments ``P_x``, ``P_y`` and ``P_w`` are partitions, before Python counts the arguments.

    Code that is ported from torch passes numbers by position, and Python would only say what is then missing.

    Raises: TypeError, on every worker, that says what was taken for a partition, and what to write.
    """
    parameters = signature(make).parameters
    names = list(parameters)
    required = [name for name in names if parameters[name].default is Parameter.empty and name != "self"]

    @wraps(make)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Made:
        given = {**dict(zip(names, args, strict=False)), **options}
        for name in ("P_x", "P_y", "P_w"):
            value = given.get(name)
            if value is not None and not isinstance(value, Partition):
                layer = type(args[0]).__name__ if names[0] == "self" else make.__name__
                listed = ", ".join(one if one.startswith("P_") else f"{one}=..." for one in required)
                raise TypeError(
                    f"{layer} takes {value!r} for {name}, which has to be a partition; behind the partitions, give the "
                    f"arguments by name: {layer}({listed})"
                )
        return make(*args, **options)

    return checked
