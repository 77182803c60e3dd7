"""``torch.compile`` around, in and behind a distributed model compiles nothing of it, and changes no number."""

import copy
import threading

import pytest
import torch
from nets import assert_close, assert_same_state, batch, network, partition
from same import noise
from torch import nn

import distdl

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.timeout(120),  # the compiler alone takes seconds to import
    # the compiler looks at it, and hides what torch says of that in a way that a filter for errors comes before
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


TURN = threading.Lock()  # (Python 3.11 counts the depth of what it parses for all threads together, and may raise then)


def _scripted(model):
    with TURN:
        return torch.jit.script(model)


def _compiled(function):
    return torch.compile(function, backend="eager")


def _around(model, distribute):
    return _compiled(distribute(model)), nn.functional.mse_loss


def _in_place(model, distribute):
    model = distribute(model)
    model.compile(backend="eager")
    return model, nn.functional.mse_loss


def _before(model, distribute):
    return distribute(_compiled(model)), nn.functional.mse_loss


def _inside(model, distribute):
    model.inner = _compiled(model.inner)
    return distribute(model), nn.functional.mse_loss


def _behind(model, distribute):
    return distribute(model), _compiled(lambda y, target: (y - target).square().mean())


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("way", [_around, _in_place, _before, _inside, _behind])
def test_a_compiled_model_computes_as_it_is(way, weights):
    def work():
        P = partition((2, 1, 1))
        sequential = network()
        given, loss = way(
            copy.deepcopy(sequential), lambda one: distdl.distribute(one, P, weights=weights, fallback="error")
        )
        for model, function in ((given, loss), (sequential, nn.functional.mse_loss)):
            optimiser = torch.optim.SGD(model.parameters(), 0.05)
            for step in range(2):
                x, target = batch(step)
                optimiser.zero_grad()
                function(model(x), target).backward()
                optimiser.step()
        model = getattr(given, "_orig_mod", given)
        if way is _inside:
            model.inner = model.inner._orig_mod
        assert_same_state(model, sequential)

    distdl.run_workers(work, 3)
    torch._dynamo.reset()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy * w, (dy * x).sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_autograd_function_in_what_is_compiled():
    function = _compiled(lambda x, w: _Product.apply(x.sin(), w) + 1)

    def work():
        x, found = noise(4, 3), []
        for one in (x, distdl.distribute_tensor(x, partition((2, 1)))):
            w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
            y = function(one.requires_grad_(), w)
            y.square().sum().backward()
            found.append((y, one.grad, w.grad))
        for theirs, ours in zip(*found, strict=True):
            assert_close(ours, theirs)

    distdl.run_workers(work, 3)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "use",
    [
        lambda model: torch.jit.trace(model, batch(0)[0]),
        _scripted,
        lambda model: torch.export.export(model, (batch(0)[0],)),
    ],
    ids=["trace", "script", "export"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.(trace|trace_method|script)` is deprecated")
def test_what_cannot_be_traced_says_so(use):
    def work():
        model = distdl.distribute(network(), partition((2, 1))).eval()
        with pytest.raises((RuntimeError, AttributeError), match="a distributed model runs in Python"):
            use(model)

    distdl.run_workers(work, 3)
    torch._dynamo.reset()
