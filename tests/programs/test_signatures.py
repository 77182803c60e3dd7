"""What a signature depends on, how many are kept, which one goes, and what the warning of it says."""

import warnings
from functools import partial
from types import ModuleType

import pytest
import torch
from compiled_nets import bits, noise, weighted
from compiled_pairs import on_threads
from torch import nn
from torch.nn import functional

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


def normed():
    return weighted(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 3, padding=1)))


def other_data(model):
    for one in model.parameters():
        one.data = one.data.flip(0) * 0.5


def load(model):
    model.load_state_dict({name: one.clone() + 1 for name, one in model.state_dict().items()}, assign=True)


def replace(model):
    model.first, model[0] = model[0], weighted(nn.Conv2d(1, 2, 3, padding=1), 7)


def put_back(model):
    model[0] = model.first
    del model.first


# how many signatures there are then, and whether the first one is replayed again
BACK = {
    "training": (lambda model: model.eval(), lambda model: model.train(), 2, True),
    "frozen": (
        lambda model: model[0].weight.requires_grad_(False), lambda model: model[0].weight.requires_grad_(), 2, True
    ),
    "dtype": (lambda model: model.double(), lambda model: model.float(), 3, False),
    "data": (other_data, other_data, 1, True),
    "loaded": (load, load, 3, False),
    "module": (replace, put_back, 2, True),
}  # fmt: skip


@pytest.mark.parametrize("name", BACK)
def test_what_changes_there_and_back_has_the_numbers_of_the_step(name):
    there, back, signatures, again = BACK[name]

    def work():
        grid = (1, 1, distdl.world().size, 1)
        models = [distdl.distribute(normed(), grid) for _ in range(2)]

        def body(model, x, y):
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        compiled = distdl.compile(lambda x, y: body(models[0], x, y))
        steps = [compiled, lambda x, y: body(models[1], x, y)]
        for number in range(15):
            if number in (5, 10):
                for model in models:
                    (there if number == 5 else back)(model)
            x, y = (
                distdl.distribute_tensor(noise((2, 1, 9, 6), seed).to(models[0][2].weight.dtype), grid)
                for seed in (number, 90 + number)
            )
            for model in models:
                model.zero_grad()
            assert torch.equal(*(bits(step(x, y)) for step in steps))
            for one, other in zip(*(model.parameters() for model in models), strict=True):
                assert (one.grad is None) == (other.grad is None)
                assert one.grad is None or torch.equal(bits(one.grad), bits(other.grad))
                with torch.no_grad():
                    for each in (one, other) if one.grad is not None else ():
                        each -= 0.01 * each.grad
            for one, other in zip(*(model.buffers() for model in models), strict=True):
                assert torch.equal(one, other)
        assert len(compiled.programs) == signatures, compiled.explain()
        assert (compiled.programs[0].replays > 5) == again
        assert all(program.replays >= 2 for program in compiled.programs), compiled.explain()

    on_threads(work)


OUTSIDE = torch.ones(3)


@pytest.mark.parametrize("which", ["buffer", "parameter"])
def test_an_argument_in_the_memory_of_the_model_is_not_taken_for_it_later(which):
    model = nn.BatchNorm1d(3)
    x, other = noise((4, 3), 1), noise((3,), 5)
    own = (model.running_mean if which == "buffer" else model.weight).detach()

    @distdl.compile
    def step(scale):
        loss = (model(x) * scale).square().sum()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="lies in the memory of model.*; pass a clone"):
        for _ in range(5):
            step(own)
    expected = (model(x) * other).square().sum()
    assert step(other).item() == expected.item()


def test_an_argument_that_the_function_also_names_is_not_taken_for_it_later():
    @distdl.compile
    def step(x):
        return (x - OUTSIDE).square().sum()

    with torch.no_grad(), pytest.warns(UserWarning, match="also names an argument, as OUTSIDE"):
        for _ in range(5):
            assert step(OUTSIDE).item() == 0
    with torch.no_grad():
        assert step(OUTSIDE + 2).item() == 12


class Scaled(nn.Module):
    """A module with options in a dict."""

    def __init__(self):
        super().__init__()
        self.options = {"scale": 0.5}

    def forward(self, x):
        return x * self.options["scale"]


class Held:
    """What a step reaches through an object of the user's."""

    factor = 1.5

    def __init__(self):
        self.model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(self.model.weight)
        self.optimiser = torch.optim.SGD(self.model.parameters(), 0.5)
        self.loss, self.scales, self.tables, self.inner = torch.sum, [2.0], {"a": torch.ones(3)}, [self.model]
        self.scaled = Scaled()

    def step(self, x):
        self.model.zero_grad()
        y = self.inner[0](x * self.tables["a"]) * self.tables.get("b", 1.0)
        loss = self.loss(y) * sum(self.scales) * self.scaled(self.factor)
        loss.backward()
        self.optimiser.step()
        return loss


def other_linear():
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 3)
    return model


REPLACED = {
    "an option in a module": lambda one: one.scaled.options.update(scale=3.0),
    "an attribute for that of the class": lambda one: setattr(one, "factor", 4.0),
    "an attribute": lambda one: setattr(one, "loss", torch.prod),
    "an optimiser": lambda one: setattr(one, "optimiser", torch.optim.SGD(one.model.parameters(), 4.0)),
    "a list": lambda one: setattr(one, "scales", [5.0]),
    "a longer list": lambda one: one.scales.append(3.0),
    "a module in a list": lambda one: one.inner.__setitem__(0, other_linear()),
    "a tensor in a dict": lambda one: one.tables.update(a=torch.full((3,), 2.0)),
    "a longer dict": lambda one: one.tables.update(b=0.25),
    "a rate that is loaded": lambda one: one.optimiser.load_state_dict(
        torch.optim.SGD(one.model.parameters(), 8.0).state_dict()
    ),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_an_object_holds_is_looked_up(what):
    plain, traced = Held(), Held()
    compiled = distdl.compile(traced.step)
    for seed in range(8):
        if seed == 5:
            assert compiled.programs[-1].replays == 1, compiled.explain()
            for one in (plain, traced):
                REPLACED[what](one)
        x = noise((2, 3), seed)
        assert compiled(x).item() == plain.step(x).item()
        assert torch.equal(plain.model.weight, traced.model.weight)


def apply(model, x):
    return model(x)


def test_what_partials_hold_is_reached():
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    parts = [partial(apply, model) for model in models]

    @distdl.compile
    def step(x):
        loss = sum(part(x).square().sum() for part in parts)
        loss.backward()
        return loss

    for seed in range(6):
        for model in models:
            model.zero_grad()
        step(noise((2, 3), seed))
    assert step.programs[-1].replays > 0, step.explain()
    assert all(model.weight.grad is not None for model in models)


def test_a_model_that_nobody_names_is_trained_as_it_is():
    elsewhere = ModuleType("elsewhere")
    elsewhere.model = nn.Linear(3, 2)

    @distdl.compile
    def step(x):
        loss = elsewhere.model(x).square().sum()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="reads a tensor that requires a gradient, and"):
        for seed in range(6):
            elsewhere.model.zero_grad()
            step(noise((2, 3), seed))
    assert elsewhere.model.weight.grad is not None


backward = 0


def test_a_global_with_the_name_of_a_method_is_no_matter():
    global backward
    model = nn.Linear(3, 2)

    @distdl.compile
    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        return loss

    for backward in range(7):
        model.zero_grad()
        step(noise((2, 3), backward))
    assert [program.replays for program in step.programs] == [4]


def test_a_sparse_buffer():
    model = nn.Linear(3, 3)
    model.register_buffer("table", torch.eye(3).to_sparse())

    @distdl.compile
    def step(x):
        loss = (torch.sparse.mm(model.table, x) * model(x)).sum()
        loss.backward()
        return loss

    for seed in range(6):
        model.zero_grad()
        x = noise((3, 3), seed)
        assert step(x).item() == (x * model(x)).sum().item()
