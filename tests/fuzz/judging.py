"""Whether a case has come out as it should: as computed sequentially, or with the same error on all workers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from chains import Chain, assert_call, sequential
from disorders import Disorder
from movements import Movements, assert_moved, imagined, members_of
from networks import Network
from partitions import WORKERS
from programs import Program, assert_equal
from team import Failed, Team, failure_of

CLEAN = {"ValueError", "TypeError", "IndexError", "RuntimeError", "NotImplementedError", "CommunicationError"}
# errors of global tensors where torch has none: what the documentation says, and what torch does not look at
REFUSED = {
    r"has written in place into what in torch would be a view": "refused: written in place into what would be a view",
    r"has written in place into the tensor of which this one would be a view": "refused: a view would see a write",
    r"would write values of a global tensor into a plain tensor, .* because it (requires a gradient|shares)": (
        "refused: written into a plain tensor"
    ),
    r"needs .* whole numbers?, .*at most 2147483647; got \D*\d{11}": "refused: a number that no window has",
    r"^torch.cummax: Dimension out of range": "refused: a dim that is not there, of a tensor without cells",
}
# errors of torch where global tensors need none
ALLOWED = {
    r"input tensor and the written-to tensor refer to a single memory": "torch refuses: to write what it reads",
    r"object of type 'NoneType' has no len|'output_size' .* must be tuple of ints, not NoneType": (
        "torch refuses: None for a size"
    ),
}
# what layers refuse and torch does not: to split a single cell, to cut off the last one
LAYERS_REFUSE = {
    r"cannot split a dim of global extent 1": "same error",
    r"cells that remain; mode '(reflect|replicate)', in dim \d the padding is (\d+ and -|-\d+ and )": "same error",
}
# what torch refuses and layers do not: to pad by nothing where there is nothing
LAYERS_TAKE = {r"batch size and other non-zero dimensions": "taken: there is no cell to pad"}


def judge(program: Program, team: Team) -> str:
    """Run a program both ways.

    Returns: ``equal``; ``same error``; what is refused, if that is an error where torch has none; or what torch refuses
        and global tensors need not.
    Raises: AssertionError otherwise.
    """
    expected = program.sequential()
    found = team.run(program.distributed)
    raised = expected if isinstance(expected, tuple) else None
    if any(map(failure_of, found)):
        step, error = same_error(found, raised)
        refused = matches(replace(error, text=f"{program.name(step)}: {error.text}"), REFUSED)
        if raised is None or (refused and step < raised[0]):  # (what follows, we have not come to)
            assert refused, f"torch computes this, and here step {step} fails: {error}"
            return refused
        if step > raised[0] and matches(raised[1], ALLOWED):  # (what follows, torch has not come to)
            return matches(raised[1], ALLOWED)
        assert step == raised[0], f"step {step} fails, not {raised[0]}: {error}, not {raised[1]}"
        return "same error"
    if raised is not None:
        assert matches(raised[1], ALLOWED), f"torch raises in step {raised[0]}: {raised[1]}"
        return matches(raised[1], ALLOWED)
    assert_equal(expected, found, 1e-4 if program.is_single else 1e-9)
    return "equal"


def judge_network(network: Network, team: Team) -> str:
    """Train a network both ways; the same.

    Returns: ``equal``, ``same error``, or ``at a kink`` where derivatives jump, and rounding decides.
    """
    expected = network.sequential()
    found = team.run(network.distributed)
    raised = expected if isinstance(expected, tuple) else None
    if any(map(failure_of, found)):
        step, error = same_error(found, raised)
        assert raised is not None, f"torch computes this, and here step {step} fails: {error}"
        assert step == raised[0], f"step {step} fails, not {raised[0]}: {error}, not {raised[1]}"
        return "same error"
    assert raised is None, f"torch raises: {raised}"
    try:
        assert_equal(expected, found, 1e-3 if network.single else 1e-8)
    except AssertionError:
        if network.jumps():
            return "at a kink"
        raise
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
                return "taken: nothing is asked of these blocks"
            if call.fault is not None and call.fault.kind == "grad mode" and chain.is_alone(call.fault.worker):
                return "taken: nobody is there to have another grad mode"
            assert expected is not None, f"call {number} cannot be, and gave {results}"
            if isinstance(expected, Failed):
                taken = matches(expected, LAYERS_TAKE)
                assert taken, f"torch raises in call {number}: {expected}"
                return taken
            assert_call(chain, call, results, expected, modules)
            continue
        outcome = "same error"
        if not chain.takes_everyone:  # (the others may have no part in what fails, and may wait behind it)
            results = [one for one in results if isinstance(one, Failed) and one.kind != "CommunicationError"]
        _, error = same_error(results)
        wrong = call.fault is not None or isinstance(expected, Failed) or matches(error, LAYERS_REFUSE)
        assert wrong, f"call {number} fails, and torch does not: {error}"
        if not chain.takes_everyone:
            break
    return outcome


def judge_disorder(case: Disorder, team: Team) -> str:
    """Call two networks, one worker in another order: an error, unless all is as it should be.

    Returns: ``named errors``, where a worker that found no difference itself was told that another one had.
    """
    found = team.run(case.distributed, in_step=False)
    failed = [one for one in map(failure_of, found) if one is not None]
    if failed:
        assert all(one.kind in CLEAN and one.text for one in failed), failed
        return "same error" if len(failed) == WORKERS and len(set(failed)) == 1 else "named errors"
    for number, chain in enumerate(case.chains):
        if case.kind.startswith("skips") and number == 0 and chain.is_alone(case.worker):
            continue
        modules = chain.modules()
        expected = sequential(chain.calls[0], modules)
        assert isinstance(expected, tuple), f"nobody fails, and torch does: {expected}"
        call, results = chain.calls[0], [one[number] for one in found]
        if case.kind == "skips backward" and number == 0:  # nobody needed it, and its own gradients are not there
            results[case.worker] = replace(results[case.worker], gradients=[[] for _ in modules])
            call = replace(call, wants=tuple(worker for worker in call.wants if worker != case.worker))
        assert_call(chain, call, results, expected, modules)
    return "equal"


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
    steps = {one[0] if isinstance(one, tuple) else 0 for one in found}
    errors = {_without_blocks(failure_of(one)) for one in found}
    assert len(steps) == len(errors) == 1 and None not in errors, f"not the same on all workers: {found}"
    [step], [error] = steps, errors
    assert error is not None and error.text, error
    assert error.kind in CLEAN or (raised is not None and error.kind == raised[1].kind), error
    return step, error


def _without_blocks(error: Failed | None) -> Failed | None:
    """An error without the shape of a worker's block, which torch's own may name."""
    return error and Failed(error.kind, re.sub(r"\[torch\.\w+Tensor \[[\d, ]*\]\]", "[...]", error.text))


def matches(error: Failed, texts: Mapping[str, str]) -> str:
    """The name of the first pattern that an error matches; empty if there is none."""
    return next((name for pattern, name in texts.items() if re.search(pattern, error.text)), "")
