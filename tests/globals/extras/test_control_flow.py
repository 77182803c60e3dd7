"""torch's cond, while_loop, scan and map of functions of global tensors, against what they stand for in Python.

(torch's own refuse what is not a leaf, where warnings are errors, and functions that give what they got.)
"""

import copy
import operator

import pytest
import torch
from launched import assert_close, on_workers, split
from same import Global, assert_same, noise
from torch import nn
from torch._higher_order_ops import associative_scan
from torch._higher_order_ops import map as torch_map
from torch._higher_order_ops import scan as torch_scan
from torch.utils import _pytree as pytree

import distdl

x45, y45, w55 = noise(4, 5), noise(4, 5, seed=1), noise(5, 5, seed=2)


def is_plain(*values):
    return not any(type(one) is distdl.GlobalTensor for one in pytree.tree_leaves(values))


def cond(pred, true_fn, false_fn, operands):
    if is_plain(operands):
        return (true_fn if pred else false_fn)(*operands)
    return torch.cond(pred, true_fn, false_fn, operands)


def while_loop(cond_fn, body_fn, carried):
    if not is_plain(carried):
        return torch.while_loop(cond_fn, body_fn, carried)
    while cond_fn(*carried):
        carried = body_fn(*carried)
    return carried


def scan(step, init, xs, dim, reverse):
    if not is_plain(init, xs):
        return torch_scan(step, init, xs, dim=dim, reverse=reverse)
    carry, found = init, {}
    places = range(pytree.tree_leaves(xs)[0].shape[dim])
    for place in reversed(places) if reverse else places:
        carry, found[place] = step(carry, pytree.tree_map(lambda x, at=place: x.select(dim, at), xs))
    return carry, stacked([found[place] for place in places], dim)


def map_rows(function, xs, *args):
    if not is_plain(xs, args):
        return torch_map(function, xs, *args)
    return stacked([function(pytree.tree_map(lambda x, at=at: x[at], xs), *args) for at in range(len(xs[0]))])


def stacked(trees, dim=0):
    return pytree.tree_map(lambda *ys: torch.stack(ys).movedim(0, min(dim, ys[0].dim())), *trees)


def assert_alike(function, *arguments, **options):
    """The same results and gradients as torch's, whatever structure the results have."""
    assert_same(lambda *given: tuple(pytree.tree_leaves(function(*given))), *arguments, **options)


@pytest.mark.parametrize("sign", [1, -1])
def test_branches(sign):
    def one(x, w):
        return (x.sin() @ w, {"sum": x.sum()})

    def other(x, w):
        return (x.cos() @ w, {"sum": x.prod()})

    def run(x, w):
        return cond(sign * x.square().sum() > 0, one, other, (x, w))

    assert_alike(run, Global(x45), w55)
    assert_alike(run, Global(x45), Global(w55))


def test_loops():
    def grow(count, x, rest):
        return count + 1, x * 1.5, {"sum": rest["sum"] + x.sum()}

    def run(x, most):
        return while_loop(
            lambda count, x, rest: (x.square().sum() < most) & (count < 9), grow, (torch.tensor(0), x, {"sum": x.sum()})
        )

    for most in (200.0, 0.0):  # (none at all)
        assert_alike(run, Global(x45), most)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_scans(dim, reverse):
    def step(carry, x):
        h = torch.tanh(carry["h"] * 0.5 + x[0] * x[1])
        return {"h": h}, (h * 2, [h.sum()])

    def run(x, y):
        return scan(step, {"h": x.select(dim, 0) * 0.1}, (x, y), dim=dim, reverse=reverse)

    assert_alike(run, Global(x45), y45)
    assert_alike(run, Global(x45), Global(y45))


@pytest.mark.parametrize("dim", [0, 1])
def test_associative_scans(dim):
    assert_same(lambda x: associative_scan(operator.mul, x, dim, combine_mode="generic"), Global(x45))
    assert_same(lambda x: associative_scan(operator.add, x, dim, reverse=True, combine_mode="generic"), Global(x45))


def test_maps():
    def each(rows, w):
        x, y = rows
        return x @ w + y, {"sum": (x * y).sum()}

    assert_alike(lambda x, y, w: map_rows(each, (x, y), w), Global(x45), Global(y45), w55)


class Gated(nn.Module):
    """A part for each sign of its input's sum, and as many steps as it needs to be small."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        x = cond(x.sum() > 0, lambda x: self.up(x).tanh(), lambda x: self.down(x).tanh(), (x,))
        _, x = while_loop(
            lambda left, x: (left > 0) & (x.square().sum() > 0.1),
            lambda left, x: (left - 1, self.down(x).tanh()),
            (torch.tensor(3), x),
        )
        return x


GATED = Gated().double()


@on_workers
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_models(weights):
    alone = copy.deepcopy(GATED)
    model = distdl.distribute(copy.deepcopy(alone), distdl.world().reshape(-1, 1), weights=weights)
    for x in (x45.abs(), -x45.abs()):
        y, expected = model(split(x)), alone(x)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert torch.allclose(y.full_tensor(), expected, atol=1e-12)
        for own, one in zip(model.parameters(), alone.parameters(), strict=True):
            given = own.grad.full_tensor() if isinstance(own.grad, distdl.GlobalTensor) else own.grad
            assert (given is None) == (one.grad is None) and (
                given is None or torch.allclose(given, one.grad, atol=1e-12)
            )


@pytest.mark.parametrize("workers", [1, 3])
def test_functions_that_know_what_is_split(workers):
    """Of arguments that are plain, or of none."""
    if workers > 1:
        distdl.run_workers(functions_that_know, workers)
    else:  # (alone, where torch tries to compile them first)
        functions_that_know()


def functions_that_know():
    P = distdl.world()
    x, one = distdl.distribute_tensor(x45, P.reshape(-1, 1)), torch.ones(5, dtype=torch.float64)
    found = torch.cond(torch.tensor(True), lambda a: (a * x).sum(), lambda a: (a + x).sum(), (one,))
    assert torch.allclose(found.full_tensor(), x45.sum())
    found = torch.cond(torch.tensor(False), lambda: x.sum(), lambda: x.prod())
    assert torch.allclose(found.full_tensor(), x45.prod())
    _, found = torch.while_loop(lambda n, a: n < 3, lambda n, a: (n + 1, a + x.sum(0)), (torch.tensor(0), one))
    assert torch.allclose(found.full_tensor(), 1 + 3 * x45.sum(0))
    for weights in ("replicated", "sharded"):
        layer = distdl.distribute(nn.Linear(5, 2).double(), P.reshape(-1, 1), weights=weights)
        for function in (lambda w=layer.weight: w.sum(), lambda layer=layer: layer(one).sum()):
            found, expected = torch.cond(torch.tensor(True), function, lambda: one.sum()), function()
            assert type(found) is type(expected) and found.requires_grad
            assert_close(found, expected.full_tensor() if isinstance(expected, distdl.GlobalTensor) else expected)


@on_workers
def test_what_is_refused():
    x, zero = split(x45), torch.tensor(0)
    with pytest.raises(RuntimeError, match="Expected pred to be bool or single-element tensor"):
        torch.cond(x > 0, torch.sin, torch.cos, (x,))
    with pytest.raises(RuntimeError, match=r"cond_fn of torch.while_loop needs to return True, False or a tensor"):
        torch.while_loop(lambda n, x: n, lambda n, x: (n + 1, x), (zero, x))
    with pytest.raises(
        RuntimeError, match=r"body_fn .* while_loop needs .* to carry on; got .*float32.* for .*float64"
    ):
        torch.while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x.float()), (zero, x))
    with pytest.raises(
        RuntimeError, match=r"combine_fn .* scan needs .*; got \[\(\(\), torch.float64\)\] for \[\(\(5,\)"
    ):
        torch_scan(lambda carry, row: (row.sum(), row), x[0], x)


def test_of_plain_tensors_they_are_torchs():
    with pytest.raises(Exception, match="same metadata"):
        torch.while_loop(lambda n: n < 3, lambda n: (n.double(),), (torch.tensor(0),))
    assert torch.cond(torch.tensor(True), torch.sin, torch.cos, (x45,)).equal(x45.sin())
