"""Functions of blocks that a user maps: their results, their gradients, and the weights beside them."""

import math
import weakref
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from autograd_functions import scaled_sine
from launched import Calling as CallingModel
from launched import assert_close, on_workers, split
from nets import Again
from same import noise
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distdl
from distdl import GlobalTensor, nn

x35, row = noise(3, 5), noise(5, seed=2)


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


@dataclass(slots=True)
class Slotted:
    n: float

    def __call__(self, a):
        return a * self.n


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


x = noise(4, 3, 7, 5)


def grid(*extents):
    P = distdl.world().create_partition_inclusive(range(torch.Size(extents).numel()))
    return P.create_cartesian_topology_partition(extents)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@on_workers
def test_primitives_take_weights_of_a_distributed_model_in_local_map(weights):
    """Each worker has a part of the gradient of what comes out, so that the adjoint adds them up."""
    everyone = distdl.world()
    sums = nn.AllSumReduce(everyone, (0,))

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            if type(x) is not distdl.GlobalTensor:
                return x * (self.weight.sin() * everyone.size) * self.bias.sum() * everyone.size
            return distdl.local_map(lambda x, w: x * sums(w.sin())[:1] * sums(self.bias * 1).sum())(x, self.weight)

    found = []
    for given in (split(noise(3, 5), 2, 1), noise(3, 5)):
        model = Scaled(5, 1, dtype=torch.float64)
        model.load_state_dict({"weight": noise(1, 5, seed=1), "bias": noise(1)})
        model = distdl.distribute(model, grid(2, 1), weights) if type(given) is distdl.GlobalTensor else model
        given.requires_grad_()
        y = model(given)
        y.square().sum().backward()
        found.append([y, given.grad, *(one.grad for one in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


LAYERS = [
    (lambda P: nn.DistributedConv2d(P, in_channels=3, out_channels=3, kernel_size=3, padding=1, bias=False).double(),
     lambda x: F.conv2d(x, noise(3, 3, 3, 3), padding=1)),
    (lambda P: nn.DistributedMaxPool2d(P, kernel_size=3, stride=1, padding=1), lambda x: F.max_pool2d(x, 3, 1, 1)),
    (lambda P: nn.DistributedAvgPool2d(P, kernel_size=3, stride=1, padding=1), lambda x: F.avg_pool2d(x, 3, 1, 1)),
    (lambda P: nn.DistributedGroupNorm(P, 3, 3).double(), lambda x: F.group_norm(x, 3)),
    (lambda P: nn.DistributedAdaptiveMaxPool2d(P, (4, 3)), lambda x: F.adaptive_max_pool2d(x, (4, 3))),
    (lambda P: nn.DistributedDropout(P, 1.0), lambda x: x * 0),
    (lambda P: nn.DistributedDropout(P, 0.0), lambda x: x),
    (lambda P: nn.Repartition(P, P), lambda x: x),
]  # fmt: skip


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize(("make", "function"), LAYERS)
@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("active", [1, 2])
@on_workers
def test_blocks_that_layers_of_a_distributed_model_give_meet_its_weights_in_local_map(
    active, checkpointed, differentiable, make, function, weights
):
    """Each worker has the gradient of its own block, and a part of that of a weight."""
    P = grid(1, 1, active, 1)

    class Scaled(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.scale = layer, torch.nn.Parameter(noise(3, 1, 1))

        def scaled(self, h):
            h = self.layer(h)
            return h * (self.scale if h.numel() else self.scale[:0].sum()) + h  # (one of the workers is idle)

        def checked(self, h):
            return checkpoint(self.scaled, h, use_reentrant=False) if checkpointed else self.scaled(h)

        def forward(self, x):
            return distdl.local_map(self.checked, out=P)(x) if type(x) is distdl.GlobalTensor else self.checked(x)

    layer = make(P)
    if hasattr(layer, "kernel_size") and hasattr(layer, "weight") and distdl.world().rank == 0:
        layer.load_state_dict({"weight": noise(3, 3, 3, 3)})
    found = []
    for model, given in (
        (distdl.distribute(Scaled(layer), P, weights), split(x, 1, 1, active, 1)),
        (Scaled(function), x),
    ):
        given = (given * 1).detach().requires_grad_(differentiable)
        y = model(given)
        y.square().sum().backward()
        found.append([y, model.scale.grad, *([given.grad] if differentiable else [])])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("follow", [lambda h: h, lambda h: h * torch.ones(1).double().requires_grad_()])
@pytest.mark.parametrize(("make", "function"), [(lambda P: lambda x: x, lambda x: x), LAYERS[1], LAYERS[-1]])
@on_workers
def test_blocks_beside_a_global_tensor_get_their_own_gradients_in_local_map(make, function, follow, active):
    P, x, found = grid(1, 1, active, 1), noise(2, 3, 6, 5), []

    def forward(model, given):
        if type(given) is not distdl.GlobalTensor:
            return given * function(given)
        times = distdl.local_map(lambda x, h: x * h if x.numel() else x * h.sum())
        return times(given, follow(make(P)(given.to_local())))

    model = distdl.distribute(CallingModel(forward), P)
    for given, one in (
        (split(x, 1, 1, active, 1).requires_grad_(), model),
        (x.clone().requires_grad_(), CallingModel(forward)),
    ):
        y = one(given)
        y.square().sum().backward()
        found.append([y, given.grad])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("follow", [lambda h, w: h, lambda h, w: h * 2, lambda h, w: h * w])
@on_workers
def test_blocks_get_their_own_gradients_in_local_map_in_local_map(follow, active):
    """And a plain tensor that is an argument of both has its gradient added up once."""
    found, times = [], distdl.local_map(lambda z, h, w: z * h * w)
    for given in (split(noise(6, 5), active, 1).requires_grad_(), noise(6, 5).requires_grad_()):
        other, w = noise(6, 5, seed=1).requires_grad_(), noise(5).requires_grad_()
        if type(given) is distdl.GlobalTensor:
            other = split(noise(6, 5, seed=1), active, 1).requires_grad_()
            y = distdl.local_map(lambda h, w, z=other: times(z, follow(h, w), w).to_local())(given, w)
        else:
            y = other * follow(given, w) * w
        y.square().sum().backward()
        found.append((y, given.grad, other.grad, w.grad))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)
