"""Arguments and fields: each is checked against the type that a signature, or a class, names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_args, get_type_hints

from distdl.environment.types import Judge, converted, is_anything, judge, shown

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


def checks_arguments(
    make: Callable[Arguments, Made], explain: Callable[[str, Any, dict[str, Any]], None] | None = None
) -> Callable[Arguments, Made]:
    """Check that all arguments fit the signature, and that each has the type that is named there.

    What a signature cannot name, the function checks itself. Of a constructor, the error names the class that is made.
    Where a tuple is named, a list is taken, too, and the function gets a tuple (see
    :func:`distdl.environment.types.converted`).

    Args:
        explain: ``explain(name, make, given)`` may raise a better error for arguments that do not fit.
    Raises: TypeError, on every worker, that names the argument, says what it has to be, and what it is; ValueError for
        a number beyond its limits.
    """

    checks: _Checks | None = None

    @wraps(make)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Made:
        nonlocal checks
        if checks is None:  # at the first call, when all types that annotations name are defined
            checks = _checks_of(make)
        for (_, kind, fits), value in zip(checks.places, args, strict=False):
            if fits is not None and type(value) is not kind and not fits(value):
                args, options = _converted(make, checks, args, options, explain)
                break
        if checks.rest is not None:
            _, kind, fits = checks.rest
            for value in args[len(checks.places) :]:
                if fits is not None and type(value) is not kind and not fits(value):
                    args, options = _converted(make, checks, args, options, explain)
                    break
        for name, value in options.items():
            check = checks.named.get(name)
            if check is not None and check.fits is not None and type(value) is not check.kind and not check.fits(value):
                args, options = _converted(make, checks, args, options, explain)
                break
        try:
            return make(*args, **options)
        except TypeError as problem:
            if problem.__traceback__ is None or problem.__traceback__.tb_next is not None:
                raise
            # Python's, of a call that does not fit the signature, which names the function and not the class
            text, called = str(problem), _name(make, args)
        if explain is not None:
            explain(called, make, {**dict(zip(signature(make).parameters, args, strict=False)), **options})
        called += ".__init__()" if make.__name__ == "__init__" else "()"
        raise TypeError(text.replace(f"{make.__qualname__}()", called))

    return checked


def checks_fields(kind: type[Made]) -> type[Made]:
    """Check the fields of a named tuple when its constructor is called; ``_make`` and ``_replace`` do not.

    Where a field names a tuple, a list is taken, too, as functions take it (see :func:`checks_arguments`). A rule that
    types cannot say stands in a method ``_check`` of the class.
    """
    make: Any = kind.__new__
    rule: Callable[[Any], None] = getattr(kind, "_check", lambda made: None)

    @wraps(make)
    def new(cls: type, *args: Any, **options: Any) -> Any:
        made = make(cls, *args, **options)
        other = _other_fields(made)
        made = made._replace(**other) if other else made
        rule(made)
        return made

    kind.__new__ = new  # type: ignore[method-assign]  # callers see the signature of the class
    return kind


def check_fields(value: object) -> None:
    """Check that each field of a dataclass has the type that its class names.

    It takes a list where it names a tuple, as functions do (see :func:`checks_arguments`).

    Raises: TypeError that names class and field, says what it has to be, and what it is; ValueError for a number beyond
        its limits.
    """
    for name, made in _other_fields(value).items():
        object.__setattr__(value, name, made)


def _other_fields(value: object) -> dict[str, Any]:
    """The fields that have to be of another type, and can be made it.

    Raises: TypeError, or ValueError, if one cannot.
    """
    kind: Any = type(value)
    found = {}
    for name, exact, fits in _fields(kind):
        field = getattr(value, name)
        if fits is not None and type(field) is not exact and not fits(field):
            made = found[name] = converted(hints(kind)[name], field)
            if not fits(made):
                raise misfit(kind.__name__, name, field, hints(kind)[name])
    return found


def known(kind: type[Made], *values: Any) -> Made:
    """A frozen dataclass of these fields, which are known to be right: the library makes thousands of some kinds."""
    made = object.__new__(kind)
    # dataclasses have it
    for name, value in zip(kind.__match_args__, values, strict=False):  # type: ignore[attr-defined]
        object.__setattr__(made, name, value)  # a write to __dict__ would make all later reads of fields slower
    return made


def built(kind: Callable[Arguments, Made], *args: Arguments.args, **options: Arguments.kwargs) -> Made:
    """The same for a class whose constructor checks its arguments: the object, made without these checks.

    A subclass with a constructor of its own is called.
    """
    maker: Any = kind
    make = getattr(maker.__init__, "__wrapped__", None)
    if make is None:
        return kind(*args, **options)
    made: Made = object.__new__(maker)
    make(made, *args, **options)
    return made


@cache
def hints(make: Any) -> dict[str, Any]:
    """The types that a signature or a class names, those of a TypedDict of options included."""
    found = get_type_hints(make, include_extras=True)
    if not isinstance(make, type):
        for name, parameter in signature(make).parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD and name in found:
                (options,) = get_args(found.pop(name)) or (None,)
                found |= get_type_hints(options, include_extras=True) if options is not None else {}
    return found


def misfit(name: str, argument: str, value: Any, hint: Any) -> Exception:
    """The error of a value that is not what it should be."""
    kind = ValueError if judge(hint, False)(value) else TypeError
    return kind(f"{name} needs {argument} to be {shown(hint)}; got {brief(value)}")


def brief(value: Any) -> str:
    """A value for people; by its type alone, if its text is long or has an address, which differs between workers."""
    text = repr(value)
    return text if len(text) <= 80 and " at 0x" not in text else f"a {type(value).__name__}"


class _Check(NamedTuple):
    """How an argument is checked: what is exactly of the kind fits, and that is seen at a glance; else by the judge.

    There is none where everything fits.
    """

    name: str
    kind: type | None
    fits: Judge | None

    @classmethod
    def of(cls, name: str, hint: Any) -> _Check:
        fits = judge(hint)
        return cls(name, hint if isinstance(hint, type) else None, None if fits is is_anything else fits)


class _Checks(NamedTuple):
    """The checks of a function's arguments: by place, of all behind them, by name."""

    places: tuple[_Check, ...]
    rest: _Check | None
    named: dict[str, _Check]


def _checks_of(make: Callable[..., Any]) -> _Checks:
    found = hints(make)
    places, rest = [], None
    for name, parameter in signature(make).parameters.items():
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            places.append(_Check.of(name, found.get(name, object)))
        elif parameter.kind is Parameter.VAR_POSITIONAL and name in found:
            rest = _Check.of(name, found[name])
    return _Checks(tuple(places), rest, {name: _Check.of(name, hint) for name, hint in found.items()})


@cache
def _fields(kind: Any) -> tuple[_Check, ...]:
    return tuple(_Check.of(name, hints(kind)[name]) for name in kind.__match_args__)


def _converted(
    make: Callable[..., Any],
    checks: _Checks,
    args: tuple[Any, ...],
    options: dict[str, Any],
    explain: Callable[[str, Any, dict[str, Any]], None] | None,
) -> Any:
    """The arguments, by place and by name, those that do not fit converted to what the signature names.

    Raises: the error of the first that cannot be.
    """

    def fitting(check: _Check | None, value: Any) -> Any:
        if check is None or check.fits is None or type(value) is check.kind or check.fits(value):
            return value
        made = converted(hints(make)[check.name], value)
        if not check.fits(made):
            raise _misfit(make, args, check.name, value, explain)
        return made

    behind = [checks.rest] * (len(args) - len(checks.places))
    return (
        tuple(fitting(check, value) for check, value in zip((*checks.places, *behind), args, strict=False)),
        {name: fitting(checks.named.get(name), value) for name, value in options.items()},
    )


def _misfit(
    make: Callable[..., Any],
    args: tuple[Any, ...],
    argument: str,
    value: Any,
    explain: Callable[[str, Any, dict[str, Any]], None] | None,
) -> Exception:
    name = _name(make, args)
    if explain is not None:
        explain(name, make, {argument: value})
    return misfit(name, argument, value, hints(make)[argument])


def _name(make: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """What people call a function: a constructor by its class, a method with its class."""
    if make.__name__ == "__init__" and args:
        return type(args[0]).__name__
    owner = make.__qualname__.rpartition(".")[0]
    return make.__name__ if not owner or owner.endswith("<locals>") else f"{owner.rpartition('.')[2]}.{make.__name__}"
