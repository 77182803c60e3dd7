"""Types at run time: whether a value is of the type that a signature or a class names, and what to call that type."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from numbers import Real
from operator import index
from typing import Annotated, Any, Literal, Required, Union, get_args, get_origin

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class AtLeast:
    """Marks whole numbers that must not be less than a limit."""

    least: int


Count = Annotated[int, AtLeast(0)]

Judge = Callable[[Any], bool]
_SHOWN = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", types.NoneType: "None"}


@cache
def judge(hint: Any, limits: bool = True) -> Judge:
    """A function that says whether a value has a type. What cannot be judged fits.

    A kind of tuple of its own (``torch.Size``, a named tuple) and a lazy mapping are taken to hold what they should.

    Args:
        limits: whether numbers have to be within their limits (see :class:`AtLeast`), too.
    """
    origin, inside = _origin(hint), get_args(hint)
    if hint == ArrayLike:  # NumPy's union accepts everything; here it stands for whole numbers
        return is_array_of_whole_numbers
    if origin in (Union, types.UnionType):
        return partial(_is_one_of, tuple(judge(one, limits) for one in inside))
    if origin is Required:
        return judge(inside[0], limits)
    if origin is Annotated:
        return partial(_is_at_least, inside[1].least) if limits else judge(inside[0])
    if origin is Literal:
        return partial(_is_among, inside)
    if Callable in (hint, origin):
        return callable
    if origin is tuple:
        if inside[1:] == (...,):
            return partial(_is_tuple_of, _judge_all(inside[0], limits))
        return partial(_is_tuple, tuple(judge(one, limits) for one in inside))
    if origin is list:
        return partial(_is_list_of, _judge_all(inside[0], limits))
    if origin is Sequence:
        return partial(_is_sequence_of, _judge_all(inside[0], limits))
    if origin in (Mapping, dict):
        return partial(_is_mapping_of, origin, *(_judge_all(one, limits) for one in inside))
    if Iterable in (hint, origin):
        return _is_iterable
    simple = {int: _is_whole, float: _is_number, bool: _is_truth}.get(hint)
    if simple is not None:
        return simple
    kind = hint if origin is None else origin
    if kind in (Any, object) or not isinstance(kind, type) or hasattr(kind, "__total__"):  # a TypedDict has __total__
        return is_anything
    if getattr(kind, "_is_protocol", False):
        return partial(_has_all, _members(kind))
    return partial(_is_a, kind)


def shown(hint: Any) -> str:
    """What people call a type."""
    origin, inside = _origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(shown(one) for one in inside)
    if origin is Required:
        return shown(inside[0])
    if origin is Annotated:
        return f"{shown(inside[0])} from {inside[1].least}"
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if hint == ArrayLike:
        return "whole numbers"
    if origin in (Sequence, list, tuple) and (origin is not tuple or inside[1:] == (...,)):
        return f"a {origin.__name__.lower()}, each item {shown(inside[0])}"
    if origin is tuple:
        return f"a tuple ({', '.join(shown(one) for one in inside)})"
    if origin in (Mapping, dict):
        return f"a {origin.__name__.lower()} from {shown(inside[0])} to {shown(inside[1])}"
    if hint in _SHOWN:
        return _SHOWN[hint]
    kind = hint if origin is None else origin
    if Callable in (hint, origin) or not isinstance(kind, type):
        return "a function" if Callable in (hint, origin) else str(hint)
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


def converted(hint: Any, value: Any) -> Any:
    """The value as the type names it, where that is a tuple, or has tuples in it, and authors write a list.

    Named tuples, arrays and iterators are taken likewise, as tuples of their items. Everything else stays as it is.
    """
    origin, inside = _origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        found = ((one, converted(one, value)) for one in inside)
        return next((made for one, made in found if judge(one)(made)), value)
    if origin in (Mapping, dict) and isinstance(value, dict):
        return {key: converted(inside[1], one) for key, one in value.items()}
    listed = isinstance(value, (Sequence, Iterator, np.ndarray)) and not isinstance(value, (str, bytes))
    if origin not in (tuple, Sequence) or not listed or getattr(value, "ndim", 1) == 0:
        return value
    items = tuple(value.tolist() if isinstance(value, np.ndarray) else value)
    if origin is Sequence or inside[1:] == (...,):
        return tuple(converted(inside[0], one) for one in items)
    if len(items) != len(inside):
        return items
    return tuple(converted(one, item) for one, item in zip(inside, items, strict=True))


def _origin(hint: Any) -> Any:
    """What a generic type is made from. An alias may be a type of its own, as those of NumPy 2.5 are."""
    found = get_origin(hint)
    return get_origin(found.__value__) if hasattr(found, "__value__") else found


def _judge_all(hint: Any, limits: bool) -> Judge:
    """The same for all values of a collection at once, without a call for each of them where these are numbers."""
    if hint is int or (get_origin(hint) is Annotated and not limits):
        return _are_whole
    if get_origin(hint) is Annotated:
        return partial(_are_at_least, get_args(hint)[1].least)
    if get_origin(hint) is tuple and set(get_args(hint)) == {int}:
        return partial(_are_tuples_of_whole, len(get_args(hint)))
    if hint == tuple[Count, ...] and limits:
        return _are_tuples_of_counts
    return partial(_are_all, judge(hint, limits))


def _members(protocol: type) -> tuple[str, ...]:
    """What a value must have to be taken for one of a protocol."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    names = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    return tuple(sorted(name for name in names if name == "__call__" or not name.startswith("_")))


def is_anything(value: Any) -> bool:
    """What everything fits."""
    return True


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


def _is_one_of(judges: Sequence[Judge], value: Any) -> bool:
    return any(fits(value) for fits in judges)


def _is_among(values: Collection[Any], value: Any) -> bool:
    return any(type(one) is type(value) and one == value for one in values)


def _has_all(names: Iterable[str], value: Any) -> bool:
    kind, own = type(value), getattr(value, "__dict__", ())  # hasattr on the value would compute properties
    computed = hasattr(kind, "__getattr__")
    return all(
        hasattr(kind, name) or (name != "__call__" and (name in own or (computed and hasattr(value, name))))
        for name in names
    )


def _is_whole(value: Any) -> bool:
    try:
        index(value)
    except (TypeError, RuntimeError):
        return False
    return True


def _is_at_least(least: int, value: Any) -> bool:
    return _is_whole(value) and bool(value >= least)


def _is_number(value: Any) -> bool:
    # a tensor or array without dims is a number, too
    return isinstance(value, (Real, np.number)) or (hasattr(value, "__float__") and getattr(value, "ndim", -1) == 0)


def _is_truth(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_)) or (_is_whole(value) and value in (0, 1))


def _is_tuple(judges: Sequence[Judge], value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != len(judges):
        return False
    return all(fits(one) for fits, one in zip(judges, value, strict=True))


def _is_tuple_of(fit: Judge, value: Any) -> bool:
    return fit(value) if type(value) is tuple else isinstance(value, tuple)


def _is_list_of(fit: Judge, value: Any) -> bool:
    return isinstance(value, list) and fit(value)


def _is_sequence_of(fit: Judge, value: Any) -> bool:
    if type(value) in (list, tuple):  # the common case, without the checks below
        return fit(value)
    try:
        return len(value) >= 0 and not isinstance(value, (str, Mapping)) and fit(value)
    except TypeError:
        return False


def _is_mapping_of(kind: type, fit_keys: Judge, fit_values: Judge, value: Any) -> bool:
    if type(value) is dict:
        return fit_keys(value) and fit_values(value.values())
    return isinstance(value, kind)


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def is_array_of_whole_numbers(value: Any) -> bool:
    """Whether NumPy makes an array of whole numbers of it; numbers without a fraction are whole, too."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return False
    if array.dtype.kind == "f":
        return bool((np.isfinite(array) & (array == array.round())).all())
    whole = array.dtype.kind == "O" and all(_is_whole(one) and abs(one) < 2**63 for one in array.flat)
    return array.dtype.kind in "iub" or whole


def _are_all(fits: Judge, values: Collection[Any]) -> bool:
    return all(map(fits, values))


def _are_whole(values: Collection[Any]) -> bool:
    return set(map(type, values)) <= {int} or all(map(_is_whole, values))


def _are_at_least(least: int, values: Collection[Any]) -> bool:
    whole = set(map(type, values)) <= {int} or all(map(_is_whole, values))
    return whole and bool(min(values, default=least) >= least)


def _are_tuples_of_counts(values: Collection[Any]) -> bool:
    kinds = set(map(type, values))
    return (kinds <= {tuple} or all(issubclass(kind, tuple) for kind in kinds)) and _are_at_least(
        0, [*chain.from_iterable(values)]
    )


def _are_tuples_of_whole(length: int, values: Collection[Any]) -> bool:
    if not set(map(type, values)) <= {tuple} or not set(map(len, values)) <= {length}:
        return False
    return _are_whole([*chain.from_iterable(values)])
