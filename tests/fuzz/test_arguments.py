"""Every public constructor and function, called with wrong values: the error says the rule, the same on all workers."""

import re
import sys
from pathlib import Path

import arguments
import pytest
from team import Failed, Team, quietly

import distdl

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
from public_names import public_names

PUBLIC = public_names()


@pytest.fixture(scope="module")
def team():
    made = Team()
    yield made
    made.close()


def test_each_public_name_is_called_or_there_is_a_reason():
    excused = {name for name in PUBLIC for pattern in arguments.NOT_CALLED if re.fullmatch(pattern, name)}
    called = set(arguments.RIGHT)
    assert called <= set(PUBLIC), called - set(PUBLIC)
    assert not called & excused, called & excused
    assert not set(PUBLIC) - called - excused, "a new public name needs a right call in tests/fuzz/arguments.py"
    for pattern in arguments.NOT_CALLED:
        assert any(re.fullmatch(pattern, name) for name in PUBLIC), f"{pattern} excuses nothing"


@pytest.mark.parametrize("name", [name for name in arguments.RIGHT if name not in arguments.ALONE])
def test_wrong_values_are_errors_that_say_so_on_all_workers(team, name):
    function, right = PUBLIC[name], arguments.RIGHT[name]

    def first(P):
        function(**right(P))
        return list(arguments.wrong(name, function, right(P)))

    found = quietly(lambda: team.run(first))
    assert not any(isinstance(one, Failed) for one in found), found
    for argument, value in found[0]:

        def called(P, argument=argument, value=value):
            function(**{**right(P), argument: value})
            return "passed"

        what = f"{name}({argument}={value!r})"
        raised = quietly(lambda called=called: team.run(called))
        assert all(one == raised[0] for one in raised), f"{what}: {raised}"
        assert raised[0] != "passed", f"{what} is taken"
        assert raised[0].kind in ("ValueError", "TypeError") and raised[0].text, f"{what}: {raised[0]}"


@pytest.mark.parametrize("wrong", [
    {"function": 3}, {"workers": "a"}, {"workers": None}, {"workers": 2.5}, {"workers": 0}, {"workers": -7},
    {"backend": 3}, {"backend": "nonsense"}, {"workers": 2, "backend": "serial"},
])  # fmt: skip
def test_wrong_arguments_of_run_workers(wrong):
    with pytest.raises((ValueError, TypeError), match=r"run_workers|back-end|worker"):
        distdl.run_workers(**{"function": lambda: None, "workers": 1, "backend": "threads", **wrong})
