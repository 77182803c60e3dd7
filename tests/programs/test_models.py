"""A compiled model: its forward and backward are lines, and what they give has the bits of the model as it is."""

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
from compiled_nets import NETS, UNet, bits, noise, trained
from compiled_pairs import Pair, assert_same, on_threads, small, step, together
from torch import nn

import distdl

FURTHER = [("u-net", 1), ("dropout", 1), ("u-net", 3), ("lenet", 3), ("attention-length", 3), ("u-net-sharded", 3)]
IDLE = ("empty-blocks", 4)


@pytest.mark.parametrize(("name", "workers"), [*((name, 2) for name in NETS), *FURTHER, IDLE])
def test_forward_and_backward_have_the_bits_of_the_model(name, workers):
    theirs = together(lambda: trained(name, lambda model: model, 5, of="model")[1], workers)

    def work():
        model, left = trained(name, distdl.compile, 5, of="model")
        assert [one.halves is not None for one in model.programs] == [True], model.explain()
        assert model.programs[0].replays == 2
        return left

    for mine, others in zip(together(work, workers), theirs, strict=True):
        assert_same(mine, others)


def later_losses(model, x):
    y = model(x)
    loss, other = y.square().sum(), y.sin().sum()
    loss.backward(retain_graph=True)
    other.backward()
    return y, x.grad


def penalty(model, x):
    y = model(x)
    (dx,) = torch.autograd.grad(y.square().sum(), [x], create_graph=True)
    dx.square().sum().backward()
    return y, dx, x.grad


def of_the_input(model, x):
    return torch.autograd.grad(model(x).square().sum(), [x])


def another_loss(model, x):
    y = model(x)
    y.mean().backward()
    return y, x.grad


@pytest.mark.parametrize("use", [later_losses, penalty, of_the_input, another_loss])
def test_other_backwards_than_those_of_the_recordings(use):
    def work():
        pair = Pair()
        pair.known()
        pair.both(use, 10, rounds=use is penalty)  # where it is noticed, sums add up in another order
        for seed in range(4):
            pair.both(use, seed)
        assert pair.lines() == [use is not penalty]

    on_threads(work)


@pytest.mark.parametrize("use", [later_losses, penalty, of_the_input])
def test_they_come_from_the_first_call_on(use):
    def work():
        pair = Pair()
        for seed in range(6):
            pair.both(use, seed)
        assert pair.lines() == [use is not penalty]
        assert ("create_graph=True" in pair.model.explain()) == (use is penalty)

    on_threads(work)


def test_a_replay_with_statistics_refuses_second_derivatives():
    def work():
        pair = Pair(lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)))
        pair.known()
        y = pair.model(x := pair.x())
        with pytest.raises(RuntimeError, match=r"model\._orig_mod"):
            torch.autograd.grad(y.square().sum(), [x], create_graph=True)
        assert "create_graph=True" in pair.model.explain()

    on_threads(work)


def test_results_of_which_a_part_has_a_gradient():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.other = small(), nn.Conv2d(1, 1, 1)

        def forward(self, x):
            return {"y": self.inner(x), "z": [self.other(x), x.detach() * 2, 3]}

    def one(model, x):
        found = model(x)
        found["y"].square().sum().backward()
        return found["y"], *found["z"][:2], x.grad

    def both(model, x):
        found = model(x)
        (found["y"] * found["z"][0]).sum().backward()
        assert found["z"][2] == 3 and not found["z"][1].requires_grad
        return found["y"], x.grad

    def work():
        pair = Pair(Two)
        for seed in range(5):
            pair.both(one, seed)
        assert pair.lines() == [True], pair.model.explain()
        for seed in range(3):
            pair.both(both, seed)
        assert pair.lines() == [False] and "other results" in pair.model.explain()

    on_threads(work)


def test_a_weight_that_is_written_before_the_backward_is_an_error_and_so_is_a_second_backward():
    def work():
        pair = Pair()
        pair.known()
        loss = pair.model(pair.x()).square().sum()
        with torch.no_grad():
            list(pair.model.parameters())[2].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss = pair.model(pair.x()).square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()

    on_threads(work)


def test_a_result_may_be_written_where_the_backward_does_not_read_it():
    def written(model, x):
        y = model(x)
        y.mul_(2)
        y.sum().backward()
        return y, x.grad

    def work():
        pair = Pair()
        for seed in range(6):
            pair.both(written, seed)
        assert pair.lines() == [True], pair.model.explain()
        pair = Pair(nn.Tanh)
        for seed in range(6):
            y = pair.model(pair.x(seed))
            y.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()

    on_threads(work)


def test_two_forwards_before_their_backwards_and_a_model_of_its_own_result():
    def twice(model, x):
        y = model(model(x)) + model(x)
        y.square().sum().backward()
        return y, x.grad

    def work():
        pair = Pair(lambda: nn.Conv2d(1, 1, 3, padding=1))
        for seed in range(6):
            pair.both(twice, seed)
        assert pair.lines() == [True, True], pair.model.explain()

    on_threads(work)


def test_a_compiled_model_is_the_model_to_all_who_look():
    model = UNet()
    names = list(model.state_dict())
    compiled = distdl.compile(model, signatures=3)
    assert isinstance(compiled, UNet) and list(compiled.state_dict()) == names
    assert [one for one, _ in compiled.named_modules()] == [one for one, _ in model.named_modules()]
    assert all(one is other for one, other in zip(compiled.parameters(), model.parameters(), strict=True))
    compiled.eval()
    assert not model.training and not model.head.training
    compiled.scale = 3
    assert model.scale == 3 and compiled.head is model.head and compiled._orig_mod is model
    assert str(compiled) == str(model) and distdl.compile(compiled)._orig_mod is model
    compiled.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})
    other = copy.deepcopy(compiled)
    assert isinstance(other, UNet) and type(other).__mro__[1] is type(compiled).__mro__[1]
    assert torch.equal(other.head.weight, model.head.weight) and other.head.weight is not model.head.weight
    torch.save(compiled, file := io.BytesIO())
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert torch.equal(other.head.weight, model.head.weight) and other.explain() == compiled.explain()


def test_modes_have_lines_of_their_own_and_results_are_new():
    def predict(model, x):
        with torch.no_grad():
            return (model(x),)

    def work():
        pair = Pair(UNet)
        for train in (True, False, True, False):
            for model in (pair.plain, pair.model):
                model.train(train)
            for seed in range(4):
                pair.both(step, seed)
                pair.both(predict, seed)
        assert pair.lines() == [True] * 4, pair.model.explain()
        first, second = (pair.model(pair.x()) for _ in range(2))
        assert torch.equal(first, second) and first._block.data_ptr() != second._block.data_ptr()
        text = str(pair.model.programs[0])
        assert "forward" in text and "backward" in text and "aten.convolution_backward" in text
        pair.plain.head.bias.requires_grad_(False), pair.model.head.bias.requires_grad_(False)
        for seed in range(2):
            pair.both(step, seed)
        assert len(pair.lines()) == 5

    on_threads(work)


def test_gradients_add_up_and_a_signature_does_not_depend_on_them():
    def work():
        pair = Pair()
        for seed in range(7):
            pair.both(step, seed, zero=seed == 3)
        assert pair.lines() == [True] and pair.model.programs[0].replays == 4

    on_threads(work, 3)


def test_arguments_that_are_the_same_tensor():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, x, *, y):
            return self.inner(x) * y

    def same(model, x):
        z = x.sin()
        model(z, y=z).sum().backward()
        return (x.grad,)

    def apart(model, x):
        model(x, y=x.sin()).sum().backward()
        return (x.grad,)

    def work():
        pair = Pair(Sum)
        for seed in range(5):
            pair.both(same, seed)
            pair.both(apart, seed)
        assert pair.lines() == [True, True], pair.model.explain()

    on_threads(work)


@pytest.mark.parametrize("of", ["module", "weight", "both"])
def test_hooks_are_refused_with_the_reason(of):
    calls = []

    def work():
        pair = Pair()
        for model in (pair.plain, pair.model):
            if of != "weight":
                model[1].register_full_backward_hook(lambda *given: calls.append(0))
            if of != "module":
                model[0].weight.register_hook(lambda dy: 2 * dy)
        for seed in range(5):
            pair.both(step, seed)
        assert pair.lines() == [False] and "hook" in pair.model.explain()

    on_threads(work)
    assert len(calls) == (0 if of == "weight" else 20)


def of_a_plain_input(model, x):
    x = noise((2, 1, 12, 8), 5).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y, x.grad


def joined(model, x):
    # the gradients of the results are parts of one tensor
    z = torch.cat([model(x), model(x.sin())])
    z.square().sum().backward()
    return z, x.grad


def in_parts(model, x):
    one, other = model(x).chunk(2, 2)
    (one + other.exp()).sum().backward()
    return one, other, x.grad


def in_bfloat16(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    return y, x.grad


def of_inference(model, x):
    with torch.inference_mode():
        z = 2 * x
    with torch.no_grad():
        return (model(z),)


@pytest.mark.parametrize("use", [of_a_plain_input, joined, in_parts, in_bfloat16, of_inference])
def test_uses_of_a_model(use):
    def work():
        pair = Pair(lambda: nn.Conv2d(1, 2, 3, padding=1))
        for seed in range(6):
            pair.both(use, seed)
        assert pair.lines() == [True] * (1 + (use is joined)), pair.model.explain()

    on_threads(work)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, x):
        return self.inner(x).chunk(2, 1)


def test_results_that_lie_side_by_side_in_one_memory():
    def written(model, x):
        one, other = model(x)
        (one + other.exp()).sum().backward()
        return one, other, x.grad

    def work():
        pair = Pair(Parts)
        for seed in range(5):
            pair.both(written, seed)
        assert pair.lines() == [True], pair.model.explain()

    on_threads(work)


class Reads(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.inner, self.way, self.kept = nn.Conv2d(1, 1, 3, padding=1), way, []

    def forward(self, x):
        if self.way == "view":
            return x.view_as(x)
        if self.way == "checkpoint":
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)
        y = self.inner(x)
        if self.way == "earlier":
            self.kept.append(y)
            return y + self.kept[0]
        return y * 2 if y.sum().item() > 0 else y


REASONS = {
    "view": "shares memory",
    "checkpoint": "use_reentrant=False",
    "earlier": "requires a gradient, and is no argument",
    "value": "a value is read",
}


@pytest.mark.parametrize("way", REASONS)
def test_what_is_no_node_stays_as_it_is(way):
    def use(model, x):
        y = model(x)
        y.square().sum().backward(retain_graph=way == "earlier")
        return y, x.grad

    def work():
        pair = Pair(lambda: Reads(way))
        pair.plain.kept, pair.model.kept = [], []
        error = ""
        for seed in range(5):
            try:
                pair.both(use, seed)
            except RuntimeError as told:
                error += str(told)
        if way == "earlier":
            assert REASONS[way] in error and "Pass that tensor as an argument" in error
        else:
            assert not error and pair.lines() == [False] and REASONS[way] in pair.model.explain(), pair.model.explain()

    on_threads(work)


def test_forwards_without_a_backward_end_in_a_reason():
    def work():
        pair = Pair()
        for seed in range(10):
            pair.model(pair.x(seed))
        assert "no backward comes" in pair.model.explain()

    on_threads(work)


def test_what_a_forward_has_saved_goes_with_its_backward():
    def work():
        model = distdl.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
        seen = []
        for _ in range(6):
            y = model(torch.ones(3, 4))
            seen.append(weakref.ref(y.grad_fn))
            saved = y.grad_fn.gradients.__self__._saved if model.programs[0].replays else []
            seen += [weakref.ref(one) for one in saved if not isinstance(one, nn.Parameter)]
            y.sum().backward()
        assert model.programs[0].replays == 3 and len(seen) > 6
        del y, saved
        gc.collect()
        assert [one() for one in seen] == [None] * len(seen)

    on_threads(work, 1)


def test_a_replay_that_is_checked():
    def work():
        pair = Pair(lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)))
        pair.model = distdl.compile(pair.model._orig_mod, check=True)
        pair.known(5)
        assert pair.model.programs[0].checked

    on_threads(work)


def test_the_other_backend_has_them_up_to_rounding():
    def work():
        pair = Pair()
        for model in (pair.plain, pair.model):
            model.double()
        pair.model = distdl.compile(pair.model._orig_mod, backend="inductor")
        for seed in range(6):
            found = []
            for model in (pair.plain, pair.model):
                model.zero_grad()
                x = distdl.distribute_tensor(noise((2, 1, 12, 8), seed).double(), pair.grid).requires_grad_()
                given = [bits(one) for one in step(model, x)]
                found.append([*given, *(bits(one.grad) for one in model.parameters())])
            for one, other in zip(*found, strict=True):
                assert torch.allclose(one, other, 1e-11, 1e-11)
        assert pair.lines() == [True]

    on_threads(work)


class Output(dict):
    """What models of transformers give: values by name, as attributes, too."""

    def __getattr__(self, name):
        return self[name]


class Frozen(Output):
    def __setitem__(self, name, value):
        raise TypeError("a Frozen is not written")


class Named(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.head, self.kind = nn.Conv2d(1, 2, 3, padding=1).double(), kind

    def forward(self, x):
        y = self.head(x)
        return self.kind(logits=y, hidden=(y.tanh(), None))


@pytest.mark.parametrize(("kind", "lines"), [(Output, [True]), (Frozen, [False])])
def test_a_result_keeps_its_class(kind, lines):
    """One whose class lets nothing be written stays as it is."""

    def work():
        model = distdl.compile(distdl.distribute(Named(kind), (1, 1, distdl.world().size, 1)))
        for seed in range(6):
            found = model(distdl.distribute_tensor(noise((1, 1, 6, 5), seed).double(), (1, 1, distdl.world().size, 1)))
            assert type(found) is kind and found.hidden[1] is None
            (found.logits * found.hidden[0]).sum().backward()
            assert torch.equal(found.logits.tanh().full_tensor(), found.hidden[0].full_tensor())
        return [one.line is not None for one in model.programs]

    with warnings.catch_warnings(action="ignore"):
        assert distdl.run_workers(work, 2) == [lines, lines]
