"""``distdl.verify``: right programs get a certificate, and of wrong ones the first tensor that differs is named."""

import json
from dataclasses import dataclass
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


# -- what a model may be, and what verify refuses


def certified(model, inputs, grid=(2, 1), **given):
    """The certificate, the same on both workers."""
    found = distdl.run_workers(lambda: distdl.verify(model, grid, inputs, **given), 2)
    assert found == found[:1] * 2
    return found[0]


def refused(kind, model, inputs, grid=(2, 1), **given):
    """The text of the error that both workers raise."""

    def work():
        with pytest.raises(kind) as caught:
            distdl.verify(model, grid, inputs, **given)
        return str(caught.value)

    texts = distdl.run_workers(work, 2)
    assert texts == texts[:1] * 2
    return texts[0]


def rows_of(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class Applied(nn.Module):
    """A linear layer, and a function of its output."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(6, 3).double(), function

    def forward(self, x):
        return self.function(self.linear(x))


def test_outputs_of_bools_are_compared():
    assert certified(Applied(lambda y: (y, y > 0)), rows_of(5, 6)).compared["outputs"] == 6
    text = failing(lambda: distdl.verify(lambda x: {"y": x > 0}, lambda x: {"y": x < 0}, torch.ones(3)), 2)
    assert "cell (0,) is True sequentially and False distributed" in text


def test_a_difference_is_shown_with_the_digits_that_differ():
    text = failing(lambda: distdl.verify(lambda x: {"y": x}, lambda x: {"y": x + 1e-9}, rows_of(3)), 2)
    assert "cell (0,) is 0.803276" in text
    shown = text.partition("cell (0,) is ")[2].split(" distributed")[0].split(" sequentially and ")
    assert shown[0] != shown[1]


def test_whole_numbers_that_float64_cannot_tell_apart_differ():
    def number(more):
        return lambda x: {"y": torch.tensor(2**60 + more)}

    text = failing(lambda: distdl.verify(number(0), number(1), torch.ones(3)), 2)
    assert f"is {2**60} sequentially and {2**60 + 1} distributed" in text


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_also_if_the_caller_has_switched_them_off(off):
    def work():
        with off():
            return distdl.verify(nn.Linear(6, 3).double(), (2, 1), rows_of(5, 6))

    assert distdl.run_workers(work, 2)[0].compared["gradients of weights"] == 4


@pytest.mark.parametrize(("loss", "given"), [
    (lambda y: 1.5, "it gave a float"), (lambda y: None, "it gave a NoneType"),
    (lambda y: y, r"it gave one of shape (5, 3)"),
])  # fmt: skip
def test_a_loss_that_gives_no_tensor_of_one_element_is_an_error(loss, given):
    text = refused(ValueError, nn.Linear(6, 3).double(), rows_of(5, 6), loss=loss)
    assert text == f"verify needs a loss that gives a tensor of one element; {given}"


@pytest.mark.parametrize("steps", [0, -1])
def test_a_number_of_steps_in_which_nothing_is_compared_is_an_error(steps):
    text = refused(ValueError, nn.Linear(6, 3).double(), rows_of(5, 6), steps=steps)
    assert text == f"verify needs at least one step; got {steps}"


def test_two_functions_that_return_nothing_are_an_error():
    assert "nothing to compare" in refused(ValueError, lambda x: {}, rows_of(3), lambda x: {})


def test_two_functions_take_no_loss():
    def program(x):
        return {"y": x}

    assert "takes no loss" in refused(TypeError, program, rows_of(3), program, loss=torch.sum)


@pytest.mark.parametrize(("build", "names"), [
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), "self_attn, dropout, dropout1, dropout2"),
    (lambda: nn.LSTM(8, 4, 2, batch_first=True, dropout=0.2), "the model"),
])  # fmt: skip
def test_dropout_inside_of_attention_and_recurrent_layers_is_switched_off(build, names):
    found = certified(build().double(), rows_of(4, 6, 8), (2, 1, 1))
    assert f"switched off in {names}:" in found.not_compared[0]


def test_a_rare_draw_is_an_error_although_two_runs_agree():
    model = Applied(lambda y: nn.functional.dropout(y, 1e-12))
    text = refused(ValueError, model, rows_of(5, 6))
    assert "two sequential runs differ" not in text
    assert "It draws random numbers by aten.bernoulli_." in text


def test_numbers_from_a_seeded_generator_and_dropout_of_nothing_are_no_draws():
    def function(y):
        weights = torch.rand(3, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
        return nn.functional.dropout(y * weights, 0.0)

    assert certified(Applied(function), rows_of(5, 6)).margin <= 1


@pytest.mark.parametrize(
    "normed", [torch.nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_modules_that_make_weights_are_compared_but_for_the_gradients_of_their_outputs(normed):
    found = certified(nn.Sequential(normed(nn.Linear(6, 3).double())), rows_of(5, 6))
    assert found.compared["outputs"] == 8
    assert found.compared["gradients of weights"] >= 4
    assert found.not_compared[0].startswith("the gradient of the output of 0.parametrizations.weight.0, ")


def test_a_module_that_gives_a_dataclass_is_named_as_not_compared():
    class Boxing(nn.Module):
        def forward(self, x):
            return Box(x * 2)

    class Boxed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Boxing()

        def forward(self, x):
            return self.inner(x).content

    assert certified(Boxed(), rows_of(5, 6)).not_compared == ("what is in the Box that inner gives",)


@dataclass
class Box:
    content: torch.Tensor


def test_a_copy_that_differs_on_another_worker_is_found():
    class Drifting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(2))

        def forward(self, x):
            if isinstance(x, distdl.GlobalTensor):
                self.n += distdl.world().rank
            return x * 2

    text = failing(lambda: distdl.verify(Drifting(), (3, 1), rows_of(5, 6)), 3)
    assert "the buffer of n (step 1) on worker 1 differs in 2 of 2 cells by more than 0: cell (0,) is 0" in text


def test_a_cell_that_rounding_makes_infinite_allows_no_other_difference():
    """Roots of what rounding makes negative are NaN in a perturbed run."""

    def sequential(x):
        return {"y": (x - 1).sqrt()}

    def candidate(x):
        return {"y": (x - 1).sqrt() + torch.tensor([0.0, 0.5])}

    text = failing(lambda: distdl.verify(sequential, candidate, torch.tensor([1.0, 5.0]).double()), 2)
    assert "cell (1,) is 2 sequentially and 2.5 distributed" in text


def test_what_rounding_may_change_altogether_is_named_as_not_compared():
    """A constant image stands on the kink of each ReLU behind a norm: rounding decides to which side it falls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 1, 3)).double()
    found = certified(model, torch.zeros(2, 1, 17).double(), (1, 1, 2))
    assert "rounding alone may change" in found.not_compared[0]
    assert sum(found.compared.values()) < 58


def test_idle_workers_verify_too():
    def work():
        return distdl.verify(nn.Linear(6, 3).double(), distdl.world()[1:].reshape((2, 1)), rows_of(5, 6))

    found = distdl.run_workers(work, 3)
    assert found == found[:1] * 3


def test_an_error_of_one_worker_ends_the_others():
    def raises(y):
        if distdl.world().rank == 1:
            raise KeyError("mine")
        return y.sum()

    with pytest.raises(KeyError, match="mine"):
        distdl.run_workers(lambda: distdl.verify(Applied(raises), (2, 1), rows_of(5, 6)), 2)
