"""The arguments of public functions and constructors over partitions (see :mod:`distdl.environment.arguments`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, signature
from typing import Any, ParamSpec, Required, TypeVar, get_args, get_origin

from distdl.environment import arguments
from distdl.environment.types import judge
from distdl.partition.partition import Partition

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")

Split = Partition | Sequence[int]
"""How a tensor is split: a partition, or the shape of one of all workers."""


def checks_arguments(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Check that all arguments fit the signature, and that each has the type that is named there.

    Raises: TypeError, on every worker, that names the argument, says what it has to be, and what it is; ValueError for
        a number beyond its limits. Of what stands in the place of a partition, it says how the function is called.
    """
    return arguments.checks_arguments(make, _check_partitions)


def _check_partitions(name: str, make: Callable[..., Any], given: dict[str, Any]) -> None:
    """Code that is ported from torch passes numbers by position, and Python would only say what is then missing."""
    for argument, hint in arguments.hints(make).items():
        if argument in given and all(kind in get_args(hint) for kind in get_args(Split)):
            check_split(name, argument, given[argument], hint)
    for argument in ("P_x", "P_y", "P_w"):
        value = given.get(argument)
        if value is not None and not isinstance(value, Partition):
            listed = ", ".join(one if one.startswith("P_") else f"{one}=..." for one in _required(make))
            raise TypeError(
                f"{name} takes {arguments.brief(value)} for {argument}, which has to be a partition; behind the "
                f"partitions, give the arguments by name: {name}({listed})"
            )


def check_split(name: str, argument: str, value: Any, hint: Any = Split) -> None:
    """Check what says how a tensor is split.

    Raises: TypeError for what is no partition and no shape of one, that says how to write them.
    """
    if not judge(hint)(value):
        problem = arguments.misfit(name, argument, value, hint)
        raise TypeError(f"{problem}. Write distdl.world().reshape(1, 1, 2, 2), or its shape, (1, 1, 2, 2)")


def _required(make: Callable[..., object]) -> Iterator[str]:
    """The names of the arguments that have no default, those of a TypedDict included."""
    for name, parameter in signature(make).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            yield from (option for option, hint in arguments.hints(make).items() if get_origin(hint) is Required)
        elif parameter.default is Parameter.empty and name != "self":
            yield name
