"""Functions of a user's own, applied to global tensors."""

import math
import weakref
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from launched import assert_close, on_workers, split
from nets import Again
from registered import unregister
from same import noise
from torch.utils.checkpoint import checkpoint

import distdl
from distdl import GlobalTensor
from distdl.partition import Layout

x35, row = noise(3, 5), noise(5, seed=2)


def scaled_sine():
    """A new autograd function: y = sin(x) w."""

    class ScaledSine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x.sin() * w

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            return dy * w * x.cos(), (dy * x.sin()).sum(0)

    return ScaledSine


@pytest.mark.parametrize("named", [0, 1, 2])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
def test_an_autograd_function_of_elements(grid, named):
    """Also of arguments by name, as many as that."""
    function = scaled_sine()
    distdl.register(function, "elementwise")

    @on_workers
    def work():
        found = []
        for x, w in ((split(x35, *grid), row.clone()), (x35.clone(), row.clone())):
            x.requires_grad_(), w.requires_grad_()
            y = function.apply(*(x, w)[: 2 - named], **dict([("x", x), ("w", w)][2 - named :]))
            found.append((y, *torch.autograd.grad((y * y).sum(), (x, w))))
        assert type(found[0][0]) is GlobalTensor
        for ours, theirs in zip(*found, strict=True):
            assert_close(ours, theirs)

    work()
    unregister(function)
    work()  # (of whole tensors)


@pytest.mark.parametrize("handler", ["elementwise", lambda apply, args, kwargs: distdl.local_map(apply)(*args)])
def test_autograd_functions_derived_from_a_registered_one(handler):
    """They compute by themselves, on plain tensors, too."""
    function = scaled_sine()

    class Doubled(function):
        @staticmethod
        def forward(ctx, x, w):
            return 2 * function.forward(ctx, x, w)

        @staticmethod
        def backward(ctx, dy):
            return function.backward(ctx, 2 * dy)

    distdl.register(function, handler)

    @on_workers
    def work():
        for one, factor in ((function, 1), (Doubled, 2)):
            for x in (split(x35), x35.clone()):
                w = row.clone().requires_grad_()
                y = one.apply(x.requires_grad_(), w)
                assert_close(y, factor * x35.sin() * row)
                dx, dw = torch.autograd.grad(y.sum(), (x, w))
                assert_close(dx, factor * x35.cos() * row)
                assert_close(dw, factor * x35.sin().sum(0))

    work()
    distdl.register(Doubled, "elementwise")
    work()
    unregister(function)
    unregister(Doubled)
    work()
    assert "apply" not in vars(function)


def test_an_autograd_function_with_an_apply_of_its_own():
    class Shifted(scaled_sine()):
        @classmethod
        def apply(cls, x):
            return super().apply(x, row)

    @on_workers
    def work():
        assert_close(Shifted.apply(split(x35)), x35.sin() * row)

    work()
    own = vars(Shifted)["apply"]
    distdl.register(Shifted, "elementwise")
    distdl.register(Shifted, lambda apply, args, kwargs: apply(*args, **kwargs))
    work()
    unregister(Shifted)
    assert vars(Shifted)["apply"] is own


def test_a_registered_function_that_is_none_of_elements():
    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum(0)

    def sums(x):
        if type(x) is GlobalTensor:
            return torch.overrides.handle_torch_function(sums, (x,), x)
        return x.sum(0)

    distdl.register(Sums, "elementwise")
    distdl.register(sums, "elementwise")

    @on_workers
    def work():
        for function in (Sums.apply, sums):
            with pytest.raises(
                ValueError, match=r"(?i)sums is registered as elementwise, but gave [05] for a block of .x[05] on"
            ):
                function(split(x35))

    try:
        work()
    finally:
        unregister(sums)


def test_an_autograd_function_of_parameters_alone():
    """The parameters of a distributed model are no global tensors; their gradients are summed all the same."""
    function = scaled_sine()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(x35[0].clone().reshape(1, 5))
            self.b = torch.nn.Parameter(row.clone())

        def forward(self, x):
            return x * function.apply(self.a, self.b)

    @on_workers
    def work():
        ours, theirs = Model(), Model()
        distdl.distribute(ours, split(x35).layout.partition)
        for model in (ours, theirs):
            model(x35).pow(2).sum().backward()
        assert_close(ours.a.grad, theirs.a.grad)
        assert_close(ours.b.grad, theirs.b.grad)

    work()


def test_a_handler_of_ones_own():
    @distdl.register(torch.alias_copy)
    def handler(function, args, kwargs):
        x, *rest = args
        return GlobalTensor.from_local(function(x.to_local(), *rest), x.layout.partition)

    @on_workers
    def work():
        assert_close(torch.alias_copy(split(x35)), torch.alias_copy(x35))

    work()
    unregister(torch.alias_copy)


@pytest.mark.parametrize("wrong", [(3, "elementwise"), (torch.exp, "fast"), (torch.nn.Linear, "elementwise")])
def test_what_cannot_be_registered(wrong):
    with pytest.raises(TypeError, match="register needs"):
        distdl.register(*wrong)


@on_workers
def test_a_function_of_blocks():
    """The result lies as the argument; the plain weight's gradient is added up."""
    found = []
    for x, w in ((split(noise(1, 5)), row.clone()), (noise(1, 5), row.clone())):
        x.requires_grad_(), w.requires_grad_()
        y = distdl.local_map(lambda a, b: torch.exp(a * b))(x, w)
        found.append((y, *torch.autograd.grad((y * y).sum(), (x, w))))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@on_workers
def test_weights_that_a_function_of_blocks_takes_from_around_it():
    """Those of a distributed model get whole gradients, as arguments do; others this worker's part."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(row.clone())

        def forward(self, x):
            return distdl.local_map(lambda a: a * self.w)(x)

    x, w, model = split(x35), row.clone().requires_grad_(), Model()
    distdl.distribute(model, x.layout.partition)(x).sum().backward()
    assert_close(model.w.grad, x35.sum(0))
    distdl.local_map(lambda a: a * w)(x).sum().backward()
    assert_close(w.grad, x.layout.block(x35).reshape(-1, 5).sum(0))


def mapped(function, x):
    return distdl.local_map(function, out=x.layout.partition)(x) if type(x) is GlobalTensor else function(x)


def slope(function, x):
    """The derivative of the sum of a function, by autograd."""
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        return torch.autograd.grad(function(at).sum(), at, create_graph=True)[0]


def weight_written(x, model):
    with torch.no_grad():
        model.w += row.cos()
    return x * model.w


def written(x, w):
    x = x * 1
    x[:, 1:].mul_(w[1:])
    return x


SineTimes = scaled_sine()
plain_checkpoint, reentrant = partial(checkpoint, use_reentrant=False), partial(checkpoint, use_reentrant=True)


def beside_leaf(x, model):
    return x * (model.w * torch.ones_like(row, requires_grad=True)).sin()


def slopes_by(w, x):
    """Of each row, by a leaf that is made of a weight."""
    return torch.stack([slope(lambda w, row=row: SineTimes.apply(row[None], w), w) for row in x])


class Waves(torch.autograd.Function):
    """Gives two results."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.sin(), w.cos()

    @staticmethod
    def backward(ctx, dy, dz):
        x, w = ctx.saved_tensors
        return dy * x.cos(), -dz * w.sin()


def of_waves(a, w):
    y, z = Waves.apply(a, w)
    return y * z


class Calling(Again):
    """Not linear in the gradient."""

    @staticmethod
    def backward(ctx, dy):
        return Again.backward(ctx, dy.tanh())


def scaled(x, model):
    """By a number that follows from a weight without a graph."""
    with torch.no_grad():
        scale = (model.w * model.w).sum()
    return x * scale * model.w


BESIDE_WEIGHTS = {
    "product": lambda m, x: mapped(lambda a: (a * m.w).sin(), x),
    "in a checkpoint": lambda m, x: mapped(lambda a: plain_checkpoint(lambda a: (a * m.w).sin(), a), x),
    "leaf in a checkpoint": lambda m, x: mapped(lambda a: plain_checkpoint(lambda a: beside_leaf(a, m), a), x),
    "re-entry": lambda m, x: mapped(lambda a: reentrant(lambda a: (a.cos() * m.w).sin(), a), x),
    "re-entry of copies": lambda m, x: mapped(lambda a: math.prod(reentrant(lambda w: (w.sin(), w * m.w), m.w)) * a, x),
    "re-entry of two": lambda m, x: mapped(lambda a: math.prod(reentrant(lambda a: (a.cos() * m.w, m.w.sin()), a)), x),
    "re-entry in re-entry": lambda m, x: mapped(
        lambda a: reentrant(lambda a: reentrant(lambda a: (a.cos() * m.w).sin(), a) * m.w, a), x
    ),
    "re-entry in that of weights": lambda m, x: (
        x * reentrant(lambda w: reentrant(lambda w: (w.cos() * m.w).sin(), w) * m.w, m.w)
    ),
    "re-entry of weights": lambda m, x: mapped(lambda a: reentrant(lambda w: (a.detach().cos() * w).sin(), m.w), x) * x,
    "re-entry of both": lambda m, x: mapped(
        lambda a: math.prod(reentrant(lambda a, w: (a.cos() * w, w * m.w), a, m.w)), x
    ),
    "re-entry of both, of a constant": lambda m, x: (
        x * mapped(lambda a: math.prod(reentrant(lambda a, w: (a.cos() * w, w * m.w), a, m.w)), x.detach())
    ),
    "re-entry in a checkpoint of weights": lambda m, x: (
        x * plain_checkpoint(lambda w: reentrant(lambda w: (w.cos() * m.w).sin(), w.sin()) * m.w, m.w * 2)
    ),
    "re-entry of what has no gradient, written": lambda m, x: (
        x * mapped(lambda a: reentrant(lambda a: a * m.w, a.abs()).mul_(m.w), x.detach())
    ),
    "a view in re-entry": lambda m, x: reentrant(lambda x: mapped(lambda a: a[:, 1:] * m.w[1:], x), x * m.w),
    "a view without gradients": lambda m, x: x * torch.no_grad()(mapped)(lambda a: a[:] * m.w, x) * m.w,
    "an autograd function in a checkpoint of weights": lambda m, x: (
        x * plain_checkpoint(lambda w: SineTimes.apply(w.cos()[None], w), m.w * 2)
    ),
    "an autograd function in checkpoints of weights": lambda m, x: plain_checkpoint(
        lambda w: x * plain_checkpoint(lambda w: SineTimes.apply(w.cos()[None], w), w), m.w * 2
    ),
    "a weight without gradients in a checkpoint": lambda m, x: mapped(
        lambda a: plain_checkpoint(lambda a: scaled(a, m), a), x
    ),
    "a weight without gradients in re-entry": lambda m, x: mapped(lambda a: reentrant(lambda a: scaled(a, m), a), x),
    "an autograd function of weights, which knows some, in a checkpoint": lambda m, x: plain_checkpoint(
        lambda x: x * Calling.apply(m.w * 2, lambda w: Calling.apply(w, lambda w: w.sin() * m.w)), x
    ),
    "an autograd function that computes again": lambda m, x: mapped(
        lambda a: Calling.apply(a, lambda a: (a * m.w).sin() * m.w) * m.w, x
    ),
    "one that computes its own block again": lambda m, x: mapped(
        lambda a: Calling.apply(a.sin(), lambda a: (a * m.w).sin() * m.w) * m.w, x
    ),
    "one of both that computes again": lambda m, x: mapped(
        lambda a: Calling.apply(a * m.w, lambda a: Calling.apply(a, lambda a: (a * m.w).sin())), x
    ),
    "an autograd function": lambda m, x: mapped(lambda a: SineTimes.apply(a, m.w), x),
    "slopes of an autograd function": lambda m, x: mapped(lambda a: a * m.w * slopes_by(m.w, a), x),
    "two results": lambda m, x: mapped(lambda a: of_waves(a, m.w), x),
    "weight written": lambda m, x: mapped(lambda a: weight_written(a, m), x),
    "written into": lambda m, x: mapped(lambda a: written(a, m.w), x),
    "written": lambda m, x: (mapped(lambda a: a.mul_(m.w), x := x * m.w) + x.sin()) * m.w,
    "autograd.grad": lambda m, x: mapped(lambda a: slope(lambda b: (b * m.w).sin(), a), x) * x,
    "torch.func.grad": lambda m, x: mapped(torch.func.grad(lambda a: (a * m.w).sin().sum()), x),
    "torch.func.jvp": lambda m, x: mapped(lambda a: torch.func.jvp(lambda b: (b * m.w).sin(), (a,), (a,))[1], x),
    "torch.vmap": lambda m, x: mapped(torch.vmap(torch.func.grad(lambda a: (a * m.w).sin().sum())), x),
}


def assert_trains_alike(model, trained, x, weights):
    """What ``trained(model(), x)`` gives is the same distributed, on two workers that have rows of x each."""

    def work():
        P = distdl.world().reshape(2, 1)
        found = trained(distdl.distribute(model(), P, weights=weights), distdl.distribute_tensor(x, P))
        for ours, theirs in zip(found, trained(model(), x.clone()), strict=True):
            assert_close(ours, theirs)

    distdl.run_workers(work, 2)


@pytest.mark.parametrize(
    ("use", "weights"),  # of shares, a forward writes none
    [(use, weights) for use in BESIDE_WEIGHTS for weights in ("replicated", "sharded")
     if (use, weights) != ("weight written", "sharded")],
)  # fmt: skip
@pytest.mark.parametrize("rows", [4, 3])  # (of blocks of one shape, sums of gradients are no error)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_blocks_beside_weights_have_gradients_of_their_own(use, rows, weights):
    """Also where the input, of which nobody knows whether it is a block, requires a gradient."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(row.clone())

        def forward(self, x):
            return BESIDE_WEIGHTS[use](self, x)

    def trained(model, x):
        y = model(x.requires_grad_())
        y.square().sum().backward()
        return y, x.grad, model.w.grad

    assert_trains_alike(Model, trained, noise(rows, 5), weights)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_plain_tensors_beside_weights_in_a_checkpoint_with_re_entry(weights):
    """Also in a forward that has asked for blocks, where any plain tensor may be one."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(row.clone())

        def forward(self, x, scale):
            if type(x) is GlobalTensor:
                x.to_local()
            return x * reentrant(lambda scale, w: (scale * w).sin() * self.w, scale, self.w)

    def trained(model, x):
        scale = row.cos().requires_grad_()
        model(x, scale).square().sum().backward()
        return scale.grad, model.w.grad

    assert_trains_alike(Model, trained, x35, weights)


def seen(x):
    """x, of which a forward has asked for the block."""
    if type(x) is GlobalTensor:
        x.to_local()
    return x


OF_PLAIN = {
    "re-entry": lambda m, x, s: x * reentrant(lambda s: s.sin() * m.w, s),
    "re-entry of two": lambda m, x, s: x * math.prod(reentrant(lambda s: (s.sin() * m.w, s.cos()), s)),
    "re-entry in re-entry": lambda m, x, s: x * reentrant(lambda s: reentrant(lambda s: s.sin() * m.w, s) * m.w, s),
    "re-entry in a checkpoint": lambda m, x, s: (
        x * plain_checkpoint(lambda s: reentrant(lambda s: s.sin() * m.w, s * 2) * m.w, s)
    ),
    "re-entry where there may be blocks": lambda m, x, s: seen(x) * reentrant(lambda s: s.sin() * m.w, s),
    "an autograd function": lambda m, x, s: x * Calling.apply(s * 2, lambda s: s.sin() * m.w),
}


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("use", OF_PLAIN)
def test_autograd_functions_of_plain_tensors_may_know_weights(use, weights):
    """What they give counts once. (Of the weights, those that compute without a graph have no gradient.)"""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(row.clone())

        def forward(self, x, scale):
            return OF_PLAIN[use](self, x, scale) * self.w

    def trained(model, x):
        scale = row.cos().requires_grad_()
        y = model(x.requires_grad_(), scale)
        y.square().sum().backward()
        return y, x.grad, scale.grad, model.w.grad

    assert_trains_alike(Model, trained, noise(4, 5), weights)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("use", ["product", "an autograd function", "in a checkpoint"])
def test_second_derivatives_of_blocks_beside_weights(use, weights):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = torch.nn.Parameter(row.clone()), torch.nn.Parameter(row.cos())

        def forward(self, x):
            whole = SimpleNamespace(w=self.w * self.v)
            return BESIDE_WEIGHTS[use](whole, x)

    def trained(model, x):
        y = model(x.requires_grad_()).square().sum()
        slopes = torch.autograd.grad(y, [x, model.w], create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
        return *slopes, x.grad, model.w.grad, model.v.grad

    assert_trains_alike(Model, trained, x35, weights)


@on_workers
def test_results_of_other_layouts():
    x = split(x35)
    double = distdl.local_map(lambda a: torch.cat([a, a], 1), out=x.layout.partition)
    for _ in range(2):
        y = double(x)
        assert_close(y, torch.cat([x35, x35], 1))
    thirds = Layout.of(x.layout.partition, [[(0, 4), (4, 6)], [(0, 5)]])
    for out in (thirds, lambda layout: thirds):
        y = distdl.local_map(lambda a: torch.cat([a, a]), out=out)(x)
        assert_close(y, torch.cat([x35[:2], x35[:2], x35[2:], x35[2:]]))
    of_rows = split(x35[:, 0]).layout
    for out in (lambda layout: (of_rows, layout), (lambda layout: of_rows, "same"), (of_rows, lambda layout: "same")):
        sums, means = distdl.local_map(lambda a: (a.sum(1), a), out=out)(x)
        assert_close(sums, x35.sum(1))
        assert_close(means, x35)
    with pytest.raises(ValueError, match=r"local_map needs blocks.*on worker 0.* gave 2x1 instead of 2x5"):
        distdl.local_map(lambda a: a[:, :1])(x)
    with pytest.raises(
        ValueError, match=r"as many dims as the partition of out= has axes \(2x1 .*gave \[2\] on 0, \[1\] on 1"
    ):
        distdl.local_map(lambda a: a.sum(1), out=x.layout.partition)(x)
    with pytest.raises(ValueError, match="as many places as results"):
        distdl.local_map(lambda a: (a, a), out=("same",))(x)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda block: block.float(), "needs blocks of one dtype; .* torch.float64 on worker 0 and torch.float32 on"),
        (lambda block: None, "to be a tensor on every worker or on none; on worker 1, function gave none"),
        (lambda block: block[:, :1], "on worker 1, function gave 1x1 instead of 1x5"),
        (
            lambda block: block[:0].float(),
            "needs blocks of one dtype; .* torch.float64 on worker 0 and torch.float32 on",
        ),
        (lambda block: (block, block), "as many results .* gave one result on worker 0 and a tuple of 2 on worker 1"),
        (
            lambda block: {"a": block},
            "as many results .* gave one result on worker 0 and one result with tensors in a dict",
        ),
        (lambda block: [], "as many results .* gave one result on worker 0 and a list of 0 on worker 1"),
    ],
)
def test_a_function_that_gives_something_else_on_one_worker(odd, words):
    """The same error on every worker, also where the odd one could go on with what it has."""

    def work():
        P = distdl.world()

        def function(block):
            return odd(block) if P.rank == 1 else block * 2

        with pytest.raises(ValueError, match=words) as error:
            distdl.local_map(function)(distdl.distribute_tensor(x35, P.reshape(3, 1)))
        P.allgather_data(0)
        return str(error.value)

    assert len(set(distdl.run_workers(work, 3))) == 1


@dataclass(slots=True)
class Slotted:
    n: float

    def __call__(self, a):
        return a * self.n


WRONG = {
    "an object": (lambda a: a, object(), "local_map needs out to be 'same', .* or a tuple of these; got a object$"),
    "a number of a function": (lambda a: a, lambda layout: 3, "local_map needs a function in out= to give .*; got 3$"),
    "one of several": (lambda a: (a, a), ("same", lambda layout: None), "local_map needs a function .*; got None$"),
    "a dict": (
        lambda a: {"a": a},
        "same",
        "needs results to be plain and dense tensors, alone .* gave one result with tensors in a dict$",
    ),
    "a tuple in a tuple": (lambda a: (a, (a,)), "same", "gave a tuple of 2 with tensors in a tuple$"),
    "an object of tensors": (lambda a: SimpleNamespace(y=a), "same", "one result with a SimpleNamespace$"),
    "one beside a tensor": (lambda a: (a, Slotted(a)), "same", "gave a tuple of 2 with a Slotted$"),
    "an object of one": (lambda a: (a, [Slotted(Slotted(a))]), "same", "gave a tuple of 2 with a Slotted$"),
    "a generator": (lambda a: (one for one in (a, a)), "same", "gave one result with a generator$"),
    "a sparse tensor": (lambda a: a.to_sparse(), "same", "gave one result with a tensor that is torch.sparse_coo$"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_place_and_no_result(what):
    function, out, words = WRONG[what]

    def work():
        x = split(x35)
        with pytest.raises((TypeError, ValueError), match=words) as error:
            distdl.local_map(function, out=object() if type(out) is object else out)(x)
        return str(error.value)

    assert len(set(distdl.run_workers(work, 3))) == 1


@on_workers
def test_a_function_of_blocks_that_gives_a_global_tensor():
    """Where one worker has all of it, it has the shape of the block."""
    x = split(x35, 1, 1)
    for function in (lambda a: x * 2, lambda a: (a, x)):
        with pytest.raises(ValueError, match=r"gave (one result|a tuple of 2) with a global tensor$"):
            distdl.local_map(function)(x)


OTHERS = {
    "partitions": (lambda P, odd: P.reshape(1 + odd, 2 - odd), "1x2 on workers 0, 1 .* with out=2x1 on"),
    "layouts": (
        lambda P, odd: rows(P, 1 + odd),
        "a layout over 2x1 on workers 0, 1 in blocks 1[+]2, 5 .* with out=a layout .* in blocks 2[+]1, 5",
    ),
}


def rows(P, count):
    """A layout of 3 x 5 of which the first worker has some rows."""
    return Layout.of(P.reshape(2, 1), [[(0, count), (count, 3)], [(0, 5)]])


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("what", OTHERS)
def test_places_that_differ_between_workers(what, function):
    """Each would have had another tensor of what all of them take for one."""
    other, words = OTHERS[what]

    def work():
        x, P = split(x35), distdl.world()[:2]
        place = other(P, distdl.world().rank == 1)
        with pytest.raises(distdl.CommunicationError, match=f"with out={words}") as error:
            distdl.local_map(lambda a: a, out=(lambda layout: place) if function else place)(x)
        return str(error.value)

    assert len(set(distdl.run_workers(work, 3))) == 1


class Scaling:
    def __init__(self, n):
        self.n = n

    def scale(self, a):
        return self.n * a


@on_workers
def test_a_function_of_blocks_is_not_kept():
    """One that each forward makes may hold activations. The same one is asked about once, and so is a method."""
    x = split(x35)
    held = []
    for n in (1, 2, 3):  # (each function may be where the one before was)
        block = x.to_local() + n
        held.append(weakref.ref(block))
        y = distdl.local_map(lambda a, n=n, block=block: torch.cat([a] * n, 1), out=x.layout.partition)(x)
        assert_close(y, torch.cat([x35] * n, 1))
    del block
    assert not any(one() is not None for one in held)

    twice = Scaling(2)
    for function in (torch.exp, partial(torch.mul, 2.0), lambda a: twice.scale(a)):
        distdl.local_map(function)(x)
        with distdl.ledger(comm=x.layout.partition.comm) as book:
            distdl.local_map(function)(x)
        assert not book.entries
    distdl.local_map(twice.scale)(x)
    with distdl.ledger(comm=x.layout.partition.comm) as book:
        distdl.local_map(twice.scale)(x)  # (each time, Python makes another object of it)
    assert not book.entries
    assert_close(distdl.local_map(Scaling(3).scale)(x), 3 * x35)


@dataclass
class Adding:
    n: float

    def to(self, a):
        return a + self.n


@dataclass(frozen=True)
class Multiplying:
    n: float

    def __call__(self, a):
        return a * self.n


@on_workers
def test_equal_functions_are_not_the_same():
    """Of an equal one, some workers may still know and others not: who asks again would wait for the others."""
    x = split(x35)
    first = Multiplying(2.0)
    assert_close(distdl.local_map(first)(x), 2 * x35)
    if distdl.world().rank != 0:
        del first
    assert_close(distdl.local_map(Multiplying(2.0))(x), 2 * x35)
    assert_close(distdl.local_map(Adding(2.0).to)(x), x35 + 2)  # (of an object without a hash)
    assert_close(distdl.local_map(Slotted(2.0))(x), 2 * x35)  # (nor a weak reference)


@on_workers
def test_second_derivatives_of_functions_of_blocks():
    found = []
    for x in (split(x35), x35.clone()):
        x.requires_grad_()
        (dx,) = torch.autograd.grad(distdl.local_map(lambda a: a**4)(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad((dx**2).sum(), x)[0])
    assert_close(*found)


class Both(NamedTuple):
    sine: torch.Tensor
    positive: torch.Tensor


def dict_of(ys):
    return {"sine": ys[0], "positive": ys[1]}


class Pair(tuple):
    """A tuple that is made of two arguments."""

    __slots__ = ()

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


@pytest.mark.parametrize("kind", [Pair, Both])
@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_a_function_that_falls_back_and_gives_a_tuple_of_its_own(kind):
    def function(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(function, (x,), x)
        return {"found": [kind(x.sin(), x.shape)]}

    with pytest.raises(TypeError, match=f"has a {kind.__name__}, a class of tuples .* give a tuple .* distdl.register"):
        function(split(x35))


@pytest.mark.parametrize(
    ("kind", "registered"),
    [(kind, True) for kind in (list, Both._make, dict_of)] + [(kind, False) for kind in (list, tuple, dict_of)],
)
@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_a_function_that_gives_a_structure(kind, registered):
    """On blocks, and on one worker."""

    def function(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(function, (x,), x)
        return [kind([x.sin(), x > 0]), 3]

    if registered:
        distdl.register(function, "elementwise")
    x = split(x35).requires_grad_()
    y, three = function(x)
    assert type(y) is type(function(x35)[0]) and three == 3
    sine, positive = y.values() if isinstance(y, dict) else y
    assert_close(sine, x35.sin())
    assert torch.equal(positive.full_tensor(), x35 > 0)
    assert_close(torch.autograd.grad(sine.sum(), x)[0], x35.cos())
    if registered:
        unregister(function)


@pytest.mark.parametrize("within", [lambda y: y, lambda y: (0, y), lambda y: {"y": [y]}])
@on_workers
def test_a_function_of_elements_that_gives_an_object(within):
    def function(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(function, (x,), x)
        return within(SimpleNamespace(y=x * 2) if x.dtype.is_floating_point else x.device)

    distdl.register(function, "elementwise")
    with pytest.raises(TypeError, match="registered as elementwise, but gave a SimpleNamespace, and no tensors"):
        function(split(x35))
    assert function(split(x35.long())) == within(x35.device)  # (in which no block is hidden)
    unregister(function)


HELD = {
    "an object in another": lambda y: Slotted(SimpleNamespace(y=[y])),
    "values of a dict": lambda y: {"y": y}.values(),
    "an iterator": lambda y: map(torch.sin, [y]),
    "an object without tensors": lambda y: Slotted(2.0),
    "a partial": lambda y: partial(torch.add, y),
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
@on_workers
def test_a_function_of_elements_that_gives_what_holds_tensors_deeper_down(held):
    def function(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(function, (x,), x)
        return x.sin(), held(x * 2)

    distdl.register(function, "elementwise")
    with pytest.raises(TypeError, match=r"registered as elementwise, but gave a .*, and no tensors"):
        function(split(x35))
    unregister(function)


@on_workers
def test_a_function_of_elements_of_a_list():
    """Its tensors would not come to be blocks."""

    def function(xs):
        if torch.overrides.has_torch_function(xs):
            return torch.overrides.handle_torch_function(function, xs, xs)
        return sum(xs)

    distdl.register(function, "elementwise")
    with pytest.raises(TypeError, match="registered as elementwise, but got global tensors in a structure"):
        function([split(x35), split(x35)])
    unregister(function)


def one_of_two(a, b):
    """Of results that follow from other arguments each; rows without cells have no graph."""
    return (a.sin() if a.numel() else a.detach(), b.cos(), torch.ones_like(a))


FOLLOWING = {
    "one of its arguments": lambda a, b: a.sin(),
    "one of them, without gradients": lambda a, b: a * b.detach(),
    "fewer without cells": lambda a, b: a * b if a.numel() else a,
    "the other without cells": lambda a, b: a * 2 if a.numel() else b,
    "each for itself": one_of_two,
    "what it writes": lambda a, b: (a * 1).mul_(2).add_(b) if a.numel() else (a * 1),
}


@pytest.mark.parametrize("what", FOLLOWING)
def test_results_that_depend_on_some_of_the_arguments(what):
    """A backward goes on to those, also on workers that have no cells; and to no others."""

    def work():
        found = []
        for whole in (False, True):
            leaves = [noise(3, 5, seed=seed).requires_grad_() for seed in (1, 2)]
            P = distdl.world()[:2].reshape(2, 1)  # (and the third worker has none)
            for _ in range(2):
                x, y = leaves if whole else [distdl.distribute_tensor(leaf, P) for leaf in leaves]
                results = (FOLLOWING[what] if whole else distdl.local_map(FOLLOWING[what]))(x, y)
                results = results if isinstance(results, tuple) else (results,)
                results[0].square().sum().backward()
            found.append(([one.requires_grad for one in results], [leaf.grad for leaf in leaves]))
        (flags, ours), (own_flags, theirs) = found
        assert flags == own_flags
        if distdl.world().rank == 0:
            for one, other in zip(ours, theirs, strict=True):
                assert_close(0 * x35 if one is None else one, 0 * x35 if other is None else other)
        distdl.world().allgather_data(0)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:], lambda x: x[:, :2], lambda x: x.T])
def test_a_result_that_is_the_view_it_has_written(view):
    """It stays that view: what is written into it later is written into the tensor, too."""

    def work():
        P, leaves, found = distdl.world()[:2].reshape(2, 1), [x35.clone(), x35.cos()], []
        for place in (partial(distdl.distribute_tensor, P=P), torch.clone):
            x, y = (place(leaf).requires_grad_() for leaf in leaves)
            z = x * 2
            function = (lambda a, b: a.mul_(b)) if place is torch.clone else distdl.local_map(lambda a, b: a.mul_(b))
            function(view(z), view(y)).add_(1)
            found += [z, *torch.autograd.grad(z.square().sum(), [x, y])]
        for ours, theirs in zip(found[:3], found[3:], strict=True):
            assert_close(ours, theirs)

    distdl.run_workers(work, 3)


def test_results_that_depend_on_a_captured_weight_alone():
    """They require a gradient on workers without cells, too, so that another call takes them."""

    def work():
        w = torch.ones((), dtype=x35.dtype, requires_grad=True)
        x = distdl.distribute_tensor(x35, distdl.world()[:2].reshape(2, 1))
        y = distdl.local_map(lambda a: a * w if a.numel() else a.clone())(x)
        z = distdl.local_map(lambda a: a + 1)(y)
        assert z.requires_grad
        z.sum().backward()
        assert_close(distdl.world().allreduce_data(0 * w.detach() if w.grad is None else w.grad), x35.sum())

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("empty", [torch.clone, torch.zeros_like])
def test_results_that_depend_on_a_captured_weight_where_there_are_cells(empty):
    """The backward goes the same way on workers without cells, of which the results depend on the argument, or none."""

    def work():
        w, leaf = torch.ones((), dtype=x35.dtype, requires_grad=True), x35.clone().requires_grad_()
        x = distdl.distribute_tensor(leaf, distdl.world()[:2].reshape(2, 1))
        y = distdl.local_map(lambda a: a.detach() * w if a.numel() else empty(a))(x)
        y.sum().backward()
        assert leaf.grad is None or not leaf.grad.any()
        assert_close(distdl.world().allreduce_data(0 * w.detach() if w.grad is None else w.grad), x35.sum())

    distdl.run_workers(work, 3)


def test_a_function_of_blocks_that_writes_into_its_argument():
    """The argument follows from what was written, on workers without cells, too."""

    def work():
        P, leaves = distdl.world()[:2].reshape(2, 1), [x35.clone().requires_grad_(), x35.cos().requires_grad_()]
        x, y = (distdl.distribute_tensor(leaf, P) for leaf in leaves)
        z = x * 2
        distdl.local_map(lambda a, b: a.mul_(b))(z, y)
        assert_close(z, 2 * x35 * x35.cos())
        z.square().sum().backward()
        if distdl.world().rank == 0:
            for leaf, other in zip(leaves, reversed(leaves), strict=True):
                assert_close(leaf.grad, (8 * leaf * other**2).detach())
        distdl.world().allgather_data(0)

    distdl.run_workers(work, 3)


@on_workers
def test_a_function_of_blocks_that_writes_into_a_leaf_without_gradients():
    """As what sets a weight to its first values does: the leaf stays one, on workers without cells, too."""
    x = split(x35).requires_grad_()
    distdl.local_map(lambda block: torch.nn.init.constant_(block, 3.0))(x)
    assert x.is_leaf
    (dx,) = torch.autograd.grad(x.square().sum(), x)
    assert_close(dx, torch.full_like(x35, 6.0))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@on_workers
def test_a_write_of_a_function_of_blocks_is_counted_on_workers_without_cells(mode):
    """So a backward that has saved what was written raises on every worker."""
    x = split(x35)
    w = x.clone().requires_grad_()
    y = w * x
    with mode():
        distdl.local_map(lambda block: block.mul_(2) + 0)(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("leaf", [True, False])
@on_workers
def test_a_function_of_blocks_that_detaches_its_argument(leaf, mode):
    """Then nothing follows from that any more, on workers without cells, either."""
    x, other = split(x35).requires_grad_(), split(x35).requires_grad_()
    moved = x if leaf else x.redistribute(distdl.world().reshape(1, 3)).redistribute(x.layout)
    with mode():
        y = distdl.local_map(lambda block: block.detach_() * 2)(moved)
    assert_close(y, x35 * 2)
    assert (moved.requires_grad, moved.is_leaf) == (False, True)
    (moved * other).sum().backward()
    assert x.grad is None
    assert_close(other.grad, x35)


@on_workers
def test_a_function_of_blocks_that_differentiates_by_its_argument():
    """By what it has got itself, which requires a gradient from then on, on every worker."""

    def slope(block):
        return torch.autograd.grad(block.requires_grad_().square().sum(), block)[0]

    x = split(x35)
    for _ in range(2):
        assert_close(distdl.local_map(slope)(x), 2 * x35)
    (x * 3).sum().backward()
    assert_close(x.grad, torch.full_like(x35, 3.0))


@pytest.mark.parametrize("function", [lambda block: block, torch.enable_grad()(lambda block: block * 1)])
@on_workers
def test_a_function_of_blocks_that_gives_a_graph_without_gradients(function):
    x = split(x35).requires_grad_()
    z = x * 1
    with torch.no_grad():
        y = distdl.local_map(function)(z)
    assert y.requires_grad
    (y * 2).sum().backward()
    assert_close(x.grad, torch.full_like(x35, 2.0))


@on_workers
def test_a_result_that_follows_from_an_argument_here_and_from_what_is_captured_there():
    world = distdl.world()
    rows, columns = world.reshape(world.size, 1), world.reshape(1, world.size)
    x = distdl.distribute_tensor(x35, rows).requires_grad_()
    other = x.detach().clone().requires_grad_()
    moved = x.redistribute(columns).redistribute(rows)
    captured, argument = (moved * 3).to_local(), moved * 2
    y = distdl.local_map(lambda one, _: one * 2 if world.rank % 2 else captured * 1)(other, argument)
    y.sum().backward()
    expected = torch.zeros_like(x.to_local()) if world.rank % 2 else torch.full_like(x.to_local(), 3.0)
    assert torch.equal(x.grad.to_local(), expected)


@pytest.mark.parametrize("mode", ["no gradients", "a leaf without"])
def test_arguments_that_require_gradients_on_some_workers(mode):
    def work():
        P = distdl.world()
        odd = P.rank == 1
        x = distdl.distribute_tensor(x35.clone().requires_grad_(), P.reshape(3, 1))
        w = row.clone().requires_grad_(not (odd and mode == "a leaf without"))
        words = "local_map needs the same arguments to require gradients .* function got requires_grad=.* on worker 1"

        def function(block, weight):
            return block * weight

        grad_mode = torch.set_grad_enabled(not (odd and mode == "no gradients"))
        with grad_mode, pytest.raises(ValueError, match=words) as error:
            distdl.local_map(function)(x, w)
        assert_close(x.sum(), x35.sum())
        return str(error.value)

    assert len(set(distdl.run_workers(work, 3))) == 1


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("failing", [(1,), (0, 1, 2)])
def test_a_function_of_blocks_that_raises(failing, call):
    """On some workers alone, it is one error on all of them that says why. Of the first call, they go on."""
    alone = len(failing) == 1
    kind = distdl.CommunicationError if alone else ArithmeticError
    words = ("local_map of function that has failed .ArithmeticError: " if alone else "") + "no such number"

    def work():
        P, calls = distdl.world(), []
        x = distdl.distribute_tensor(x35, P.reshape(3, 1))

        def function(block):
            calls.append(0)
            if P.rank in failing and len(calls) > call:
                raise ArithmeticError("no such number")
            return block * 2

        mapped = distdl.local_map(function)
        for _ in range(call):
            mapped(x)
        with pytest.raises(kind, match=words) as error:
            mapped(x).sum().item()
        if alone and call:
            raise error.value  # (which has ended this world)
        assert_close(x.sum(), x35.sum())
        return str(error.value)

    if alone and call:
        with pytest.raises(kind, match=words):
            distdl.run_workers(work, 3)
    else:
        assert len(set(distdl.run_workers(work, 3))) == 1


class Doubled:
    """What is called in the place of a function, as tools put it there that count what is computed."""

    def __call__(self, x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(self, (x,), x)
        return 2 * x


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.filterwarnings("ignore:.*Doubled")
def test_an_object_that_is_called_has_the_same_name_on_all_workers(monkeypatch, debug):
    monkeypatch.setenv("DISTDL_DEBUG", debug)

    def work():
        x = distdl.distribute_tensor(noise(4, 3), distdl.world().reshape(2, 1))
        assert torch.equal(Doubled()(x).full_tensor(), 2 * noise(4, 3))
        with pytest.raises(ValueError, match="on worker 1, Multiplying gave 2x3 instead of 0x3") as error:
            distdl.local_map(Multiplying(2.0), out=x[:2].layout)(x)
        return str(error.value)

    assert len(set(distdl.run_workers(work, 2))) == 1


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_plain_tensors_beside_weights_in_a_mode_without_gradients(mode, weights):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(row.clone())

        def forward(self, x, scale):
            return x * (scale * self.w)

    def work():
        P = distdl.world().reshape(2, 1)
        model, x = distdl.distribute(Model(), P, weights=weights), distdl.distribute_tensor(x35, P)
        scale = row.cos().requires_grad_()
        with mode():
            y = model(x, scale)
            assert_close(y, x35 * (row.cos() * row))

    distdl.run_workers(work, 2)


def test_constants_beside_the_results_of_functions_of_elements():
    given = np.float32(2.5), True, "ab", None, {"dtype": torch.float32}, torch.Size([3])

    def sines(x):
        if type(x) is GlobalTensor:
            return torch.overrides.handle_torch_function(sines, (x,), x)
        return x.sin(), given

    distdl.register(sines, "elementwise")

    def work():
        y, constants = sines(split(x35))
        assert constants == given
        assert_close(y, x35.sin())

    distdl.run_workers(work, 3)
    unregister(sines)
