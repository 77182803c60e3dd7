"""Random functions: what they draw depends on no partition, and is repeated where a forward is recomputed."""

import pytest
import torch
from launched import on_workers, split
from same import Global, assert_same, noise
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.tensors.draws import Draws

x43 = noise(4, 3, 5, 7)
DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout, in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "module": lambda x: torch.nn.Dropout2d(0.4)(x),
    "dropout1d": lambda x: F.dropout1d(x.flatten(2), 0.4),
    "dropout3d without batch": lambda x: F.dropout3d(x, 0.4),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "alpha of channels": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 3),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "random_": lambda x: torch.empty_like(x).random_(7),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.25),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: torch.rrelu_(x * 1, training=True),
    "dropout_": lambda x: torch.dropout_(x * 1, 0.3, True),
    "feature_dropout_": lambda x: torch.feature_dropout_(x * 1, 0.3, True),
    "alpha_dropout_": lambda x: torch.alpha_dropout_(x * 1, 0.3, True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
}


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("name", DRAWS)
def test_no_partition_changes_what_is_drawn(name):
    found = []
    torch.manual_seed(1)  # (of few channels, two draws may be equal)

    def draw(grid):
        x = split(x43, *grid).requires_grad_()
        y = [DRAWS[name](x) for _ in range(2)]
        gradient = None
        if y[0].requires_grad:
            (gradient,) = torch.autograd.grad((y[0] * noise(*y[0].shape).to(y[0].dtype)).sum(), x)
            gradient = gradient.full_tensor()
        found.append([*(one.detach().full_tensor() for one in y), gradient])

    for workers, grid in ((1, (1, 1, 1, 1)), (2, (1, 2, 1, 1)), (5, (2, 1, 2, 1)), (3, (1, 1, 1, 2))):
        distdl.run_workers(lambda grid=grid: draw(grid), workers)
    first, second, gradient = found[0]
    assert not torch.equal(first, second)
    for one, two, other in found[1:]:
        for ours, theirs in ((one, first), (two, second)):  # (a softmax of a split dim adds up in another order)
            torch.testing.assert_close(ours, theirs, rtol=1e-13 if name == "gumbel_softmax" else 0, atol=0)
        assert gradient is None or torch.allclose(other, gradient, rtol=1e-13, atol=1e-13)


@on_workers
def test_what_is_drawn_has_the_distribution_that_it_should():
    x = split(torch.ones(100, 200, dtype=torch.float64), 1, 2)
    kept = F.dropout(x, 0.3).full_tensor()
    assert set(kept.unique().tolist()) == {0.0, 1 / 0.7}
    assert abs(float((kept == 0).double().mean()) - 0.3) < 0.02
    normal = torch.randn_like(x).full_tensor()
    assert abs(float(normal.mean())) < 0.03 and abs(float(normal.std()) - 1) < 0.03
    assert abs(float(torch.empty_like(x).exponential_(2.0).full_tensor().mean()) - 0.5) < 0.02
    assert abs(float(torch.bernoulli(x * 0.2).full_tensor().mean()) - 0.2) < 0.02
    whole = torch.randint_like(x, 2, 5).full_tensor()
    assert set(whole.unique().tolist()) == {2.0, 3.0, 4.0}
    waves = split(noise(1000, 8), 2, 1)
    alpha = F.alpha_dropout(F.selu(waves), 0.2, training=True).full_tensor()
    assert abs(float(alpha.mean())) < 0.1 and abs(float(alpha.std()) - 1) < 0.1
    channels = F.dropout2d(split(torch.ones(8, 9, 4, 4), 1, 1, 2, 1), 0.5).full_tensor().flatten(2)
    assert torch.equal(channels.amin(2), channels.amax(2)) and len(channels.unique()) == 2


@on_workers
def test_dropout_that_drops_nothing_is_the_identity():
    x = split(x43)
    assert F.dropout(x, 0.0) is x and F.dropout(x, 0.5, training=False) is x
    assert float(F.dropout(x, 1.0).abs().sum()) == 0
    with pytest.raises(ValueError, match="dropout probability"):
        F.dropout(x, 1.5)


@on_workers
def test_stochastic_depth():
    x = split(torch.ones(64, 3, 2), 2, 1, 1)
    mask = torch.empty_like(x.sum((1, 2), keepdim=True)).bernoulli_(0.75).div_(0.75)
    y = (x * mask).full_tensor()
    rows = y.flatten(1)
    assert torch.equal(rows.amin(1), rows.amax(1)) and 0.5 < float((rows[:, 0] > 0).double().mean()) < 0.95


@on_workers
def test_a_checkpoint_draws_the_same_again():
    """Several times, nested, and in another order."""

    def inner(a):
        return F.dropout(a * 2, 0.5) + torch.rand_like(a) * a

    def outer(a):
        b = checkpoint(inner, F.dropout(a, 0.3), use_reentrant=False)
        return checkpoint(inner, b * b, use_reentrant=False) + F.dropout(a, 0.2)

    def run(wrapped):
        distdl.globals.layouts.context.Context.of(distdl.world().comm).own(Draws).__init__()
        x = split(x43).requires_grad_()
        y = wrapped(x) * wrapped(x + 1)
        (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y.sum(), x)
        return y.detach().full_tensor(), dx.full_tensor(), again.full_tensor()

    ways = (
        run(lambda a: checkpoint(outer, a, use_reentrant=False)),
        run(outer),
        run(lambda a: _plain(inner, a)),
    )
    y, dx, _ = ways[2]
    for other, gradient, repeated in ways[:2]:
        assert torch.equal(other, y)
        assert torch.allclose(gradient, dx) and torch.allclose(repeated, dx)


def _plain(inner, a):
    b = inner(F.dropout(a, 0.3))
    return inner(b * b) + F.dropout(a, 0.2)


@on_workers
def test_another_seed_draws_anew():
    draws = []
    for seed in (1, 2):
        x = split(x43)
        x._context.own(Draws).seed = seed
        draws.append(torch.rand_like(x).full_tensor())
    assert not torch.equal(*draws)


def test_dropout_of_parameters_is_the_same_on_all_workers():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.ones(5, 7, dtype=torch.float64))

        def forward(self, x):
            return x * F.dropout(self.table, 0.5)

    found = []

    def work(grid):
        P = distdl.world().create_cartesian_topology_partition(grid)
        model = distdl.distribute(Model(), P)
        y = model(distdl.distribute_tensor(x43, P))
        y.sum().backward()
        found.append((y.detach().full_tensor(), model.table.grad))

    for grid in ((1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 3)):
        distdl.run_workers(lambda grid=grid: work(grid), torch.Size(grid).numel())
    for y, gradient in found[1:]:
        assert torch.equal(y, found[0][0]) and torch.allclose(gradient, found[0][1])


@on_workers
def test_odds_have_the_derivative_zero():
    class Mask(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.odds = torch.nn.Parameter(torch.tensor([0.5, 0.25]))

        def forward(self, x):
            return x * torch.bernoulli(self.odds)[0] + torch.bernoulli(x.sigmoid())

    P = distdl.world()[:2].reshape(2, 1)
    model = distdl.distribute(Mask(), P)
    x = distdl.distribute_tensor(torch.ones(4, 3), P).requires_grad_()
    model(x).sum().backward()
    assert torch.equal(model.odds.grad, torch.zeros(2))
    y = distdl.distribute_tensor(torch.ones(4, 3), P).requires_grad_()
    torch.bernoulli(y.sigmoid()).sum().backward()
    assert torch.equal(y.grad.full_tensor(), torch.zeros(4, 3))


@pytest.mark.parametrize("name", ["rand_like", "dropout", "bernoulli", "poisson"])
def test_numbers_without_dims_are_drawn(name):
    functions = {
        "rand_like": lambda x: torch.rand_like(x) * 0,
        "dropout": lambda x: F.dropout(x, 1.0),
        "bernoulli": lambda x: torch.bernoulli(x * 0),
        "poisson": lambda x: torch.poisson(x * 0),
    }
    assert_same(functions[name], Global(torch.tensor(1.5, dtype=torch.float64)))


@on_workers
def test_zeros_have_a_slope_of_rrelu_that_is_drawn():
    x = split(torch.zeros(4, 6), 1, 2).requires_grad_()
    F.rrelu(x, 0.1, 0.3, training=True).sum().backward()
    slopes = x.grad.full_tensor()
    assert slopes.min() >= 0.1 and slopes.max() <= 0.3


BY_GENERATOR = {
    "rand_like": lambda x, g: torch.rand_like(x, generator=g),
    "randn_like": lambda x, g: torch.randn_like(x, generator=g, dtype=torch.float32),
    "randint_like": lambda x, g: torch.randint_like(x, high=9, generator=g),
    "uniform_": lambda x, g: torch.empty_like(x).uniform_(-1, 2, generator=g),
    "normal_": lambda x, g: x.clone()[:, :, 1:4, ::2].normal_(1, std=3, generator=g),
    "of other strides": lambda x, g: torch.empty_like(x).transpose(1, 3).exponential_(generator=g),
    "random_": lambda x, g: torch.empty_like(x).random_(2, to=7, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x.sigmoid().transpose(0, 2), generator=g),
    "bernoulli, in float32": lambda x, g: torch.bernoulli(x.float().sigmoid(), generator=g),
    "bernoulli of a number": lambda x, g: torch.bernoulli(x, 0.3, generator=g),
    "bernoulli_": lambda x, g: torch.empty_like(x).bernoulli_(x.sigmoid(), generator=g),
    "normal": lambda x, g: torch.normal(x, x.exp(), generator=g),
    "one class": lambda x, g: torch.multinomial(x[:, 0, 0].softmax(-1), 1, generator=g),
    "classes": lambda x, g: x[:, 0, 0].softmax(-1).multinomial(3, generator=g),
    "classes again": lambda x, g: torch.multinomial(x[:, 0, 0].softmax(-1), 9, True, generator=g),
    "classes of a vector": lambda x, g: torch.multinomial(x[0, 0, 0].softmax(-1), 2, generator=g),
    "poisson": lambda x, g: torch.poisson(x.exp(), generator=g),
    "rrelu": lambda x, g: torch.rrelu(x.transpose(0, 2), 0.1, 0.3, True, g),
    "rrelu_": lambda x, g: torch.rrelu_(x.clone(), training=True, generator=g),
    "a number": lambda x, g: torch.rand_like(x.sum(), generator=g),
}


@on_workers
@pytest.mark.parametrize("name", BY_GENERATOR)
def test_by_a_generator_is_drawn_what_torch_draws(name):
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    for grid in ((2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)):
        y = BY_GENERATOR[name](split(x43, *grid), ours)
        assert torch.equal(y.full_tensor(), BY_GENERATOR[name](x43, theirs))
        assert torch.equal(ours.get_state(), theirs.get_state())


@on_workers
def test_derivatives_of_what_a_generator_draws():
    """Of rrelu there are some; of odds they are zero; a new tensor may be a leaf."""
    plain, x = x43.clone().requires_grad_(), split(x43).requires_grad_()

    def drawn(x):
        g = torch.Generator().manual_seed(1)
        return (torch.rrelu(x, 0.1, 0.3, True, g) * torch.bernoulli(x.sigmoid(), generator=g)).sum()

    for one in (plain, x):
        drawn(one).backward()
    assert torch.equal(x.grad.full_tensor(), plain.grad)
    new = torch.randn_like(x, generator=torch.Generator().manual_seed(2), requires_grad=True)
    (new * 3).sum().backward()
    assert new.is_leaf and torch.equal(new.grad.full_tensor(), torch.full_like(x43, 3))


@on_workers
def test_weights_in_shares_begin_with_what_a_generator_draws():
    layer = torch.nn.Linear(5, 7)
    model = distdl.distribute(torch.nn.Linear(5, 7), split(noise(4, 5)).layout.partition, weights="sharded")
    for one in (layer, model):
        generator = torch.Generator().manual_seed(2)
        torch.nn.init.kaiming_normal_(one.weight, generator=generator)
        torch.nn.init.trunc_normal_(one.bias, generator=generator)
    found = model.state_dict()
    assert torch.equal(found["weight"], layer.weight) and torch.equal(found["bias"], layer.bias)
