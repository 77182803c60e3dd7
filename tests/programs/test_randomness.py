"""Random draws of a compiled step: a replay draws what the step would draw, or the step stays as it is."""

import warnings

import pytest
import torch
from compiled_nets import noise
from torch import nn
from torch.nn import functional
from torch.random import fork_rng
from torch.utils.checkpoint import checkpoint

import distdl

OWN = torch.Generator()
SET = "a random state is set"


def drops(model, x):
    return functional.dropout(model(x), 0.4)


def drops_twice(model, x):
    return functional.dropout(drops(model, x), 0.2)


def by_own(model, x):
    return model(x) * torch.rand(x.shape, generator=OWN)


def checkpointed(model, x):
    return checkpoint(drops, model, x, use_reentrant=False)


def checkpointed_without_draws(model, x):
    return checkpoint(model, x, use_reentrant=False)


def seeds(model, x):
    torch.manual_seed(7)
    return drops(model, x)


def seeds_between(model, x):
    y = drops(model, x)
    torch.manual_seed(7)
    return y * torch.rand(3)


def seeds_own(model, x):
    OWN.manual_seed(7)
    return by_own(model, x)


def forks(model, x):
    with fork_rng(devices=[]):
        y = drops(model, x)
    return y


def advances(model, x):
    torch.default_generator.set_state(torch.Generator().manual_seed(int(torch.initial_seed()) + 1).get_state())
    return model(x)


CASES = [
    (drops, ""), (drops_twice, ""), (by_own, ""), (checkpointed_without_draws, ""), (checkpointed, SET), (seeds, SET),
    (seeds_between, SET), (seeds_own, SET), (forks, SET), (advances, SET),
]  # fmt: skip


def trained(body, wrap):
    """What each step leaves, and the step."""
    torch.manual_seed(3), OWN.manual_seed(4)
    model = nn.Linear(3, 3)

    @wrap
    def step(x):
        loss = body(model, x).square().sum()
        loss.backward()
        return loss

    left = []
    for seed in range(8):
        model.zero_grad()
        left.append([step(noise((5, 3), seed)).detach(), model.weight.grad, torch.rand(1), OWN.get_state()])
    return left, step


@pytest.mark.parametrize(("body", "told"), CASES, ids=lambda one: getattr(one, "__name__", ""))
def test_a_replay_draws_as_the_step_or_there_is_none(body, told):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (ours, step), (theirs, _) = trained(body, distdl.compile), trained(body, lambda one: one)
    for one, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, one, other))
    (program,) = step.programs
    assert (program.replays == 5) == (not told), step.explain()
    assert told in step.explain()
