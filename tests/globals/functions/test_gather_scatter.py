"""Gather, scatter and their kin: what they read and write along a dim."""

import pytest
import torch
from launched import split
from same import Global, assert_raises_the_same, assert_same, noise

import distdl

x2 = noise(5, 7)


labels = torch.tensor([[0, 2, 1, 1, 0], [3, 3, 2, 0, 1], [1, 0, 0, 2, 3]])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.gather(1, i), lambda x, i: torch.gather(x, dim=-2, index=i[:, :4] % 3),
        lambda x, i: torch.take_along_dim(x, i[:, :, :1], 0), lambda x, i: x.scatter(1, i[:, :3], 1.5),
        lambda x, i: torch.scatter(x, 2, i[:2], x.detach() * 2), lambda x, i: x.scatter_add(0, i, x),
        lambda x, i: x.scatter_(1, i, x * 2).sin(),
        lambda x, i: torch.zeros_like(x).scatter_(2, i[:, :, :1], 1.0) * x,
        lambda x, i: x.scatter_add_(2, i, x * 3).sin(),
        lambda x, i: x.scatter_reduce(0, i, x, reduce="sum"),
    ],
)  # fmt: skip
def test_gather_and_scatter(function):
    x, index = noise(3, 5, 4), torch.arange(60).reshape(3, 5, 4) * 7 % 3
    assert_same(function, Global(x), index)
    assert_same(function, Global(x), Global(index))
    assert_same(function, Global(x), Global(index, (1, 1, 4)))


@pytest.mark.parametrize("name", ["scatter", "scatter_add"])
def test_a_number_is_scattered_to_one_place(name):
    """Torch takes a tensor without dims for one with a single element."""
    for value in (noise(1)[0], Global(noise(1)[0])):
        assert_same(lambda x, v: getattr(x, name)(0, torch.tensor([3]), v * 2), Global(noise(5)), value)


def test_gather_where_one_of_two_is_a_number():
    x, number = noise(5), noise(1)[0]
    places = torch.tensor([0, 0, 0])
    assert_same(lambda x, i: x.gather(0, i), number, Global(places))
    assert_same(lambda x, i: x.gather(-1, i), Global(number), places)
    assert_same(lambda x, i: x.gather(0, i), Global(x), torch.tensor(3))
    assert_same(lambda x, i: x.gather(0, i), Global(x), Global(torch.tensor(3)))


def test_gather_from_a_plain_tensor():
    assert_same(lambda x, i: x.gather(1, i), noise(3, 5), Global(labels))
    assert_same(lambda x, i: torch.take_along_dim(x, i), noise(3, 5), Global(labels))


def test_take_along_dim_takes_the_indices_that_torch_takes():
    """Along a dim, any number is one: torch takes the remainder. Of all elements, only those that are there."""
    x = noise(4, 3)
    for at in (torch.full((4, 1), 7), torch.tensor([[-9, 5]]), torch.full((1, 3), 2**40)):
        assert_same(lambda x, i: torch.take_along_dim(x, i, 1), Global(x), Global(at))
    refused = [
        (x, torch.full((1, 3), 1).int(), 0),
        (x, torch.tensor([1, 2]), 0), (x, torch.ones(2, 1).long(), 1), (x, torch.ones(1, 1).long(), 5),
        (x[:, :0], torch.zeros(4, 1).long(), 1),
    ]  # fmt: skip
    for whole, at, dim in refused:
        assert_raises_the_same(lambda x, at=at, dim=dim: torch.take_along_dim(x, at, dim), whole, text=True)
    for index in (-1, 12):
        with pytest.raises(RuntimeError, match=f"index {index} is out of bounds"):
            distdl.run_workers(lambda at=index: torch.take_along_dim(split(x, 1, 3), torch.tensor([2, at])), 3)


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_across_a_dim(dim):
    index = torch.tensor([1, 4, 1])
    source = noise(*[3 if one == dim else n for one, n in enumerate((5, 7))])
    assert_same(lambda x, s: x.index_add(dim, index, s, alpha=2), Global(x2), Global(source))
    assert_same(lambda x, s: x.index_add_(dim, index, s).sin(), Global(x2), source)
    assert_same(lambda x: x.index_fill(dim, index, 2.0), Global(x2))
    value = Global(torch.tensor(2.5, dtype=torch.float64))
    assert_same(lambda x, v: (x.index_fill(dim, index, v), x.index_fill_(dim, index, v).sin()), Global(x2), value)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_that_are_reduced(dim, reduce):
    index = torch.tensor([1, 4, 1])
    source = noise(*[3 if one == dim else n for one, n in enumerate((5, 7))], seed=3)
    torch.ones(1).index_reduce(0, index[:1] - 1, torch.ones(1), reduce)  # (it warns once, and warnings are errors here)
    for given in (source, Global(source)):
        assert_same(lambda x, s: x.index_reduce(dim, index, s, reduce=reduce, include_self=False), Global(x2), given)
        assert_same(lambda x, s: x.sin().index_reduce_(dim, index, s, reduce), Global(x2), given)
        assert_same(lambda x, s: x.index_reduce(dim, index, s, reduce), Global(x2), given, twice=True)
        assert_same(lambda x, s: x.index_reduce(dim, index, s.detach(), reduce), Global(x2), given, twice=True)


def test_a_slice_without_dims():
    one, vector = torch.tensor(1), noise(6)
    assert_same(lambda x: x.index_copy(0, one, x[0]), Global(vector), twice=True)
    assert_same(lambda x: x.sin().index_copy_(0, one, x.sum()), Global(vector))
    for name in ("index_add", "index_copy"):
        assert_raises_the_same(lambda x, name=name: getattr(x, name)(1, one, x.sum()), x2)
