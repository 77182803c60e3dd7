"""Moments without workers: the exchange is a product with the matrix of its plan."""

import doctest
import itertools

import numpy as np
import pytest
import torch
from ops import site
from torch.autograd import gradcheck, gradgradcheck

from distdl.geometry.boxes import runs, shape, slices
from distdl.ops import merging, moments
from distdl.ops.moments import Along, subgroup
from distdl.ops.normalisation import BatchNorm, GroupNorm, InstanceNorm, LayerNorm
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.plan.planners import copy
from distdl.testing import Silent


def splits(extent, parts):
    """All ways to cut a dim into blocks, empty ones included."""
    for cuts in itertools.combinations_with_replacement(range(extent + 1), parts - 1):
        yield runs(np.diff([0, *cuts, extent]).tolist())


def merged_everywhere(op, grid, blocks, x):
    """What each worker has at the end: its box of x, and the means of its entries."""
    workers = int(np.prod(grid))
    layouts, found = [], []
    for me in range(workers):
        P_x = Partition(Silent(me, workers)).reshape(grid)
        owned = Layout.of(P_x, blocks)
        arranged = op.arrange(owned, site(P_x))
        layouts.append((owned, arranged))
        block = owned.block(x).reshape(arranged.cells)
        centre = arranged.moments.centre(block)
        found.append(arranged.moments.measure(block - centre, centre))
    plan = copy(layouts[0][1].moments.owned, layouts[0][1].moments.needed)
    sent = torch.cat([found[worker].reshape(-1) for worker in sorted(plan.inputs)]).numpy()
    gathered, start = plan.matrix() @ sent, 0
    for me, (owned, arranged) in enumerate(layouts):
        extents = plan.outputs[me]
        part = torch.from_numpy(gathered[start : start + int(np.prod(extents))].copy()).reshape(extents)
        start += part.numel()
        yield owned[me], arranged, arranged.moments.of(arranged.moments.merge(part))


def check(op, grid, blocks, x, dims, groups=None):
    """The means are torch's, and where cells have one mean, workers have the same bits."""
    moments = torch.empty_like(x), torch.empty_like(x)
    for box, arranged, found in merged_everywhere(op, grid, blocks, x):
        for whole, part in zip(moments, found, strict=True):
            whole[slices(box)] = part.expand(arranged.cells).reshape(shape(box))
    cells, *moments = (one if groups is None else one.unflatten(1, (groups, -1)) for one in (x, *moments))
    variance, mean = torch.var_mean(cells, dims, correction=0, keepdim=True)
    for found, expected in zip(moments, (mean, variance), strict=True):
        assert torch.allclose(found, expected.expand_as(found), rtol=1e-12), blocks
        assert torch.equal(found.amin(dims), found.amax(dims)), blocks


def sample(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 5


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_groups_over_every_split_of_the_channels(groups):
    x = sample(2, 6, 2)
    for channels, space in itertools.product(splits(6, 3), [runs([2, 0]), runs([1, 1])]):
        blocks = [runs([2]), channels, space]
        check(GroupNorm(groups, 6), (1, 3, 2), blocks, x, (2, 3), groups)


def test_batch_and_space_over_every_split():
    x = sample(3, 2, 4)
    for batch, space in itertools.product(splits(3, 2), splits(4, 3)):
        check(BatchNorm(2), (2, 1, 3), [batch, runs([2]), space], x, (0, 2))


def test_the_last_dims_and_single_samples():
    x = sample(2, 3, 4)
    for channels, space in itertools.product(splits(3, 2), splits(4, 2)):
        blocks = [runs([1, 1]), channels, space]
        check(LayerNorm(((1, 3), (2, 4))), (2, 2, 2), blocks, x, (1, 2))
        check(InstanceNorm(3), (2, 2, 2), blocks, x, (2,))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_subgroups_tile_groups_and_blocks(size):
    for cells in splits(12, 3):
        together = subgroup(cells, size)
        assert size % together == 0 and all(start % together == stop % together == 0 for start, stop in cells)
        finer = [t for t in range(together + 1, size + 1) if size % t == 0]
        assert not any(all(start % t == 0 for start, _ in cells) for t in finer)


def test_docstring_examples():
    results = doctest.testmod(moments)
    assert results.attempted and not results.failed


def test_only_what_is_split_is_gathered():
    P = Partition(Silent(0, 4)).reshape(1, 2, 2)
    by_channels = P[:, :, :1]
    whole_samples = InstanceNorm(8).arrange(Layout.balanced(by_channels, (2, 8, 4)), site(P))
    assert whole_samples.moments.plan() is None
    plan = GroupNorm(4, 8).arrange(Layout.balanced(P, (2, 8, 4)), site(P)).moments.plan()
    assert {move.source for move in plan.moves if move.target == 0} == {0, 1}  # not across the channels
    assert Along.grouped(runs([0, 4, 4]), 2).needed == ((0, 0), (0, 4), (4, 8))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("dims", [[0], [1, 2], [0, 1, 2]])
def test_entries_are_differentiated_in_both_modes_and_twice(dims, centred):
    x = sample(2, 3, 4)
    centre = x.mean(dims, keepdim=True) if centred else None
    rest = (x - centre if centred else x).requires_grad_()

    def measure(rest):
        return merging.Measure.apply(rest, centre, dims)

    expected = x.square().mean(dims, keepdim=True)[None]
    if centred:
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        expected = torch.stack([mean, variance])
    assert torch.allclose(measure(rest), expected, rtol=1e-12)
    for given in (rest, (rest.detach() + 0.25).requires_grad_()):  # also where the centre is not the mean
        assert gradcheck(measure, given, check_forward_ad=True)
        assert gradgradcheck(measure, given, check_fwd_over_rev=True)


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("counts", [(1, 1), (3, 2), (4, 1, 2), (1, 5, 2, 2, 7)])
def test_merged_entries_are_differentiated_in_both_modes_and_twice(counts, kinds):
    states = sample(len(counts), kinds, 2, 1).requires_grad_()

    def merge(states):
        return merging.Merge.apply(states, counts)

    n = torch.tensor(counts).double().view(-1, 1, 1)
    mean = (n * states[:, 0]).sum(0) / n.sum()
    expected = mean[None]
    if kinds == 2:
        expected = torch.stack([mean, (n * (states[:, 1] + (states[:, 0] - mean).square())).sum(0) / n.sum()])
    assert torch.allclose(merge(states), expected, rtol=1e-12)
    assert gradcheck(merge, states, check_forward_ad=True)
    assert gradgradcheck(merge, states, check_fwd_over_rev=True)
