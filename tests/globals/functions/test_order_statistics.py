"""Which elements stand where in the order of all: medians and quantiles."""

import pytest
import torch
from same import Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional

import distdl
from distdl.globals.functions import order_statistics

x3 = noise(3, 5, 7)


x2 = noise(5, 6)


LEVELS = torch.tensor([0.0, 0.37, 1.0, 0.5], dtype=torch.float64)


OF_ALL = {
    "median": lambda x: (torch.median(x), x[1:].median()),
    "nanmedian": lambda x: (x.nanmedian(), torch.where(x > 0.5, torch.nan, x).nanmedian()),
    "median with nan": lambda x: torch.where(x > 0.5, torch.nan, x).median(),
    "quantile": lambda x: (torch.quantile(x, 0.3), x.quantile(q=0.99, keepdim=True)),
    "quantiles": lambda x: (x.quantile(LEVELS.to(x.dtype)), torch.quantile(x, LEVELS[1:3].to(x.dtype), keepdim=True)),
    "nanquantile": lambda x: torch.nanquantile(torch.where(x > 0.5, torch.nan, x), LEVELS.to(x.dtype)),
    "quantile with nan": lambda x: torch.where(x > 0.5, torch.nan, x).quantile(0.3).detach(),
    "ways": lambda x: [
        torch.quantile(x, 0.3, interpolation=way) for way in ("lower", "higher", "nearest", "midpoint", "linear")
    ],
    "infinite": lambda x: torch.where(x > 0.5, torch.inf, torch.where(x < -0.5, -torch.inf, x)).median(),
    "signed zeros": lambda x: (x * (x > 0)).median().abs().detach(),
}  # fmt: skip


@pytest.mark.parametrize("function", OF_ALL.values(), ids=OF_ALL)
def test_statistics_of_all_elements(function):
    for x in (x3, x2, noise(9), noise(2, 2)):
        assert_same(function, Global(x), twice=x is x2)
    assert_same(function, Global(x2.float()), grids=[(2, 2)], tolerance=1e-6)


@pytest.mark.parametrize("few", [0, 4])
def test_statistics_of_many_elements(monkeypatch, few):
    monkeypatch.setattr(order_statistics, "_FEW", few)
    for function in (OF_ALL["median"], OF_ALL["nanquantile"], OF_ALL["infinite"]):
        assert_same(function, Global(x3), grids=[(2, 1, 2)])
    whole = (x2 * 2).round().long()
    assert_same(lambda x: (x.median(), (x - 4).median(), (x * 2**40 - 2**61).median()), Global(whole), grids=[(2, 2)])


def test_quantiles_of_more_elements_than_torch_takes():
    """Single precision has not all of their places."""
    few, count = torch.tensor([5.0, 7.0, 6.0]), 2**24 + 4

    def work():
        x = functional.pad(distdl.distribute_tensor(few, distdl.world()), (0, count - 3))
        return x.quantile(1.0).item()

    assert distdl.run_workers(work, 2) == [7, 7]


def test_what_is_written_into_a_quantile_does_not_reach_the_elements():
    def function(x):
        x.quantile(0.5, interpolation="lower").mul_(3)
        return x

    assert_same(function, Global(x2))


@pytest.mark.parametrize("dim", [None, 1])
def test_quantiles_at_levels_that_are_none_or_have_a_gradient(dim):
    levels = torch.zeros(0, dtype=torch.float64)
    assert_same(lambda x: x.quantile(levels, dim=dim), Global(x2), falls_back=True)
    assert_same(lambda x, levels: x.quantile(levels, dim=dim), Global(x2), LEVELS[1:], falls_back=True)


def test_medians_of_equal_elements():
    assert_same(lambda x: (x.round().median(), (x * 0).median(), (x * 0 + 1).nanmedian() * x.sum()), Global(x3))
    assert_same(lambda x: ((x > 0) * x).relu().median(), Global(x2), twice=True)
    assert_same(lambda x: (torch.where(x < 5, torch.nan, x).nanmedian(), x.sum()), Global(x2))
    whole = (x3 * 9).round()
    for dtype in (torch.int64, torch.int8, torch.bfloat16):
        assert_same(lambda x: (x.median(), (x - x).median(), x[0].detach().median()), Global(whole.to(dtype)))
    assert_same(lambda x: (x.sum().median(), x.sum().quantile(0.3), x[0, 0].median()), Global(x2))


REFUSED = {
    "a level beyond": lambda x: torch.quantile(x, 1.5), "levels beyond": lambda x: x.quantile(-LEVELS),
    "levels of another dtype": lambda x: x.quantile(LEVELS.float()), "truths": lambda x: (x > 0).median(),
    "levels of two dims": lambda x: x.quantile(LEVELS[None]), "whole numbers": lambda x: x.long().quantile(0.5),
    "levels of another dtype along a dim": lambda x: x.quantile(LEVELS.float(), dim=0),
    "levels of two dims along a dim": lambda x: x.nanquantile(LEVELS[None], 1),
    "nothing": lambda x: x[:0].quantile(0.5), "a way": lambda x: x.quantile(0.5, interpolation="x"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("name", REFUSED)
def test_statistics_that_torch_refuses(name):
    assert_raises_the_same(REFUSED[name], x2)
