"""``torch.func.linearize`` of global tensors, against torch's own of plain ones."""

import copy
import gc
import weakref

import pytest
import torch
from launched import on_workers, split
from same import Global, assert_same, noise
from torch.func import functionalize, grad, jacrev, jvp, linearize
from torch.utils import _pytree as pytree

import distdl

x35, t35 = noise(3, 5), noise(3, 5, seed=1)


def curved(x):
    return (x.sin() * x.roll(1, 0)).cumsum(1).tanh()


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # (torch, of its own linearize)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, t: linearize(curved, x)[0],
        lambda x, t: linearize(curved, x)[1](t),
        lambda x, t: linearize(lambda a, b: {"first": curved(a * b), "second": a}, x, t)[1](t, x * t),
        lambda x, t: linearize(lambda tree: tree["a"].exp().sum(), {"a": x})[1]({"a": t}),
        lambda x, t: linearize(lambda a, b: a.square(), x, t)[1](t, x),  # (one is not used)
        lambda x, t: linearize(lambda a: a.sum(0).split([2, 3])[0].sin(), x)[1](t),
        lambda x, t: (lambda along: along(t) + along(t * 2))(linearize(curved, x)[1]),
    ],
)
def test_values(function):
    assert_same(lambda *given: tuple(pytree.tree_leaves(function(*given))), Global(x35), Global(t35), curved=False)


@on_workers
def test_what_follows_from_constants_has_none_of_their_gradients():
    """Of tangents, results have gradients, and these gradients in turn; of primals and weights they have none."""
    w = split(noise(5, 5, seed=2)).requires_grad_()
    x, t, again = split(x35).requires_grad_(), split(t35).requires_grad_(), split(t35).requires_grad_()

    def function(a):
        return curved(a @ w)

    along = linearize(function, x)[1]
    assert not along(t.detach()).requires_grad
    (dt,) = torch.autograd.grad(along(t).square().sum(), t, create_graph=True)
    (expected,) = torch.autograd.grad(jvp(function, (x,), (again,))[1].square().sum(), again, create_graph=True)
    torch.testing.assert_close(dt.full_tensor(), expected.full_tensor())
    dt.square().sum().backward()
    (expected,) = torch.autograd.grad(expected.square().sum(), again)
    torch.testing.assert_close(t.grad.full_tensor(), expected.full_tensor())
    assert x.grad is None and w.grad is None


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("plain", [False, True])
def test_models(weights, plain):
    sequential = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    expected = [*jvp(sequential, (x35,), (t35,)), jvp(sequential, (x35,), (x35,))[1]]

    def work():
        P = distdl.world()[:2].reshape(2, 1)
        model = distdl.distribute(copy.deepcopy(sequential), P, weights=weights)
        y, along = linearize(model, x35 if plain else split(x35))
        t, x = split(t35), split(x35)
        for one, other in zip([y, along(t), along(x)], expected, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)
        with pytest.raises(RuntimeError, match=r"transforms of torch\.func do"):
            functionalize(model)(x35 if plain else x)

    distdl.run_workers(work, 2)


@on_workers
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_functionalize_of_what_is_split_is_refused(remove):
    """It is for tracers."""
    x = split(x35).clone()
    for function, given in ((lambda a: a.add_(1), x), (lambda a: a * x, x35), (lambda a: x.add_(a), x35)):
        with pytest.raises(RuntimeError, match=r"transforms of torch\.func do"):
            functionalize(function, remove=remove)(given)
    torch.testing.assert_close(x.full_tensor(), x35)


@on_workers
def test_other_results_and_wrong_tangents():
    x = split(x35)
    along = linearize(lambda a: (a * 2, x), x)[1]
    assert not along(x)[1].full_tensor().any()
    with pytest.raises(RuntimeError, match="to return only tensors, got unsupported type"):
        linearize(lambda a: (a * 2, None, "text"), x)
    with pytest.raises(RuntimeError, match="doesn't match the shape"):
        along(split(x35[:1]))
    with pytest.raises(RuntimeError, match="same argspec"):
        along(x, x)


@on_workers
def test_inside_of_vmap():
    found = torch.vmap(lambda a, b: linearize(torch.sin, a)[1](b))(split(x35), split(t35))
    torch.testing.assert_close(found.full_tensor(), x35.cos() * t35)


def test_derivatives_of_plain_tensors_in_transforms():
    """On threads, where they are ours."""
    tangents = torch.stack([t35, x35])

    def work():
        distdl.distribute_tensor(x35, distdl.world().reshape(2, 1))
        along = linearize(torch.sin, x35)[1]
        torch.testing.assert_close(torch.vmap(along)(tangents), x35.cos() * tangents)
        torch.testing.assert_close(grad(lambda t: along(t).square().sum())(t35), 2 * x35.cos().square() * t35)
        torch.testing.assert_close(jacrev(along)(t35).sum((2, 3)), x35.cos())

    distdl.run_workers(work, 2)


@on_workers
def test_nothing_is_kept():
    x = split(x35)
    y, along = linearize(curved, x)
    along(x)
    kept = weakref.ref(along), weakref.ref(y)
    del y, along
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_plain_functions_stay_with_torch():
    """Each is called as often as torch calls it, and traced by torch."""
    calls = []

    def function(x):
        calls.append(type(x))
        return x.sin()

    def work():
        distdl.distribute_tensor(x35, distdl.world().reshape(1, 1))
        along = linearize(function, x35)[1]
        torch.testing.assert_close(along(t35), x35.cos() * t35)
        functionalize(function)(x35)

    distdl.run_workers(work, 1)
    assert len(calls) == 3
