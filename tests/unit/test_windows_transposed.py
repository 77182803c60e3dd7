"""The windows of transposed convolutions: index math against torch's operator, and pieces of it against the whole.

A case is one dim. A map is written as its matrix, which torch computes from the unit vectors: column i is what input i
adds to the outputs. The taps differ, so a shift by one cell shows.
"""

import itertools
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from distdl.geometry.boxes import balanced
from distdl.geometry.channels import Channels
from distdl.geometry.edges import Crop
from distdl.geometry.transposed import Transposed, transposed


def geometry(k, s, p, d, more):
    return Transposed((k,), (s,), (p,), (d,), (more,))


def taps(k):
    return torch.arange(1, k + 1, dtype=torch.float64).reshape(1, 1, k)


def sequential(k, s, p, d, more, extent):
    """The matrix of torch's operator: outputs x inputs."""
    y = functional.conv_transpose1d(torch.eye(extent, dtype=torch.float64)[:, None], taps(k), None, s, p, more, 1, d)
    return y[:, 0].T.numpy()


@cache
def piece(k, s, d, cells, crop):
    """The matrix of what a worker computes from a window of so many cells."""
    y = functional.conv_transpose1d(
        torch.eye(cells, dtype=torch.float64)[:, None], taps(k), None, s, crop.padding, crop.output_padding, 1, d
    )
    return functional.pad(y, (crop.before, crop.behind))[:, 0].T.numpy()


def check_run(layer, expected, run, extent):
    """One run of outputs: its window is as long as needed, and gives these outputs."""
    (k,), (s,), (p,), (d,), (more,) = layer.kernel, layer.stride, layer.padding, layer.dilation, layer.output_padding
    rows = expected[run[0] : run[1]]
    read = rows.any(axis=0).nonzero()[0]
    start, stop = window = transposed(run, extent, k, s, p, d)
    assert window == (read[0], read[-1] + 1) if len(read) else start == stop
    if run[0] < run[1]:
        start, stop = window = layer.window(0, run, extent)
        crop = layer.line(0).crop(window, run)
        if (window, run) == ((0, extent), (0, len(expected))):
            assert crop == Crop(p, more, 0, 0)  # one worker does what is done sequentially
        computed = piece(k, s, d, stop - start, crop)
        assert computed.shape == (run[1] - run[0], stop - start)
        if len(read):
            assert (computed == rows[:, start:stop]).all()
        else:
            assert stop == 0  # a cell before the tensor


@pytest.mark.parametrize(
    "extents", [(1, 2, 3, 4, 6, 9, 14), pytest.param(tuple(range(1, 15)), marks=pytest.mark.every_case)], ids=len
)
@pytest.mark.parametrize(("k", "s"), [(k, s) for k in range(1, 8) for s in range(1, 5)])
def test_every_geometry_piece_by_piece_over_balanced_splits(k, s, extents):
    checked = 0
    for p, d, extent in itertools.product(range(4), range(1, 4), extents):
        for more in range(max(s, d)):
            layer = geometry(k, s, p, d, more)
            count = (extent - 1) * s - 2 * p + d * (k - 1) + 1 + more
            if count < 1:
                with pytest.raises(
                    ValueError, match=f"the input has {extent} cells, and the output would have {count}"
                ):
                    layer.counts("C", (extent,))
                continue
            expected = sequential(k, s, p, d, more, extent)
            assert layer.counts("C", (extent,)) == (len(expected),) == (count,)
            for run in {run for workers in range(1, 6) for run in balanced(count, workers)}:
                check_run(layer, expected, run, extent)
                checked += 1
    assert checked > 130 * len(extents)


CASES, BYTES = 20, 12  # in one example, and of one case


@pytest.mark.parametrize("examples", [200, pytest.param(1000, marks=pytest.mark.every_case)])
def test_arbitrary_splits(examples):
    """20 of each example. (A byte for each number: drawing the numbers one by one takes longer than all else.)"""
    drawn = st.binary(min_size=CASES * BYTES, max_size=CASES * BYTES)
    settings(max_examples=examples, deadline=None, database=None)(given(drawn)(check_splits))()


def check_splits(drawn):
    for at in range(0, len(drawn), BYTES):
        k, s, p, d, more, extent, places, *cuts = drawn[at : at + BYTES]
        k, s, d, extent = k % 7 + 1, s % 4 + 1, d % 3 + 1, extent % 14 + 1
        more, most = more % max(s, d), (extent - 1) * s + d * (k - 1) + 1
        p = min(p % 4, (most - 1) // 2)
        layer, expected = geometry(k, s, p, d, more), sequential(k, s, p, d, more, extent)
        count = len(expected)
        assert count == most - 2 * p + more
        for run in itertools.pairwise([0, *sorted(cut % (count + 1) for cut in cuts[: places % 6]), count]):
            check_run(layer, expected, run, extent)


def test_options_are_checked():
    assert Transposed.of("C", 2, 3, (1, 2), 0, 1, (0, 1)) == Transposed((3, 3), (1, 2), (0, 0), (1, 1), (0, 1))
    for options in [((3,), 1, 0, 1, 0), (0, 1, 0, 1, 0), (3, 0, 0, 1, 0), (3, 1, -1, 1, 0), (3, 1, 0, (1, 0), 0)]:
        with pytest.raises(ValueError, match="C needs"):
            Transposed.of("C", 2, *options)
    for options in [(3, 1, 0, 1, 1), (3, (3, 2), 0, 1, 2), (3, 2, 0, 3, (2, 3))]:
        with pytest.raises(ValueError, match="C needs an output_padding smaller than the stride or the dilation; got"):
            Transposed.of("C", 2, *options)


def test_an_extent_may_be_asked_for_up_to_a_stride_more_than_the_least():
    layer = geometry(3, 2, 1, 1, 0)
    assert layer.counts("C", (4,)) == (7,) == layer.counts("C", (4,), (7,)) and layer.counts("C", (4,), (8,)) == (8,)
    for asked in (6, 9):
        with pytest.raises(ValueError, match=f"C needs an output_size from 7 to 8 in dim 2, .* 4 cells; got {asked}"):
            layer.counts("C", (4,), (asked,))


def test_a_run_of_channels_reads_all_of_its_groups():
    for inputs, produced in itertools.product((1, 2, 3), repeat=2):
        channels = Channels(4 * inputs, 4 * produced, 4)
        for start, stop in itertools.combinations(range(4 * produced + 1), 2):
            groups = {channel // produced for channel in range(start, stop)}
            read = range(*channels.read_by((start, stop)))
            assert set(read) == {i for group in groups for i in range(group * inputs, (group + 1) * inputs)}
        first, stop = channels.read_by((produced, produced))
        assert first == stop
