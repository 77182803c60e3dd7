"""Tensors side by side, repeated, rolled, padded, made anew or sorted."""

import pytest
import torch
from launched import on_workers, split
from same import GRIDS, Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F

import distdl

x4, x3, x2 = noise(2, 5, 7, 4), noise(3, 5, 7), noise(5, 7)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_side_by_side(dim):
    def cat(x, y):
        return torch.cat([x, y * 2, x], dim)

    other = list(x3.shape)
    other[dim] = 2
    y = noise(*other, seed=1)
    assert_same(cat, Global(x3), y)
    assert_same(cat, Global(x3), Global(y))
    assert_same(cat, Global(x3), Global(y, (1, 1, 3)), twice=dim == 1)


def test_names_of_joins():
    assert_same(lambda x, y: torch.stack([x, y], 1), Global(x3), Global(noise(3, 5, 7, seed=1), (1, 1, 3)))
    assert_same(lambda x, y: torch.stack((x, y), dim=-1), Global(x3), noise(3, 5, 7, seed=1))
    assert_same(lambda x: (torch.hstack([x, x]), torch.vstack([x, x]), torch.dstack([x, x])), Global(x3))
    assert_same(lambda x: torch.concat([x, x.float()], axis=0), Global(x2), tolerance=1e-6)
    assert_same(lambda x: torch.cat([x[:, :0], x], 1), Global(x2))
    assert_same(lambda x: torch.cat([torch.zeros(0), x]), Global(x2))
    assert_same(lambda x: torch.stack([x.sum(), x.mean()]), Global(x2))
    assert_same(lambda token, x: torch.cat([token.expand(3, -1, -1), x], dim=1), noise(1, 1, 7), Global(x3), twice=True)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_that_are_joined_again(dim):
    """One after another, in order, in another one, with some of them twice, and mixed with others."""
    n = x2.shape[dim]

    def parts(x):
        return [x.select(dim, place).sin() for place in range(n)]

    def pieces(x):
        return [x.narrow(dim, place, min(2, n - place)).exp() for place in range(0, n, 2)]

    assert_same(lambda x: torch.stack(parts(x), dim), Global(x2), twice=True)
    assert_same(lambda x: torch.stack(parts(x), -1), Global(x2))
    assert_same(lambda x: torch.stack(parts(x)[::-1]), Global(x2))
    assert_same(lambda x: torch.stack([*parts(x), parts(x)[0]]), Global(x2))
    assert_same(lambda x: torch.cat(pieces(x), dim), Global(x2), twice=True)
    assert_same(lambda x: torch.cat([x.narrow(dim, 2, 0), *pieces(x)[:-1]], dim), Global(x2))
    assert_same(lambda x: torch.cat([*pieces(x), x], dim), Global(x2))
    assert_same(lambda x: torch.stack([row.sum() for row in (x if dim else x.mT)]), Global(x2))


@on_workers
def test_parts_of_several_workers_stay_where_they_are():
    x = split(noise(6, 4))
    for join, parts in (
        (torch.stack, [x[place] for place in range(6)]),
        (torch.cat, [x[:2], x[2:3], x[3:4], x[4:]]),
        (torch.cat, [x[:1], x[1:]]),
    ):
        with distdl.ledger() as book:
            y = join(parts)
        assert y._layout is x._layout and not book.entries
        assert y.full_tensor().equal(noise(6, 4))
    columns = split(noise(6, 4), 1, 2)
    joined = torch.stack([columns[:, place] for place in range(4)], 1)
    assert joined._layout is columns._layout and joined.full_tensor().equal(noise(6, 4))
    assert torch.cat([x[2:3], x[:2]])._layout.partition == torch.cat([x, x])._layout.partition == x._layout.partition


def test_sequences_of_several_lengths():
    pad_sequence = torch.nn.utils.rnn.pad_sequence
    plain = noise(6, 7)
    assert_same(lambda x: pad_sequence([x[:2], x, plain], batch_first=True), Global(x2), twice=True)
    assert_same(lambda x: pad_sequence((x[1:], x[:1]), padding_value=2.5, padding_side="left"), Global(x3))
    assert_same(lambda x: pad_sequence([x[:, 0], plain[:, 0]]), Global(x2))
    assert_raises_the_same(lambda x: pad_sequence([x, x[:, :3]]), x2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.repeat(1, 1, 3), lambda x: x.repeat(2, 1, 2, 1), lambda x: x.repeat((3, 2, 1)),
        lambda x: x.repeat(1, 0, 2),
        lambda x: x.tile(2), lambda x: torch.tile(x, (2, 1, 2)), lambda x: x.repeat_interleave(3, dim=1),
        lambda x: torch.repeat_interleave(x, 2, 2, output_size=14), lambda x: x.repeat_interleave(2),
        lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), 0), lambda x: x.roll(2, 1),
        lambda x: x.roll((-3, 1), (2, 0)),
        lambda x: torch.roll(x, shifts=(2, 3), dims=(1, 1)), lambda x: x.roll(5), lambda x: x.roll(0, 1),
        lambda x: x.flip(1),
        lambda x: x.flip((0, -1)) * x, lambda x: torch.flip(x, dims=[1, 2]), lambda x: x.fliplr(),
        lambda x: torch.flipud(x),
        lambda x: x.tril(), lambda x: torch.triu(x, 2), lambda x: x.triu(diagonal=-1),
    ],
)  # fmt: skip
def test_repeats_rolls_and_flips(function):
    assert_same(function, Global(x3))


def test_pixels_and_channels():
    grids = [*GRIDS[4], (1, 1, 1, 4), (1, 4, 1, 1)]
    assert_same(lambda x: F.pixel_shuffle(x, 2), Global(noise(2, 8, 3, 5)), grids=grids)
    assert_same(lambda x: F.pixel_unshuffle(x, 2), Global(noise(2, 3, 6, 8)), grids=grids)
    assert_same(lambda x: torch.channel_shuffle(x, 3), Global(noise(2, 6, 5, 3)), grids=grids)


def test_windows():
    assert_same(lambda x: x.unfold(2, 3, 1) * 2, Global(x3))
    assert_same(lambda x: x.unfold(2, 3, 3).unfold(1, 2, 2), Global(x3))
    assert_same(lambda x: x.unfold(1, 2, 3), Global(x3), grids=[(1, 4, 1), (2, 2, 1)])
    assert_same(lambda x: F.unfold(x, (2, 2), stride=2), Global(x4), grids=GRIDS[4])
    assert_same(lambda x: F.unfold(x, 3, padding=1, stride=2), Global(x4))
    assert_same(lambda x: F.unfold(x, 3, dilation=2, padding=2), Global(noise(5, 7, 4)), grids=[(1, 2, 2)])
    columns = noise(2, 3 * 9, 12)
    assert_same(lambda x: F.fold(x, (7, 5), 3, padding=1, stride=2), Global(columns), grids=[*GRIDS[3], (1, 4, 1)])
    assert_same(lambda x: F.fold(F.unfold(x, 2, stride=2), (6, 4), 2, stride=2), Global(noise(2, 3, 6, 4)), twice=True)


@pytest.mark.parametrize(
    ("widths", "mode", "value"),
    [
        ((1, 2), "constant", 0.5), ((0, 1, 2, 0), "constant", None), ((0, 0, 0, 0, 0, 3), "constant", 0.0),
        ((-1, -2), "constant", 0), ((2, -1, -1, 0), "constant", 1.5), ((1, 2, 3, 1), "reflect", None),
        ((3, 1, 0, 2), "replicate", None),
        ((2, 1, 3, 3), "circular", None), ((0, 0, 0, 0, 1, 1, 2, 0), "constant", None), ((0, 0), "constant", None),
    ],
)  # fmt: skip
def test_padding(widths, mode, value):
    assert_same(lambda x: F.pad(x, widths, mode, value), Global(x4))


def test_padding_of_other_tensors():
    assert_same(lambda x: F.pad(x, [1, 1], value=-1), Global(torch.arange(15).reshape(3, 5)))
    assert_same(lambda x: F.pad(x, (1, 1, 0, 2), mode="reflect"), Global(x3), twice=True)


def test_new_tensors():
    def new(x):
        made = (
            x.new_zeros(3, 1, 7),
            x.new_ones((3, 5, 2)),
            x.new_full([3, 5, 7], 2.5),
            x.new_zeros(4, 2),
            x.new_tensor([1.0]),
        )
        return (
            *made,
            x.new_empty(size=(3, 1, 1)).fill_(1.0),
            x.new_zeros((3, 5, 7), dtype=torch.int64),
            x * made[0] + made[2],
        )

    assert_same(new, Global(x3))

    def made_by_constructor(x):
        return x.new(3, 5, 1).fill_(2), x.new(4).zero_(), x.new(x.shape).zero_() + x, x.new([1.5, 2]), x.new()

    assert_same(made_by_constructor, Global(x3))

    def work():
        P = distdl.world().create_partition_inclusive(range(4)).create_cartesian_topology_partition((2, 2, 1))
        x = distdl.distribute_tensor(x3, P)
        assert x.new_zeros(x.shape).layout is x.layout
        assert type(x.new_zeros(4, 2)) is torch.Tensor

    distdl.run_workers(work, 4)


def test_one_hot():
    labels = torch.arange(10).reshape(2, 5) * 3 % 4
    assert_same(lambda i: F.one_hot(i, 4), Global(labels))
    assert_same(lambda i: F.one_hot(i, 5).permute(0, 2, 1).float(), Global(labels))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sort(), lambda x: torch.sort(x, dim=1, descending=True), lambda x: x.argsort(0),
        lambda x: x.topk(2),
        lambda x: torch.topk(x, 3, dim=1, largest=False).values, lambda x: torch.msort(x), lambda x: x.sort(1).indices,
    ],
)  # fmt: skip
def test_order(function):
    assert_same(function, Global(x3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x, x[:, :2]], 0), lambda x: torch.stack([x, x[0]]), lambda x: x.repeat(2),
        lambda x: x.flip(4),
        lambda x: x.topk(9), lambda x: F.pad(x, (9, 0), "reflect"), lambda x: torch.cat([x, x], 5),
        lambda x: x.roll((1, 2), 0),
    ],
)  # fmt: skip
def test_torch_raises_the_same(function):
    assert_raises_the_same(function, x2)


def test_from_the_last_to_the_first():
    assert_same(lambda x: (reversed(x), list(reversed(x))[1]), Global(noise(5, 7)))
    assert_same(lambda x: reversed(x), Global(noise()))


def test_a_tensor_without_elements_beside_others():
    """Torch takes its dtype alone, whatever its dims."""
    empty, x, whole = torch.zeros(0, dtype=torch.float64), noise(5, 7).float(), torch.arange(35).reshape(5, 7)
    for one in (Global(empty, (2,)), empty):
        assert_same(lambda *tensors: torch.cat(tensors, 1), Global(x), one, tolerance=1e-6)
        assert_same(lambda *tensors: torch.cat(tensors), one, Global(whole))
    assert_same(lambda *tensors: torch.cat(tensors), Global(empty, (2,)), whole)
    assert_same(lambda *tensors: torch.cat(tensors), whole, Global(empty, (2,)))
    assert_same(lambda *tensors: torch.cat(tensors), Global(empty, (2,)), empty)
