"""Masks that are split: what they choose, and writing there."""

import pytest
import torch
from launched import on_workers, split
from same import Global, assert_same, noise

import distdl

x3, x2 = noise(5, 7, 3), noise(5, 7)
positive = Global(x2 > 0)
alternating = Global(torch.arange(5) % 2 == 0)
none = Global(torch.zeros(5, 7, dtype=torch.bool))


def written(x, mask, value):
    x[mask] = value
    return x.sin()


@pytest.mark.parametrize(
    ("function", "x", "mask"),
    [
        (lambda x, m: x[m], x2, positive), (lambda x, m: x[m].sin(), x3, positive),
        (lambda x, m: x[m], x3, alternating),
        (lambda x, m: x[1:, m], noise(4, 5, 3), alternating), (lambda x, m: x[..., m, None], noise(4, 5), alternating),
        (lambda x, m: x[m, 2], noise(5, 3), alternating),
        (lambda x, m: x[m], x2, none), (lambda x, m: x[x > 0.5], x2, none),
        (lambda x, m: x[m, torch.tensor([0, 2, 1])], noise(5, 3), alternating),
        (lambda x, m: x.masked_select(m), x2, positive), (lambda x, m: x.masked_select(m[:, :1]), x2, positive),
        (lambda x, m: m.nonzero(), x2, positive), (lambda x, m: torch.argwhere(x.round()), x3, none),
        (lambda x, m: m.nonzero(as_tuple=True), x2, none), (lambda x, m: torch.where(m), x2, positive),
    ],
)  # fmt: skip
def test_what_a_mask_chooses(function, x, mask):
    assert_same(function, Global(x), mask)


def test_derivatives_and_plain_partners():
    assert_same(lambda x, m: x[m].square(), Global(x2), positive, grids=[(2, 2), (1, 3)], twice=True)
    assert_same(lambda m, x: torch.masked_select(x, m), positive, noise(5, 7))
    assert_same(lambda x: torch.masked_select(x, x2 > 0), Global(x2))


@pytest.mark.parametrize(
    ("function", "mask", "x"),
    [
        (lambda m, x: x[m], positive, x3), (lambda m, x: x[m], positive, x2), (lambda m, x: x[~m], alternating, x3),
        (lambda m, x: x[:, m], alternating, noise(2, 5, 3)), (lambda m, x: x[m, 2], alternating, x3),
        (lambda m, x: (2 * x.unsqueeze(0))[0, m], alternating, x3), (lambda m, x: x[m], none, x3),
    ],
)  # fmt: skip
def test_what_a_split_mask_chooses_of_a_tensor_that_every_worker_has(function, mask, x):
    assert_same(function, mask, x)


@pytest.mark.parametrize(
    ("x", "mask", "value"),
    [
        (x2, positive, 2.5), (x2, positive, Global(torch.tensor(2.5, dtype=torch.float64))),
        (x2, positive, Global(noise(int((x2 > 0).sum())))), (x2, positive, noise(int((x2 > 0).sum()))),
        (x3, positive, Global(noise(3))), (x3, positive, noise(1, 3)), (x3, positive, noise(int((x2 > 0).sum()), 3)),
        (x3, alternating, Global(noise(7, 1))), (x3, alternating, Global(noise(3, 7, 3))), (x2, none, noise(0)),
        (x2.round().long(), positive, 7), (x2, positive, Global(noise(1, 1, int((x2 > 0).sum())))),
    ],
)  # fmt: skip
def test_writing(x, mask, value):
    assert_same(written, Global(x), mask, value)


def test_writing_parts_and_what_is_like_it():
    def part(x, mask, value):
        x[1:, mask] = value
        return x.sin()

    assert_same(part, Global(noise(4, 5, 3)), alternating, 2.0)
    assert_same(part, Global(noise(4, 5, 3)), alternating, Global(noise(3, 3, 3)))
    assert_same(lambda x, y: written(x, x > 0, y[x > 0]), Global(x2), Global(noise(5, 7, seed=3)), twice=True)
    assert_same(lambda x, m, v: x.index_put_((m,), v).sin(), Global(x2), positive, noise(1))
    assert_same(lambda x, m, v: x.masked_scatter(m, v), Global(x3[..., 0]), positive, Global(noise(6, 6)))
    assert_same(lambda x, m, v: x.masked_scatter_(m[:, :1], v).sin(), Global(x2), positive, noise(40))


@on_workers
def test_only_counts_are_exchanged_where_rows_stay():
    x = split(x2)
    mask = x > 0
    with distdl.ledger() as book:
        y = x[mask[:, 0]]
    assert y.layout.intervals[0] == ((0, int((x2[:3, 0] > 0).sum())), (int((x2[:3, 0] > 0).sum()), y.shape[0]))
    assert sum(one.calls for one in book.entries if one.operation == "exchange") == 0, str(book)


@on_workers
def test_masks_that_do_not_fit():
    x, mask = split(x2), split(x2 > 0)
    for function in (lambda: x[:, mask], lambda: x[mask[:, :3]], lambda: x[1:].masked_select(mask)):
        with pytest.raises((IndexError, RuntimeError)):
            function()
    with pytest.raises(RuntimeError):
        x[mask] = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="source and destination dtypes match"):
        x[mask] = x[mask].float()
    with pytest.raises(RuntimeError):
        x.masked_scatter(mask, torch.zeros(3, dtype=torch.float64))
