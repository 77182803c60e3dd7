"""Which values occur, how often, and which stand where in the order of all."""

import pytest
import torch
from same import Global, assert_raises_the_same, assert_same, noise

x3 = noise(3, 5, 7)
x2 = noise(5, 6)
UNIQUE = {
    "values": lambda x: torch.unique(x), "by name": lambda x: x.unique(sorted=False, return_counts=True),
    "all": lambda x: torch.unique(x, True, True, True), "inverse": lambda x: torch.unique(x, return_inverse=True),
    "runs": lambda x: torch.unique_consecutive(x), "all of runs": lambda x: x.unique_consecutive(True, True),
    "counts of runs": lambda x: torch.unique_consecutive(x, return_counts=True),
}  # fmt: skip


@pytest.mark.parametrize("function", UNIQUE.values(), ids=UNIQUE)
def test_values_that_occur(function):
    labels = (x3 * 1.5).round().long()
    for x in (labels, labels.int()[0], labels.flatten(), labels > 0, labels[:, :, :0], labels[0, 0, 0]):
        assert_same(function, Global(x))


@pytest.mark.parametrize("name", UNIQUE)
def test_fractions_that_occur(name):
    """Each nan is a value by itself; of which place torch takes each for unique's inverse, it does not say."""

    def among(x):
        large = 5.0 if name in ("all", "inverse") else torch.nan
        return UNIQUE[name](torch.where(x > 1, large, (x * 2).round() / 4).detach())

    for x in (x3, x2.float(), noise(9)):
        assert_same(among, Global(x))


def test_values_of_which_a_worker_has_none():
    assert_same(lambda x: torch.unique(x, return_inverse=True), Global(torch.tensor([4, 2])), grids=[(4,)])
    assert_same(
        lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True),
        Global(torch.tensor([[3, 3, 3], [3, 1, 1]])), grids=[(1, 4), (4, 1), (2, 2)],
    )  # fmt: skip


def test_what_is_unique_along_a_dim_falls_back():
    assert_same(lambda x: torch.unique(x, dim=0, return_inverse=True), Global(x2.round().long()), falls_back=True)


@pytest.mark.parametrize("function", [torch.unique, torch.unique_consecutive])
def test_values_that_have_no_order(function):
    assert_raises_the_same(lambda x: function(x), torch.complex(x2, x2))


def test_sums_of_weights():
    """As of a power spectrum by wave numbers."""

    def function(x, table):
        numbers = (x.detach() * 2).round().abs().flatten().long()
        return (
            torch.bincount(numbers, x.detach().flatten()), numbers.bincount(weights=table.detach(), minlength=9),
            torch.bincount(torch.arange(30) % 4, x.detach().flatten() > 0), torch.bincount(numbers, numbers),
            torch.bincount(numbers, x.detach().flatten().float()),
        )  # fmt: skip

    assert_same(function, Global(x2), noise(30, seed=1))


WITHOUT_DERIVATIVE = {
    "bincount": lambda x: torch.bincount(torch.arange(30) % 7, x.flatten()),
    "unique": lambda x: torch.unique(x), "runs": lambda x: x.unique_consecutive(return_counts=True)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_DERIVATIVE)
def test_what_has_no_derivative_does_not_lose_it_in_silence(name):
    function = WITHOUT_DERIVATIVE[name]
    assert_same(lambda x: (function(x).detach(), function(x).requires_grad), Global(x2))
    assert_raises_the_same(lambda x: torch.autograd.grad(function(x).sum(), x), x2.clone().requires_grad_())


HISTOGRAMS = {
    "bins": lambda x: torch.histogram(x.detach(), 4),
    "range": lambda x: x.detach().histogram(5, range=(-1.0, 0.5)),
    "edges": lambda x: torch.histogram(x.detach(), torch.tensor([-1.0, -0.2, 0.1, 2.0], dtype=x.dtype)),
    "weights": lambda x: torch.histogram(x.detach(), bins=3, weight=x.detach().square()),
    "plain weights": lambda x: x.detach().histogram(3, weight=torch.ones(x.shape, dtype=x.dtype), density=True),
    "density": lambda x: torch.histogram(x.detach(), 6, range=(-2.0, 2.0), density=True).hist,
    "one value": lambda x: torch.histogram(x.detach() * 0 + 2, 3),
}


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms(name):
    for x in (x3, x2, noise(9)):
        assert_same(HISTOGRAMS[name], Global(x), falls_back=True)


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.histogram(0), lambda x: x.long().histogram(3), lambda x: (x / 0).histogram(3),
        lambda x: x.histogram(torch.ones(3)), lambda x: x.histogram(3, range=(1.0, 0.0)),
        lambda x: x.histogram(3, weight=x[0]), lambda x: x.histogram(3, weight=x.float()),
    ],
)  # fmt: skip
def test_histograms_that_torch_refuses(function):
    assert_raises_the_same(function, x2)


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("weights", [torch.ones(3), torch.ones(7, 1)])
def test_weights_that_torch_refuses(weights):
    assert_raises_the_same(lambda x: torch.bincount(x[0], weights), torch.arange(14).reshape(2, 7))


# -- the order of all elements
