"""The windows of pooling against the sequential torch operators, applied piece by piece, without workers."""

import itertools
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from distdl.geometry.boxes import balanced
from distdl.geometry.windows import PoolSliding, adaptive, pooled_extent, sliding
from distdl.partition.layout import Ruler

GEOMETRIES = [
    (k, s, p, d, n, ceil)
    for k, s, p, d, n, ceil in itertools.product(
        range(1, 8), range(1, 5), range(4), range(1, 4), range(1, 15), (False, True)
    )
    if 2 * p <= k
]


@cache
def cells(n):
    """Different whole numbers in no order, all below zero, so that zeros beyond the ends would be the largest."""
    return torch.tensor([float(i * 17 % 29 - 40) for i in range(n)], dtype=torch.float64)


WITH_OUTPUTS = [(k, s, p, d, n, ceil) for k, s, p, d, n, ceil in GEOMETRIES if pooled_extent(n, k, s, p, d, ceil)]


@cache
def sequential(k, s, p, d, n, ceil):
    """What torch makes of all cells: maxima, and means with and without the padding; None where it has no output."""
    x = cells(n).reshape(1, 1, n)
    try:
        largest = functional.max_pool1d(x, k, s, p, d, ceil)[0, 0]
    except RuntimeError:
        return None
    means = [functional.avg_pool1d(x, k, s, p, ceil, padded)[0, 0] for padded in (True, False)] if d == 1 else []
    return [largest, *means]


def piece(x, interval, outside):
    """The cells of an interval; beyond the ends of x, what counts outside."""
    start, stop = interval
    inside = x[max(start, 0) : max(stop, 0)]
    left = min(max(-start, 0), stop - start)
    right = stop - start - left - len(inside)
    return functional.pad(inside, (left, right), value=outside) if left or right else inside


@cache
def check_piece(geometry, outputs):
    """These outputs, from nothing but their window."""
    k, s, p, d, n, ceil = geometry
    x = cells(n)
    largest, *means = sequential(*geometry)
    interval = sliding(outputs, k, s, p, d)
    found = functional.max_pool1d(piece(x, interval, float("-inf"))[None, None], k, s, 0, d)[0, 0]
    assert torch.equal(found, largest[slice(*outputs)]), (geometry, outputs)
    if means:
        window = piece(x, interval, 0)[None, None, None]
        sums = functional.avg_pool2d(window, (1, k), (1, s), divisor_override=1)[0, 0, 0]
        sliding_windows = PoolSliding((k,), (s,), (p,), (d,), ceil_mode=ceil)
        for padded, mean in zip((True, False), means, strict=True):
            counts = torch.tensor(sliding_windows.counts(0, n, outputs, padded))
            assert torch.equal(sums / counts, mean[slice(*outputs)]), (geometry, outputs, padded)


def test_every_geometry_in_balanced_pieces():
    checked = 0
    for geometry in GEOMETRIES:
        k, s, p, d, n, ceil = geometry
        count, expected = pooled_extent(n, k, s, p, d, ceil), sequential(*geometry)
        assert count == (0 if expected is None else len(expected[0])), geometry
        pieces = {outputs for workers in range(1, 6) for outputs in balanced(count, workers) if outputs[0] < outputs[1]}
        for outputs in pieces:
            check_piece(geometry, outputs)
            checked += 1
    assert len(GEOMETRIES) == 6384 and checked > 22000


def cut_up(n, drawn):
    """``range(n)`` in one to six pieces, of which any may be empty; from six bytes."""
    cuts = [cut % (n + 1) for cut in drawn[1 : 1 + drawn[0] % 6]]
    return list(itertools.pairwise([0, *sorted(cuts), n]))


SPLITS = st.binary(min_size=96, max_size=96).map(lambda drawn: [drawn[i : i + 12] for i in range(0, 96, 12)])


def gathered(owned, interval):
    """The numbers of the cells of an interval, from the blocks that meet it, in order."""
    start, stop = interval
    blocks = [owned.intervals[place] for place in owned.meeting(interval)]
    return [cell for i, j in blocks for cell in range(max(i, start), min(j, stop))]


@pytest.mark.parametrize("examples", [500, pytest.param(2500, marks=pytest.mark.every_case)])
def test_any_split_of_inputs_and_outputs(examples):
    checked = 0

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.sampled_from(WITH_OUTPUTS), SPLITS)
    def check(geometry, splits):
        nonlocal checked
        k, s, p, d, n, ceil = geometry
        for split in splits:
            owned = Ruler(tuple(cut_up(n, split[:6])))
            for outputs in cut_up(pooled_extent(n, k, s, p, d, ceil), split[6:]):
                start, stop = sliding(outputs, k, s, p, d)
                if outputs[0] == outputs[1]:
                    assert start == stop
                    continue
                inside = (max(start, 0), min(stop, n))
                assert gathered(owned, inside) == list(range(*inside))
                check_piece(geometry, outputs)
            checked += 1

    check()
    assert checked >= 8 * examples


def test_bad_geometry_is_refused():
    for extents in [(3, 5), (6, 0)]:
        with pytest.raises(ValueError, match="the kernel spans 4 cells"):
            PoolSliding.of("P", 2, 4, 1, 0, 1).windows("P", extents, (1, 1))


def check_adaptive(n, count, blocks, spans):
    """The outputs of each span from their window, and all sums from the parts that blocks have of windows."""
    x = cells(n)
    largest, means = adaptive_sequential(n, count)
    for first, stop in spans:
        start, end = adaptive((first, stop), n, count)
        windows = [adaptive((output, output + 1), n, count) for output in range(first, stop)]
        if not windows:
            assert start == end
            continue
        assert (start, end) == (windows[0][0], windows[-1][1])
        assert [x[slice(*window)].max().item() for window in windows] == largest[first:stop]
    sums = [0.0] * count
    for start, stop in blocks:
        for output in range(*adaptive((start, stop), count, n)):
            i, j = adaptive((output, output + 1), n, count)
            assert max(i, start) < min(j, stop)  # it does read some of the block
            sums[output] += x[max(i, start) : min(j, stop)].sum().item()
    lengths = [j - i for i, j in (adaptive((output, output + 1), n, count) for output in range(count))]
    assert [total / length for total, length in zip(sums, lengths, strict=True)] == means


@cache
def adaptive_sequential(n, count):
    x = cells(n)[None, None]
    return [pool(x, count)[0, 0].tolist() for pool in (functional.adaptive_max_pool1d, functional.adaptive_avg_pool1d)]


def test_adaptive_windows_in_balanced_pieces():
    for n, count, workers in itertools.product(range(1, 29), range(1, 15), range(1, 6)):
        check_adaptive(n, count, balanced(n, workers), balanced(count, workers))


def test_adaptive_windows_in_any_pieces():
    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(st.integers(1, 28), st.integers(1, 14), SPLITS)
    def check(n, count, splits):
        for split in splits:
            check_adaptive(n, count, cut_up(n, split[:6]), cut_up(count, split[6:]))

    check()
