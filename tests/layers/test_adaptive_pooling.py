import copy
import itertools

import pytest
import torch
from helpers_layers import every_worker_raises, gathered, noise, on_workers, penalty

import distdl
from distdl.geometry.boxes import runs
from distdl.nn import (
    DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveAvgPool3d,
    DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d,
    DistributedAdaptiveMaxPool3d,
)
from distdl.partition.layout import Layout
from distdl.testing import Counting, assert_matches_sequential

LINES = [
    (DistributedAdaptiveAvgPool1d, torch.nn.AdaptiveAvgPool1d),
    (DistributedAdaptiveMaxPool1d, torch.nn.AdaptiveMaxPool1d),
]
PLANES = [
    (DistributedAdaptiveAvgPool2d, torch.nn.AdaptiveAvgPool2d),
    (DistributedAdaptiveMaxPool2d, torch.nn.AdaptiveMaxPool2d),
]
CUBES = [
    (DistributedAdaptiveAvgPool3d, torch.nn.AdaptiveAvgPool3d),
    (DistributedAdaptiveMaxPool3d, torch.nn.AdaptiveMaxPool3d),
]


@pytest.mark.parametrize(("workers", "sizes"), [
    (1, [11]), (2, [6, 5]), (3, [4, 4, 3]), (4, [1, 0, 9, 1]), (4, [0, 0, 0, 11]), (6, [2, 2, 2, 2, 2, 1]),
])  # fmt: skip
def test_every_size(workers, sizes):
    """Some outputs read from four blocks, some workers have no output, and 17 outputs of 11 cells repeat cells."""

    def main(P):
        line, blocks = P.reshape(1, 1, workers), [runs([2]), runs([1]), runs(sizes)]
        for size, (layer, reference) in itertools.product((1, 2, 3, 5, 8, 11, 17), LINES):
            assert_matches_sequential(layer(line, size), reference(size), noise(2, 1, 11), blocks)

    on_workers(workers, main)


@pytest.mark.parametrize(("grid", "size"), [
    ((1, 1, 2, 2), (4, 3)), ((1, 1, 4, 1), (None, 2)), ((2, 1, 1, 2), 1), ((1, 2, 2, 1), (6, None)), ((1, 1, 1, 4), 2),
])  # fmt: skip
def test_two_dims_of_space_and_all_else_split(grid, size):
    def main(P):
        for layer, reference in PLANES:
            x = noise(3, 2, 8, 9)
            assert_matches_sequential(layer(P[1:].reshape(*grid), size), reference(size), x)
            blocks = [runs([3, 0][: grid[0]]), runs([1, 1] if grid[1] == 2 else [2])]
            blocks += [
                runs([n] + [0] * (p - 2) + [e - n] * (p > 1) if p > 1 else [e])
                for n, e, p in zip((1, 6), (8, 9), grid[2:], strict=True)
            ]
            assert_matches_sequential(layer(P[1:].reshape(*grid), size), reference(size), x, blocks)

    on_workers(5, main)


def test_three_dims_of_space_on_workers_in_any_order():
    def main(P):
        cube = P.create_partition_inclusive([3, 0, 2, 1]).reshape(1, 1, 2, 1, 2)
        for size, (layer, reference) in itertools.product(((2, 3, 1), (None, 2, 4), 1), CUBES):
            assert_matches_sequential(layer(cube, size), reference(size), noise(1, 2, 5, 4, 3))

    on_workers(4, main)


@pytest.mark.parametrize("special", [float("-inf"), float("nan"), 1.0])
def test_among_equal_cells_torch_s_own_is_chosen(special):
    """It may lie in any of the blocks that a window meets; so do the indices."""

    def main(P):
        for number, (grid, extents, size) in enumerate([
            ((1, 1, 2, 2), (7, 8), (3, 5)), ((1, 1, 4, 1), (9, 3), (2, 2)), ((1, 1, 2, 1, 2), (4, 3, 5), (2, 2, 1)),
            ((1, 1, 2, 2), (8, 8), (4, 4)),
        ]):  # fmt: skip
            x = torch.randint(0, 3, (1, 2, *extents), generator=torch.Generator().manual_seed(number)).double()
            x[x == 1] = special
            x[:, :, 2:6] = special
            layer, reference = (PLANES, CUBES)[len(extents) - 2][1]
            owned = Layout.balanced(P.reshape(*grid), x.shape)
            whole, part = x.clone().requires_grad_(), owned.block(x).clone().requires_grad_()
            expected, places = reference(size, return_indices=True)(whole)
            y, indices = layer(owned.partition, size, return_indices=True)(part)
            expected.sum().backward()
            y.sum().backward()
            computed = Layout.balanced(owned.partition, expected.shape)
            assert torch.equal(gathered(P, computed, indices), places)
            assert torch.allclose(gathered(P, computed, y), expected.detach(), equal_nan=True)
            assert torch.equal(part.grad, owned.block(whole.grad))

    on_workers(4, main)


def test_a_pooling_to_one_cell_sends_no_field():
    """Blocks of 6 channels of 64 x 64 cells send a number for each channel, for a maximum at most one for each row."""

    def main(P):
        for layer, most in ((DistributedAdaptiveAvgPool2d, 6), (DistributedAdaptiveMaxPool2d, 6 * 64)):
            pool = layer(P.reshape(1, 1, 2, 2), 1).double()
            with distdl.ledger() as seen:
                pool(noise(2, 3, 64, 64))
            sent = [entry for entry in seen.entries if entry.operation == "exchange"]
            assert sum(entry.messages for entry in sent) == (P.rank > 0)
            assert sum(entry.sent for entry in sent) <= 8 * most * (P.rank > 0)

    on_workers(4, main)


def test_windows_within_the_blocks_send_nothing():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        for layer in (DistributedAdaptiveAvgPool2d, DistributedAdaptiveMaxPool2d):
            for size in (2, 4, (None, 2), 8):
                pool = layer(team.reshape(1, 1, 2, 2), size)
                x = torch.rand(1, 1, 4, 4, requires_grad=True)
                pool(x)
                team.comm.reset()
                y = pool(x)
                y.sum().backward()
                assert [name for name, _ in team.comm.log] == ["all_max"], (layer, size)
                y.data.fill_(2)
                assert x.max() < 2  # y shares no memory with x

    on_workers(4, main)


@pytest.mark.parametrize("layer", [0, 1])
def test_double_backward_checkpoints_and_copies_with_idle_and_empty_workers(layer):
    make, reference = LINES[layer]

    def main(P):
        owned = Layout.of(P[1:].reshape(1, 1, 4), [runs([2]), runs([1]), runs([3, 0, 5, 1])])
        pool = copy.deepcopy(torch.nn.Sequential(make(owned.partition, 4), torch.nn.Identity()).double())
        whole = (noise(2, 1, 9).abs() + 1).requires_grad_()

        def checkpointed(x):
            return torch.utils.checkpoint.checkpoint(pool, x, use_reentrant=False)

        penalty(reference(4), whole, 3).backward()
        for network in (pool, checkpointed):
            x = owned.block(whole.detach()).clone() if P.rank else torch.zeros(2, 0, dtype=torch.float64)
            x.requires_grad_()
            penalty(network, x, 3).backward()
            assert x.grad.shape == x.shape
            assert not P.rank or torch.allclose(x.grad, owned.block(whole.grad), rtol=1e-10)

    on_workers(5, main)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_widths_are_summed_in_float32(autocast):
    def main(P):
        for dtype, space in itertools.product((torch.bfloat16, torch.float16), (2, 3)):
            x = (noise(1, 1, *[9] * space) + 100).to(dtype)
            grid = P.reshape(1, 1, 3, *[1] * (space - 1))
            for layer, reference in (PLANES, CUBES)[space - 2]:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    for size in (1, 4, 9):
                        expected = reference(size)(x.double())  # torch adds up the 3-d one of bfloat16 in bfloat16
                        part = Layout.balanced(grid, x.shape).block(x).clone().requires_grad_()
                        y = layer(grid, size)(part)
                        theirs = Layout.balanced(grid, expected.shape).block(expected)
                        assert y.dtype == reference(size)(x).dtype
                        assert torch.allclose(y.double(), theirs.double(), rtol=max(torch.finfo(y.dtype).eps, 1e-6))
                        y.sum().backward()
                        assert part.grad.dtype == dtype

    on_workers(3, main)


def test_an_empty_block_of_the_default_dtype_takes_that_of_the_others():
    def main(P):
        for layer, _ in LINES:
            x = torch.ones(1, 1, 4).double() if P.rank == 0 else torch.ones(1, 1, 0)
            y = layer(P.reshape(1, 1, 2), 3)(x.requires_grad_())
            y.sum().backward()
            assert y.dtype == torch.float64 and y.shape == (1, 1, 2 - P.rank) and x.grad.dtype == x.dtype

    on_workers(2, main)


def test_a_worker_outside_gets_what_it_gave():
    def main(P):
        pool = DistributedAdaptiveMaxPool1d(P[:1].reshape(1, 1, 1), 1, return_indices=True)
        y, indices = pool(torch.ones(2, 1, 3) if P.rank == 0 else torch.zeros(2, 0))
        assert y.shape == indices.shape == ((2, 0) if P.rank else (2, 1, 1)) and indices.dtype == torch.int64

    on_workers(2, main)


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedAdaptiveAvgPool2d(P.reshape(1, 1, 2), 1), "batch x channels x 2 dims of space"),
    (lambda P: DistributedAdaptiveAvgPool1d(P.reshape(1, 1, 2), 0), "output_size to be one whole number from 1"),
    (lambda P: DistributedAdaptiveMaxPool2d(P.reshape(1, 1, 1, 2), (2,)), "or 2 of them or None; got (2,)"),
    (lambda P: DistributedAdaptiveMaxPool1d(P.reshape(1, 1, 2), None), "got None"),
    (lambda P: DistributedAdaptiveMaxPool1d(P.reshape(1, 1, 2), 2.0), "got 2.0"),
    (lambda P: DistributedAdaptiveAvgPool1d(P.reshape(1, 1, 2), 1)(torch.ones(1, 1, 0)), "its shape is 1x1x0"),
    (lambda P: DistributedAdaptiveAvgPool1d(P.reshape(1, 1, 2), 1)(torch.ones(1, 1, 2).int()), "got torch.int32"),
    (lambda P: DistributedAdaptiveMaxPool1d(P.reshape(1, 1, 2), 1)(torch.ones(1, 2)), "3 dims on all workers"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(2, make)
