"""Diagonals, and repeated labels of an einsum: nothing moves."""

import pytest
import torch
from launched import on_workers, split
from same import GRIDS, Global, assert_same, noise

import distdl

x2, x3 = noise(5, 7), noise(3, 6, 5)


@pytest.mark.parametrize("offset", [0, 1, -2, 6, 9])
def test_diagonals(offset):
    assert_same(lambda x: (x.diagonal(offset), torch.diag(x, offset)), Global(x2), grids=[*GRIDS[2], (1, 4)])
    assert_same(lambda x: torch.diagonal(x, offset, dim1=-1, dim2=1), Global(x3))
    assert_same(lambda x: torch.linalg.diagonal(x, offset=offset) * 2, Global(x3), grids=[(1, 2, 2)], twice=True)


def test_matrices_of_diagonals():
    assert_same(lambda x: (torch.diag(x), x.diag(2), torch.diag(x, -1)), Global(noise(5)))
    assert_same(lambda x: (x.diag_embed(), torch.diag_embed(x, 1, 0, -1)), Global(x2))
    assert_same(lambda x: (x.trace(), x.fill_diagonal_(3.0).sin()), Global(x2))


@pytest.mark.parametrize("equation", ["bii->b", "bii->bi", "bii", "ibi,bi->bi", "...ii->...i", "iii->i"])
def test_repeated_labels(equation):
    x = noise(*((3, 3, 3) if equation == "iii->i" else (5, 3, 5) if equation[0] == "i" else (3, 5, 5)))
    more = [Global(noise(3, 5))] if "," in equation else []
    assert_same(lambda *operands: torch.einsum(equation, *operands), Global(x), *more)


@on_workers
def test_a_diagonal_is_a_view_and_moves_nothing():
    x = split(torch.zeros(5, 5), 1, 2)
    with distdl.ledger() as book:
        x.diagonal().add_(1)
    assert not book.entries and torch.equal(x.full_tensor(), torch.eye(5))


def test_parts_of_complex_numbers():
    assert_same(lambda x: torch.view_as_complex(x.permute(1, 2, 0).contiguous()), Global(noise(2, 5, 7)))
    assert_same(lambda x: torch.view_as_complex(x.permute(2, 0, 1, 3)), Global(noise(3, 1, 4, 2)))
    assert_same(lambda x: torch.view_as_complex(x[..., 2:]), Global(noise(5, 3, 4)))


def test_several_quantiles():
    levels = torch.tensor([0.3, 0.9], dtype=torch.float64)
    assert_same(lambda x: x.quantile(levels, 1), Global(x2))
    assert_same(lambda x: torch.nanquantile(x, levels[0], dim=0, keepdim=True), Global(x2))
