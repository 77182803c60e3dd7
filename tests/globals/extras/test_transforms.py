"""The transforms of torch.func of functions of global tensors, against torch's own of plain ones."""

import copy
from contextlib import nullcontext

import pytest
import torch
from launched import assert_close, on_workers, split
from same import Global, assert_raises_the_same, assert_same, noise
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)
from torch.utils import _pytree as pytree

import distdl

x35 = noise(3, 5)
y35 = noise(3, 5, seed=1)
w55 = noise(5, 5, seed=3)


def curved(x):
    return (x.sin() * x.roll(1, 0)).cumsum(1).tanh()


def total(x):
    return curved(x).square().sum()


def assert_alike(function, *arguments, **options):
    """The same results and gradients as torch's, whatever structure the results have."""
    assert_same(lambda *given: tuple(pytree.tree_leaves(function(*given))), *arguments, **options)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: grad(total)(x),
        lambda x, y: grad_and_value(lambda a, b: (total(a) * b).mean(), argnums=(1, 0))(x, y),
        lambda x, y: grad(lambda a, b: (total(a * b), curved(b)), has_aux=True)(x, y),
        lambda x, y: grad(lambda a: grad(total)(a * y).square().sum())(x),
        lambda x, y: vjp(curved, x)[1](y),
        lambda x, y: jvp(curved, (x,), (y,)),
        lambda x, y: jvp(lambda a, b: {"first": curved(a * b), "second": b}, (x, y), (y, x * y)),
        lambda x, y: jvp(grad(total), (x,), (y,)),
        lambda x, y: vjp(grad(total), x)[1](y),
        lambda x, y: jvp(lambda a: a.sum(0).split([2, 3])[0], (x,), (y,)),  # (some workers have no cell of a vector)
    ],
)
def test_derivatives(function, twice):
    assert_alike(function, Global(x35), Global(y35), twice=twice)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jacrev(curved)(x),
        lambda x: jacfwd(curved)(x),
        lambda x: jacrev(lambda a, b: (curved(a * b), b.sum()), argnums=(0, 1))(x, x.cos()),
        lambda x: jacrev(curved, chunk_size=2)(x),
        lambda x: hessian(total)(x),
        lambda x: jacfwd(jacfwd(total))(x),
    ],
)
def test_jacobians(function):
    assert_alike(function, Global(noise(3, 2)))


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


@pytest.mark.parametrize("known", ["as arguments", "by the function"])
def test_a_network_with_derivatives_of_its_input_in_the_loss(known):
    """Weights get gradients that are added up, whether vmap stays on blocks, or takes samples one by one."""

    def each(x, *weights):
        alone = net()  # (workers that are threads have each its own)
        given = dict(zip(dict(alone.named_parameters()), weights, strict=True))
        if known == "as arguments":

            def u(given, sample):
                return functional_call(alone, given, (sample,)).squeeze()

            slopes = vmap(grad(u, argnums=1), (None, 0))(given, x)
        else:
            slopes = vmap(grad(lambda sample: functional_call(alone, given, (sample,)).squeeze()))(x)
        return slopes.square().mean()

    assert_same(each, Global(x35), *[one.detach() for one in net().parameters()])


class Slopes(torch.nn.Module):
    """A network that sees derivatives of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.w = net(), torch.nn.Parameter(noise(5))

    def u(self, x):
        return self.inner(x).squeeze(-1)

    def forward(self, x):
        slopes = grad(lambda z: self.u(z).sum())(x)
        curvature = jvp(grad(lambda z: self.u(z).sum()), (x,), (torch.ones_like(x),))[1]
        by_weight = vjp(lambda w: (x * w).tanh().sum(), self.w)[1](torch.ones((), dtype=x.dtype))[0]
        of_plain = grad(lambda z: (z * self.w).sin().sum())(x35) + vmap(grad(lambda z: z.cos().sum()))(x35)
        return (slopes * self.w + of_plain.sum(0)).sum(-1) + (curvature + vmap(torch.cos)(x)).sum(-1) + by_weight.sum()


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
def test_a_model_that_differentiates_trains_alike(weights, grid):
    def train(model, x):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return list(model.state_dict().values())

    alone = Slopes()
    expected = train(copy.deepcopy(alone), x35)

    def work():
        P = distdl.world()[:2].reshape(grid)
        model = distdl.distribute(copy.deepcopy(alone), P, weights=weights, fallback="error")
        for ours, theirs in zip(train(model, split(x35, *grid)), expected, strict=True):
            assert_close(ours, theirs)

    distdl.run_workers(work, 3)


def loss_of(model, weights, x):
    return functional_call(model, weights, (x,)).square().mean()


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize(
    "function",
    [
        lambda model, given, x: grad(lambda own: loss_of(model, own, x))(given),
        lambda model, given, x: grad(loss_of, argnums=1)(model, given, x),
        lambda model, given, x: jvp(grad(lambda own: loss_of(model, own, x)), (given,), (given,)),
        lambda model, given, x: vmap(lambda own, one: grad(lambda w: loss_of(model, w, one[None]))(own), (None, 0))(
            given, x
        ),
        lambda model, given, x: vmap(lambda own: loss_of(model, own, x))(
            {k: torch.stack([v, -v]) for k, v in given.items()}
        ),
        lambda model, given, x: jacrev(model)(x[:1]),
        lambda model, given, x: vmap(model)(x[:, None]),
        lambda model, given, x: grad(lambda one: model(one).square().sum())(x35),
    ],
    ids=["gradient", "gradient of arguments", "second", "per sample", "ensemble", "jacobian", "samples", "plain"],
)
def test_transforms_of_a_distributed_model(function, weights):
    def given(model):
        return {name: one.detach() for name, one in model.named_parameters()}

    alone = net()
    expected = pytree.tree_leaves(function(alone, given(alone), x35))

    def work():
        model = distdl.distribute(
            copy.deepcopy(alone), distdl.world()[:2].reshape(2, 1), weights=weights, fallback="error"
        )
        found = pytree.tree_leaves(function(model, given(model), split(x35)))
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs)
            assert ours.requires_grad == theirs.requires_grad

    distdl.run_workers(work, 3)


@on_workers
def test_a_result_has_a_graph_if_something_outside_has():
    x, w = split(x35), noise(5, seed=4).requires_grad_()
    slope, function = grad(total), lambda a: (a * w).square().sum()
    assert not slope(x).requires_grad and slope(x.requires_grad_()).requires_grad
    x = x.detach()
    assert grad(function)(x).requires_grad and jvp(function, (x,), (x,))[1].requires_grad
    y, back = vjp(function, x)
    assert y.requires_grad and back(y.detach())[0].requires_grad
    with torch.no_grad():
        assert not grad(function)(x).requires_grad and not vjp(function, x)[0].requires_grad
    with torch.inference_mode():
        assert_close(slope(x * 2), grad(total)(x35 * 2))
        assert_close(jvp(function, (x * 2,), (x * 2,))[1], jvp(function, (x35 * 2,), (x35 * 2,))[1])
    # (what a worker has no cells of stands for the others: all of them decide alike)
    few = split(noise(1, 5)).requires_grad_()
    dx = grad(lambda a: (a * few).sum().exp())(split(noise(1, 5, seed=1)))
    dx.sum().backward()
    assert_close(few.grad, torch.autograd.grad(dx_alone(one := noise(1, 5).requires_grad_()).sum(), one)[0])


@on_workers
def test_a_result_has_a_graph_on_every_worker_or_on_none():
    """Also where a plain tensor has no gradient but by cells of other workers."""
    x = split(x35).requires_grad_()
    slope = grad(lambda w: (x @ w).tanh().sum())(w55)
    assert type(slope) is torch.Tensor and slope.requires_grad
    alone = x35.clone().requires_grad_()
    expected = grad(lambda w: (alone @ w).tanh().sum())(w55)
    assert_close(torch.autograd.grad(slope.sum(), x)[0], torch.autograd.grad(expected.sum(), alone)[0])


@on_workers
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: jvp(lambda a: grad(lambda b: (a * b).sin().sum())(y), (x,), (y,)),
        lambda x, y: grad(lambda a: vjp(lambda b: (a * b).sin(), y)[1](a)[0].sum())(x),
        lambda x, y: grad(lambda a: vjp(torch.sin, y)[1](a)[0].sum())(x),
        lambda x, y: jacrev(lambda a: a[0] * a[1])((x[0, :2], y[0, :2].requires_grad_())),
    ],
)
def test_a_result_has_no_graph_of_transforms_that_have_ended(function):
    found, expected = (pytree.tree_leaves(function(*given)) for given in ((split(x35), split(y35)), (x35, y35)))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.requires_grad == theirs.requires_grad
        assert_close(ours, theirs)


def dx_alone(few):
    return grad(lambda a: (a * few).sum().exp())(noise(1, 5, seed=1))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: grad(lambda a: a * 2)(x),
        lambda x: grad(lambda a: (a.sum(), 1, 2), has_aux=True)(x),
        lambda x: vjp(lambda a: (a > 0).sum(), x),
        lambda x: vjp(lambda a: a.sum(), x)[1]((x, x)),
        lambda x: jvp(lambda a: a, x, x),
        lambda x: vmap(lambda a: 3)(x),
        lambda x: vmap(lambda a, b: a)(x, x[:2]),
        lambda x: vmap(lambda a: a, in_dims=3)(x),
        lambda x: vmap(lambda a: a.relu(), randomness="any")(x),
    ],
)
def test_what_torch_refuses(function):
    assert_raises_the_same(function, x35, text=True)


@on_workers
def test_what_is_differentiated_by_may_not_be_written():
    """Its gradient would be that of what has been written there."""
    for rows in (3, 1):  # (of one row, a worker of the partition has no cell)
        x = split(x35[:rows]).requires_grad_()
        for transform in (
            lambda f, x: grad(lambda a: f(a).sum())(x * 1),
            lambda f, x: vjp(f, x * 1)[1](x),
            lambda f, x: jvp(f, (x * 1,), (x,)),
        ):
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
                transform(lambda a: a.mul_(2) * a, x)
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
                transform(lambda a: a[0].mul_(2) * a, x)
            transform(lambda a: a.clone().mul_(2) * a, x)


@on_workers
def test_what_is_refused():
    x = split(x35)
    with pytest.raises(RuntimeError, match="tangents of the shapes of the primals"):
        jvp(torch.sin, (x,), (x[:, :1],))


def test_transforms_of_layers_on_blocks():
    def work():
        root = distdl.world()
        layer = distdl.nn.AllSumReduce(root.reshape(2, 1), (0,))
        x = noise(2, 3, seed=root.rank)

        def function(a):
            return layer(a.sin()).square()

        given = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(function(given).sum(), given)
        torch.testing.assert_close(grad(lambda a: function(a).sum())(x), expected)
        torch.testing.assert_close(vjp(function, x)[1](torch.ones_like(x))[0], expected)
        torch.testing.assert_close(jvp(function, (x,), (x,)), torch.autograd.functional.jvp(function, x, x))
        torch.testing.assert_close(vmap(function)(x), function(x))
        # (a weight that is on another worker is outside here, too)
        source = root.create_partition_inclusive([0]).create_cartesian_topology_partition([1, 1])
        weight = noise(3, 3).requires_grad_() if root.rank == 0 else torch.zeros(0, dtype=torch.float64)
        spread = distdl.nn.Broadcast(source, root.reshape(2, 1))
        assert grad(lambda a: (a @ spread(weight)).sin().sum())(x).requires_grad
        assert not grad(lambda w: (x @ spread(w)).sin().sum())(weight.detach()).requires_grad

    distdl.run_workers(work, 2)


@on_workers
def test_plain_tensors_stay_with_torch():
    """What meets nothing that is split is torch's: its tensors are wrapped ones."""
    seen = []

    def function(a):
        seen.append(torch._C._functorch.is_functorch_wrapped_tensor(a))
        return a.sin().sum()

    grad(function)(x35), vmap(function)(x35), vjp(function, x35), vmap(grad(function))(x35)
    split(x35)
    assert seen and all(seen)


def test_transforms_under_debug(monkeypatch):
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        x = split(x35)
        function, alone = (lambda w, x=one: (x @ w).tanh().sum() for one in (x, x35))
        assert_close(grad(function)(w55), grad(alone)(w55))
        assert_close(vmap(function)(torch.stack([w55, -w55])), vmap(alone)(torch.stack([w55, -w55])))

    distdl.run_workers(work, 3)


def test_a_backward_of_a_transform_stays_on_the_thread_of_its_worker():
    """Whatever its device is: threads wait for each other, and torch has one thread of its own for each device."""

    def work():
        P, seen = distdl.world().reshape(2, 1), []

        def f(x):
            seen.append(torch.autograd.is_multithreading_enabled())
            return total(x)

        for mode in (nullcontext, torch.inference_mode):
            with mode():
                grad(f)(distdl.distribute_tensor(x35.clone(), P))
        return seen

    assert distdl.run_workers(work, 2) == [[False, False]] * 2


@on_workers
def test_what_a_function_writes_into_an_argument_has_no_graph_behind_the_transform():
    """But for what has one outside."""
    for make in (lambda x: x, split):
        x, z, factor = make(x35.clone()), make(y35.clone()), make(y35.clone()).requires_grad_()
        dx = grad(lambda a, b: (b.add_(a) * a).sum())(x, z)
        assert not z.requires_grad and z.grad_fn is None
        assert_close(z, x35 + y35)
        assert_close(dx, 2 * x35 + y35)
        z = make(y35.clone())
        grad(lambda a, b, w: (b.add_(a * w) * a).sum())(x, z, factor)
        assert z.requires_grad
