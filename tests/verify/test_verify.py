"""``distdl.verify``: right programs get a certificate, and of wrong ones the first tensor that differs is named."""

import json
from functools import partial

import dtensor_programs
import pytest
import torch
from silent_bugs import BUGS
from torch import nn

import distdl

GRID = (1, 1, 2, 2)


def build(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2),
            nn.Dropout(0.3), nn.Conv2d(4, 2, 3, stride=2),
        ).to(dtype)  # fmt: skip


def images(dtype=torch.float64):
    return torch.randn(2, 1, 17, 13, dtype=dtype, generator=torch.Generator().manual_seed(3))


def failing(call, workers=4):
    """The text of the AssertionError that every worker raises."""

    def work():
        with pytest.raises(AssertionError) as caught:
            call()
        return str(caught.value)

    texts = distdl.run_workers(work, workers)
    assert texts == texts[:1] * workers
    return texts[0]


# -- the collection of silent bugs


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_program_with_a_silent_bug_is_found(bug):
    text = failing(lambda: distdl.verify(bug.sequential, partial(bug.candidate, True), bug.inputs), 3)
    assert f"the result of {bug.named} (step 1) differs" in text.splitlines()[1]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_same_program_without_the_bug_is_verified(bug):
    verify = partial(distdl.verify, bug.sequential, partial(bug.candidate, False), bug.inputs)
    found = distdl.run_workers(verify, 3)
    assert found == found[:1] * 3
    assert 0 <= found[0].margin <= 1
    assert sum(found[0].compared.values()) == len(bug.sequential(*(one.clone() for one in bug.inputs)))


# -- models


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_a_distributed_model_gets_a_certificate(dtype, weights):
    model, before = build(dtype), build(dtype).state_dict()
    verify = partial(distdl.verify, model, GRID, images(dtype), weights=weights)
    found = distdl.run_workers(verify)
    assert found == found[:1] * 4
    one = found[0]
    assert one.compared == {
        "outputs": 14, "gradients of outputs": 14, "losses": 2, "gradients of inputs": 2, "gradients of weights": 12,
        "weights": 12, "buffers": 6,
    }  # fmt: skip
    assert (one.subject, one.workers, one.partition, one.backend, one.steps) == ("Sequential", 4, GRID, "threads", 2)
    assert one.largest <= 1e-12 if dtype == torch.float64 else one.largest <= 1e-4
    assert one.not_compared == ("dropout, which is switched off in 4: it draws other masks on several workers",)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert json.loads(one.to_json())["where"] == one.where
    assert "Sequential on 4 workers as 1x1x2x2 (threads) equals the sequential one" in str(one)


class Doubled(nn.Module):
    """A wrong layer: worker 1 doubles its block in the forward, or its gradient in the backward."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def forward(self, x):
        if not isinstance(x, distdl.GlobalTensor):
            return x.clone()
        if self.where == "forward":
            return distdl.local_map(lambda block: block * (2 if distdl.world().rank == 1 else 1))(x)
        return distdl.local_map(_WrongBackward.apply)(x)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block):
        return block.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (2 if distdl.world().rank == 1 else 1)


@pytest.mark.parametrize(("where", "named", "agreeing"), [
    ("forward", "First in the forward, the output of 6 (step 1) differs in", "the output of 5 (step 1)"),
    ("backward", "First in the backward, the gradient of the output of 5 (step 1) differs in", "of 6 (step 1)"),
])  # fmt: skip
def test_the_first_module_that_differs_is_named(where, named, agreeing):
    model = build().append(Doubled(where)).append(nn.Conv2d(2, 2, 1).double())
    text = failing(lambda: distdl.verify(model, GRID, images()))
    line = next(line for line in text.splitlines() if named in line)
    assert "which worker 1 holds, is " in line
    agrees = text.splitlines()[text.splitlines().index(line) + 1]
    assert agrees.startswith("The last that agrees before it is ") and agreeing in agrees


def test_two_inputs_by_name_and_a_loss_of_ones_own_are_verified():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3).double()

        def forward(self, x, scale):
            return {"y": self.linear(x) * scale, "n": (x > 0).sum()}

    model, target = Two(), torch.arange(10) % 3
    inputs = {"x": torch.randn(10, 6).double(), "scale": torch.randn(3).double()}

    def call():
        return distdl.verify(
            model, (3, 1), inputs, steps=3, optimizer=torch.optim.AdamW,
            loss=lambda out: nn.functional.cross_entropy(out["y"], target),
        )  # fmt: skip

    one = distdl.run_workers(call, 3)[0]
    assert one.compared["gradients of inputs"] == 6
    assert one.compared["outputs"] == 9
    assert set(one.dtypes) == {"float64", "int64"}


def test_a_program_that_draws_random_numbers_is_an_error():
    def sequential(x):
        return {"y": x + torch.rand(())}

    def work():
        with pytest.raises(ValueError, match=r"two sequential runs differ in the result of y .* random numbers"):
            distdl.verify(sequential, sequential, torch.ones(3))

    distdl.run_workers(work, 2)


def test_a_sequential_program_that_fails_is_an_error_of_every_worker():
    def sequential(x):
        return {"y": x @ x}

    def work():
        with pytest.raises(RuntimeError, match="the sequential program failed: RuntimeError"):
            distdl.verify(sequential, lambda x: {"y": x}, torch.ones(2, 3))

    distdl.run_workers(work, 2)


@pytest.mark.parametrize(("sequential", "candidate", "text"), [
    (lambda x: {"y": x}, lambda x: {"z": x}, "the sequential program computes the result of y (step 1), and the"),
    (lambda x: {"y": x}, lambda x: {"y": x[:1]}, "of shape (3,) in the sequential program and float32 of shape (1,)"),
    (lambda x: {"y": x}, lambda x: {"y": x / 0}, "differs in 3 of 3 cells"),
])  # fmt: skip
def test_results_that_cannot_be_compared_differ(sequential, candidate, text):
    assert text in failing(lambda: distdl.verify(sequential, candidate, torch.ones(3)), 2)


def test_a_sum_in_another_order_is_rounding():
    """Also where it cancels, so that the result is far less exact than its dtype."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e4
    x = torch.cat([x, 1 - x])

    def cancelling(x):
        return {"y": x.reshape(8, 250).sum(0).sum()}

    def reordered(x):
        return {"y": x[torch.randperm(2000, generator=torch.Generator().manual_seed(2))].sum()}

    found = distdl.run_workers(lambda: distdl.verify(cancelling, reordered, x), 2)[0]
    assert 0 < found.margin <= 1
    assert found.largest > 1e-5 * found.scale


def test_a_relative_error_of_a_thousand_roundings_is_found():
    text = failing(lambda: distdl.verify(lambda x: {"y": x * 2}, lambda x: {"y": x * (2 + 1e-3)}, torch.ones(3)), 2)
    assert "differs in 3 of 3 cells" in text


def test_a_program_of_dtensors_is_verified():
    found = distdl.run_workers(dtensor_programs.verified, 2, backend="gloo")
    assert found == found[:1] * 2
    compared, backend, text = found[0]
    assert (compared, backend) == ({"results": 2}, "gloo")
    assert "the result of gradient of w (step 1) differs in 12 of 12 cells" in text
    assert "The last that agrees before it is the result of y (step 1)." in text
