"""How many signatures are kept, which one goes, and what the warning of it says."""

import warnings

import pytest
import torch

import distdl


def make(signatures=2):
    model = torch.nn.Linear(2, 2)

    @distdl.compile(signatures=signatures)
    def compiled(x, factor=1):
        loss = (model(x) * factor).sum()
        loss.backward()
        return loss

    def step(x, **numbers):
        model.zero_grad()
        return compiled(x, **numbers)

    step.compiled = compiled
    return model, step


def test_the_one_that_was_not_called_for_longest_goes():
    _, step = make()
    x = torch.ones(3, 2)
    for _ in range(4):  # the last one is a replay
        step(x, factor=1)
    step(x, factor=2)
    step(x, factor=1)
    with pytest.warns(UserWarning, match="more than 2 signatures"):
        step(x, factor=3)
    assert [program.number for program in step.compiled.programs] == [1, 3]
    assert step.compiled.programs[0].line is not None


def shape(model, step):
    step(torch.ones(3, 2))
    step(torch.ones(4, 2))


def number(model, step):
    step(torch.ones(3, 2), factor=4)
    step(torch.ones(3, 2), factor=5)


def frozen(model, step):
    step(torch.ones(3, 2))
    model.bias.requires_grad_(False)
    step(torch.ones(3, 2))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (shape, r"argument\[0\] was a tensor of the shape \(3, 2\), torch.float32, and is a tensor of the shape \("),
        (number, "factor was 4, and is 5"),
        (frozen, "a parameter's requires_grad"),
    ],
)
def test_one_warning_says_what_changes(change, text):
    model, step = make(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        change(model, step)
        change(model, step)
    told = [str(one.message) for one in caught if "signatures" in str(one.message)]
    assert len(told) == 1
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(told[0])
