"""Which values occur, how often, and which stand where in the order of all."""

import pytest
import torch
from same import Global, assert_raises_the_same, assert_same, noise

x3, x2 = noise(3, 5, 7), noise(5, 6)
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


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("weights", [torch.ones(3), torch.ones(7, 1)])
def test_weights_that_torch_refuses(weights):
    assert_raises_the_same(lambda x: torch.bincount(x[0], weights), torch.arange(14).reshape(2, 7))
