"""Every public constructor and function, called with wrong values: the error says the rule, the same on all workers."""

import re
import signal
import sys
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import arguments
import numpy
import pytest
from team import Failed, Team, quietly
from typing_extensions import TypeAliasType

import distdl
from distdl.backends import job
from distdl.environment.types import judge, shown

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
from public_names import public_names, resolve

PUBLIC = public_names()
PYTHONS = re.compile(  # what Python says of an operation on something that does not have it, which names no rule
    r"object is not (iterable|callable|subscriptable|an iterator)|not supported between|has no (len|attribute)|"
    r"unsupported operand|object has no|zip\(\) argument|not enough values|too many values|cannot be interpreted"
)


@pytest.fixture(scope="module")
def team():
    made = Team()
    yield made
    made.close()


def function_of(name):
    """A public name, a method of one, or what stands beside one."""
    if name in PUBLIC:
        return PUBLIC[name]
    module, found, value = resolve(name)
    owner = f"{module}.{found}"
    return reduce(getattr, name.removeprefix(owner).split(".")[1:], PUBLIC.get(owner, value))


def names_without(reason):
    return [name for name in PUBLIC for pattern in arguments.NOT_CALLED[reason] if re.fullmatch(pattern, name)]


def test_each_public_name_is_called_or_there_is_a_reason():
    excused = {name for reason in arguments.NOT_CALLED for name in names_without(reason)}
    called = {name if name in PUBLIC else name.rpartition(".")[0] for name in arguments.RIGHT}  # (some by a method)
    assert not called & excused, called & excused
    assert not set(PUBLIC) - called - excused, "a new public name needs a right call in tests/fuzz/arguments.py"
    for patterns in arguments.NOT_CALLED.values():
        for pattern in patterns:
            assert any(re.fullmatch(pattern, name) for name in PUBLIC), f"{pattern} excuses nothing"


@pytest.mark.parametrize("name", [name for name in arguments.RIGHT if name not in arguments.ALONE])
def test_wrong_values_are_errors_that_say_so_on_all_workers(team, name):
    function, right = function_of(name), arguments.RIGHT[name]

    def first(P):
        arguments.call(function, right(P))
        return list(arguments.wrong(name, function, right(P)))

    found = quietly(lambda: team.run(first))
    assert not any(isinstance(one, Failed) for one in found), found
    for argument, value in found[0]:

        def called(P, argument=argument, value=value):
            arguments.call(function, {**right(P), argument: value})
            return "passed"

        what = f"{name}({argument}={value!r})"
        raised = quietly(lambda called=called: team.run(called))
        assert all(one == raised[0] for one in raised), f"{what}: {raised}"
        assert raised[0] != "passed", f"{what} is taken"
        assert raised[0].kind in ("ValueError", "TypeError") and raised[0].text, f"{what}: {raised[0]}"
        assert not PYTHONS.search(raised[0].text), f"{what}: {raised[0]}"


@pytest.mark.parametrize("name", names_without(arguments.NO_ARGUMENTS))
def test_what_takes_no_arguments_takes_none(name):
    with pytest.raises(TypeError):
        function_of(name)(3)


@pytest.mark.parametrize("name", names_without(arguments.ABSTRACT))
def test_what_is_abstract_cannot_be_made(name):
    with pytest.raises(TypeError, match=r"abstract|Protocol"):
        function_of(name)()


def test_a_global_tensor_is_made_by_functions_only():
    with pytest.raises(TypeError, match=r"made by distdl.distribute_tensor\(x, P\) or GlobalTensor.from_local"):
        distdl.GlobalTensor(3)


@pytest.mark.parametrize("wrong", [
    {"function": 3}, {"workers": "a"}, {"workers": None}, {"workers": 2.5}, {"workers": 0}, {"workers": -7},
    {"backend": 3}, {"backend": "nonsense"}, {"workers": 2, "backend": "serial"},
])  # fmt: skip
def test_wrong_arguments_of_run_workers(wrong):
    with pytest.raises((ValueError, TypeError), match=r"run_workers|back-end|worker"):
        distdl.run_workers(**{"function": lambda: None, "workers": 1, "backend": "threads", **wrong})


@pytest.mark.parametrize("wrong", [
    {"function": 3}, {"function": None}, {"function": "a"}, {"signals": 3}, {"signals": "a"}, {"signals": None},
    {"signals": (2.5,)}, {"signals": (-7,)}, {"signals": (2**62,)}, {"signals": ()}, {"signals": (signal.SIGKILL,)},
])  # fmt: skip
def test_wrong_arguments_of_on_terminate_catch_no_signal(wrong):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((ValueError, TypeError), match="on_terminate needs"):
        distdl.on_terminate(**{"function": lambda: None, **wrong})
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("wrong", [3, None, 2.5, [], object()])
def test_wrong_arguments_of_a_job(wrong):
    with pytest.raises(TypeError, match="job needs backend to be a string"):
        job(wrong)


def test_aliases_that_are_types_of_their_own():
    """As that of arrays is in NumPy 2.5."""
    one = TypeVar("one")
    alias = TypeAliasType("alias", numpy.ndarray[Any, numpy.dtype[one]], type_params=(one,))
    assert judge(alias[numpy.int64])(numpy.zeros(3)) and not judge(alias[numpy.int64])("a")
    assert shown(alias[numpy.int64]) == "a ndarray"
