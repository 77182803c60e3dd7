"""Weights in shares of the modules that come next, which come along in one message."""

import threading
import weakref

import pytest
import torch
from nets import assert_close, in_a_row, network, run, sharded
from same import noise
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.globals.models import gathering
from distdl.globals.models.gathered import Gathered


def weights_in(book):
    return [one for one in book.entries if one.layer.startswith("weights")]


@pytest.fixture
def whole(monkeypatch):
    """How many messages' weights this worker has whole."""
    made, init = threading.local(), Gathered.__init__

    def noted(self, *given):
        init(self, *given)
        made.__dict__.setdefault("each", []).append(self)

    monkeypatch.setattr(Gathered, "__init__", noted)
    return lambda: sum(one.is_present() for one in made.each)


@pytest.mark.parametrize(("bytes_along", "together"), [(1 << 19, 1), (2 * 8 * (48 + 4), 2), (0, 6)])
def test_weights_of_the_next_modules_come_along(monkeypatch, whole, bytes_along, together):
    """From the second forward on, which expects the order of the first. Their gradients go back together, too."""
    monkeypatch.setattr(gathering, "PREFETCHED", bytes_along)

    def messages(book):
        return sum(one.calls for one in weights_in(book))

    def work():
        alone, ours = in_a_row(), sharded(in_a_row(), (1, 1, 2))
        for step in range(3):
            x = noise(1, 4, 7, seed=step)
            with distdl.ledger() as book:
                y = ours(x)
            assert messages(book) == (together if step else 6), str(book)
            with distdl.ledger() as book:
                y.square().sum().backward()
            assert messages(book) == together + (together if step else 6), str(book)
            assert not whole()
            alone(x).square().sum().backward()
            for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
                assert torch.allclose(mine.grad.full_tensor(), theirs.grad, 1e-12, 1e-12)

    run(work)


def test_weights_below_a_module_come_along_in_a_backward(whole):
    """Attention reads those of its projection itself, so they are none of the module's own."""

    def work():
        ours = sharded(network(lambda: nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)), (2, 1, 1))
        for step in range(3):
            with distdl.ledger() as book:
                ours(distdl.distribute_tensor(noise(2, 3, 8), distdl.world()[:2].reshape(2, 1, 1))).sum().backward()
            assert sum(one.calls for one in weights_in(book)) == (3 if step else 15), str(book)
            assert not whole()

    run(work)


class Frozen(nn.Module):
    """Layers of which some are trained: each takes another way to its gradient."""

    def __init__(self):
        super().__init__()
        self.layers = in_a_row()
        self.layers[1].requires_grad_(False)
        self.layers[3].weight.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            shift = self.layers[0](x)
        x = self.layers[2](self.layers[1](self.layers[0](x)))
        x = checkpoint(self.layers[3], x, use_reentrant=False) + shift
        self.layers[5].requires_grad_(not self.layers[5].weight.requires_grad)
        return self.layers[5](self.layers[4](x))


def test_gradients_that_go_back_together_are_those_of_what_is_trained(whole):
    def work():
        alone, ours = Frozen(), sharded(Frozen(), (1, 1, 2))
        for step in range(5):
            for model in (alone, ours):
                model.zero_grad()
            x = noise(1, 4, 7, seed=step)
            losses = [model(x).square().sum() for model in (ours, alone)]
            if step == 3:  # (derivatives that are differentiated)
                for number, model in enumerate((ours, alone)):
                    wanted = [one for one in model.parameters() if one.requires_grad]
                    found = torch.autograd.grad(losses[number], wanted, create_graph=True)
                    losses[number] = sum(one.square().sum() for one in found)
            for loss in losses:
                loss.backward()
            for (name, mine), theirs in zip(ours.named_parameters(), alone.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), (step, name)
                assert mine.grad is None or torch.allclose(mine.grad.full_tensor(), theirs.grad, 1e-12, 1e-12), name
            assert not whole()

    run(work)


class Middle(nn.Module):
    """Layers of which those in the middle run in checkpoints."""

    def __init__(self):
        super().__init__()
        self.layers = in_a_row()

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:5]:
            x = checkpoint(layer, x, use_reentrant=False).tanh()
        return self.layers[5](x)


def test_only_gradients_that_are_there_go_back_together():
    """What runs in a checkpoint has nodes of its own. A forward without gradients, or a frozen one, changes nothing."""

    def work():
        ours, sent = sharded(Middle(), (1, 1, 2)), []
        for step in range(5):
            if step == 3:
                with torch.no_grad():
                    ours(noise(1, 4, 7))
            if step == 4:
                ours.requires_grad_(False)
                ours(noise(1, 4, 7).requires_grad_()).sum().backward()
                ours.requires_grad_(True)
            loss = ours(noise(1, 4, 7)).square().sum()
            with distdl.ledger() as book:
                loss.backward()
            every = weights_in(book)
            sent.append((sum(one.calls for one in every), sum(one.sent for one in every)))
        calls, nbytes = sent[0]
        assert sent[1:] == [(calls - 1, nbytes)] * 4, sent

    run(work)


class Apart(nn.Module):
    """Heads of which each has a loss of its own."""

    def __init__(self):
        super().__init__()
        self.heads = in_a_row(3)

    def forward(self, x):
        return [head(x).tanh() for head in self.heads]


def of_heads(work):
    """What a function of a model and its input finds, each time and on each worker; and what it finds of torch's."""
    alone = network(Apart)
    want = [work(alone, noise(1, 4, 7)) for _ in range(3)]
    ours = sharded(network(Apart), (1, 1, 2))
    x = distdl.distribute_tensor(noise(1, 4, 7), distdl.world()[:2].reshape(1, 1, 2))
    for theirs in want:
        mine = work(ours, x)
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert one == other if isinstance(other, str) else assert_close(one, other) is None


def test_hooks_of_weights_that_a_loss_does_not_reach_are_not_called():
    """Though their gradients go back with others."""

    def each(model, x):
        seen, handles = [], []
        for name, one in model.named_parameters():
            handles.append(one.register_hook(lambda gradient: gradient * 2))
            handles.append(one.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name)))
        losses = [y.square().sum() for y in model(x)]
        losses[0].backward(retain_graph=True)
        seen.append("")
        losses[2].backward()
        for one in handles:
            one.remove()
        losses = [y.square().sum() for y in model(x)]
        losses[0].backward()
        found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        model.zero_grad()
        return [*sorted(seen[: seen.index("")]), *sorted(seen[seen.index("") :]), *found]

    run(lambda: of_heads(each))


def test_weights_that_follow_from_others_are_differentiated_apart():
    """(A node that led to the graphs of several would let torch go through all of these, and free them.)"""

    def each(model, x):
        made = {name: one.square().exp() for name, one in model.named_parameters()}
        for _ in range(2):
            losses = [y.square().sum() for y in torch.func.functional_call(model, made, (x,))]
        for loss in losses:
            loss.backward()
        found = [one.grad.clone() for one in model.parameters()]
        model.zero_grad()
        return found

    run(lambda: of_heads(each))


def test_weights_that_follow_from_others_go_with_their_graph():
    def work():
        ours = sharded(network(Apart), (1, 1, 2))
        for _ in range(2):
            made = {name: one.square() for name, one in ours.named_parameters()}
            there = [weakref.ref(one) for one in made.values()]
            torch.func.functional_call(ours, made, (noise(1, 4, 7),))
            del made
        assert not any(one() is not None for one in there)

    run(work)


def test_a_gradient_may_be_written_while_a_graph_has_that_of_another_weight():
    def each(model, x):
        sum(y.square().sum() for y in model(x)).backward()
        q = torch.ones((), dtype=torch.float64, requires_grad=True)
        gradients = [one.grad for one in model.parameters()]
        loss = (gradients[0] * q).square().sum()
        for one in gradients[1:]:
            one.zero_()
        loss.backward()
        found = [q.grad, *(one.clone() for one in gradients)]
        model.zero_grad()
        return found

    run(lambda: of_heads(each))


class Seen(TorchFunctionMode):
    """Keeps the names of all functions of torch that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_what_the_model_calls():
    """And nothing that brings the weights."""

    def work():
        x, seen = noise(1, 4, 7), []
        ours = sharded(in_a_row(), (1, 1, 2))
        for model, given in ((in_a_row(), x), (ours, distdl.distribute_tensor(x, distdl.world()[:2].reshape(1, 1, 2)))):
            with Seen() as mode:
                model(given)
            seen.append(mode.names)
        assert seen[0] == seen[1] == ["conv1d"] * 6

    run(work)


class Turning(nn.Module):
    """Other layers, in another order, and other weights than what has come along."""

    def __init__(self):
        super().__init__()
        self.layers = in_a_row()
        self.step = -1

    def forward(self, x):
        self.step += 1
        for place in ([0, 1, 2, 3], [0, 1, 3, 2], [0, 5], [0, 5, 5, 1], [0, 5, 5, 1])[self.step]:
            x = self.layers[place](x)
            if self.step == 4 and place == 0:
                with torch.no_grad():
                    next(self.layers[5].parameters()).mul_(0.5)  # (behind what has come along)
                _, bias = self.layers[1].parameters()
                bias.data = bias.data + 1
        return x


def test_what_has_come_along_is_not_read_where_it_does_not_hold(whole):
    def work():
        alone, ours = Turning(), sharded(Turning(), (1, 1, 2))
        for step in range(5):
            for model in (alone, ours):
                model.zero_grad()
            x = noise(1, 4, 7, seed=step).requires_grad_()
            y, expected = ours(x), alone(x)
            assert torch.allclose(y.full_tensor(), expected, 1e-12, 1e-12)
            if step == 2:  # (a part of the backward, which leaves nothing)
                torch.autograd.grad(y.square().sum(), [x], retain_graph=True)
                assert not whole()
            y.square().sum().backward()
            expected.square().sum().backward()
            for (name, mine), theirs in zip(ours.named_parameters(), alone.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), (step, name)
                assert mine.grad is None or torch.allclose(mine.grad.full_tensor(), theirs.grad, 1e-12, 1e-12), name

    run(work)


class Guided(nn.Module):
    """One layer runs in another mode than the others: what comes along for it does so in theirs."""

    def __init__(self, place):
        super().__init__()
        self.layers, self.place = in_a_row(3), place

    def forward(self, x, y):
        found = []
        for place, layer in enumerate(self.layers):
            if place != self.place:
                found.append(layer(x))
            elif torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.enable_grad():
                    layer(y.clone()).square().sum().backward()
            else:
                with torch.inference_mode():
                    layer(x)
        return found[0] + found[1]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("inference", [False, True])
def test_a_part_in_inference_mode_or_outside_of_it(place, inference):
    def work():
        alone, ours = Guided(place), sharded(Guided(place), (1, 1, 2))
        x = noise(1, 4, 7)
        for _ in range(3):
            found = []
            for model in (alone, ours):
                model.zero_grad()
                if inference:
                    with torch.inference_mode():
                        found.append(model(x, x))
                else:
                    found.append(model(x, x))
                    found[-1].square().sum().backward()
            assert torch.allclose(found[1].full_tensor(), found[0], 1e-12, 1e-12)
            for (name, mine), theirs in zip(ours.named_parameters(), alone.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), name
                assert mine.grad is None or torch.allclose(mine.grad.full_tensor(), theirs.grad, 1e-12, 1e-12), name

    run(work)
