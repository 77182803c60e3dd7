"""Whether a case has come out as it should: as computed sequentially, or with the same error on all workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from chains import Chain, assert_call, sequential
from movements import Movements, assert_moved, imagined, members_of
from programs import Program, assert_equal
from team import Failed, Team, failure_of

CLEAN = {"ValueError", "TypeError", "IndexError", "RuntimeError", "NotImplementedError", "CommunicationError"}
# errors of global tensors where torch has none, which the documentation says
REFUSED = (
    r"has written in place into what in torch would be a view",
    r"has written in place into the tensor of which this one would be a view",
    r"would write what a global tensor says into a plain tensor, .* because it requires a gradient",
)
# errors of torch where global tensors need none
ALLOWED = (
    r"view size is not compatible with input tensor's size and stride",
    r"output of a function that returns multiple views",
    r"object of type 'NoneType' has no len|'output_size' .* must be tuple of ints, not NoneType",
)
# what no layer splits
NOT_SPLIT = r"cannot split a dim of global extent 1"


def judge(program: Program, team: Team) -> str:
    """Run a program both ways.

    Returns: ``equal``; ``same error``; ``refused``, if that is an error where torch has none; or ``allowed``, if torch
        has one and global tensors need none.
    Raises: AssertionError otherwise.
    """
    expected = program.sequential()
    found = team.run(program.distributed)
    raised = expected if isinstance(expected, tuple) else None
    if any(map(failure_of, found)):
        step, error = same_error(found, raised)
        if raised is None:
            assert matches(error, REFUSED), f"torch computes this, and here step {step} fails: {error}"
            return "refused"
        assert step == raised[0], f"step {step} fails, not {raised[0]}: {error}, not {raised[1]}"
        return "same error"
    if raised is not None:
        assert matches(raised[1], ALLOWED), f"torch raises in step {raised[0]}: {raised[1]}"
        return "allowed"
    assert_equal(expected, found, 1e-4 if program.is_single else 1e-9)
    return "equal"


def judge_chain(chain: Chain, team: Team) -> str:
    """Run a chain of layers; the same, where each call may fail by itself."""
    found = team.run(chain.distributed)
    if all(isinstance(one, Failed) for one in found):  # in a constructor
        same_error(found)
        return "same error"
    modules = chain.modules()
    outcome = "equal"
    for number, call in enumerate(chain.calls):
        results = [one[number] if number < len(one) else None for one in found]
        expected = sequential(call, modules)
        if not any(isinstance(one, Failed) for one in results):
            if call.fault is not None and (isinstance(expected, Failed) or chain.takes_any_blocks):
                return "allowed"
            assert expected is not None, f"call {number} cannot be, and gave {results}"
            assert not isinstance(expected, Failed), f"torch raises in call {number}: {expected}"
            assert_call(chain, call, results, expected, modules)
            continue
        outcome = "same error"
        if not chain.takes_everyone:  # (the others may have no part in what fails, and may wait behind it)
            results = [one for one in results if isinstance(one, Failed) and one.kind != "CommunicationError"]
        _, error = same_error(results)
        wrong = call.fault is not None or isinstance(expected, Failed) or matches(error, [NOT_SPLIT])
        assert wrong, f"call {number} fails, and torch does not: {error}"
        if not chain.takes_everyone:
            break
    return outcome


def judge_movements(case: Movements, team: Team) -> str:
    """Call primitives; the same. A call with a fault fails on all members, and leaves the world as it was."""
    found = team.run(case.distributed)
    outcome = "equal"
    primitives = case.cases(imagined())
    for number, (which, fault) in enumerate(case.calls):
        results = [one[number] for one in found]
        members = members_of(primitives[which])
        if fault is None:
            assert_moved(primitives[which], results)
        elif not (fault.kind == "grad mode" and len(members) == 1):
            same_error([results[worker] for worker in members])
            outcome = "same error"
    return outcome


def same_error(found: Sequence[Any], raised: tuple[int, Failed] | None = None) -> tuple[int, Failed]:
    """The failure of all workers and its step: the same on all, and of a kind that says what is wrong, or torch's."""
    assert found and all(one == found[0] for one in found), f"not the same on all workers: {found}"
    step, error = found[0] if isinstance(found[0], tuple) else (0, found[0])
    assert isinstance(error, Failed) and error.text, error
    assert error.kind in CLEAN or (raised is not None and error.kind == raised[1].kind), error
    return step, error


def matches(error: Failed, texts: Sequence[str]) -> bool:
    return any(re.search(one, error.text) for one in texts)
