"""The windows of convolutions against torch's convolution, applied piece by piece. No worker runs.

Cells and weights are whole numbers, so torch's sums are exact in float64, and pieces have to equal the whole.
"""

import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from distdl.geometry.boxes import Interval, balanced, runs
from distdl.geometry.channels import Channels
from distdl.geometry.windows import Sliding, sliding, sliding_extent
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.plan.planners import copy
from distdl.testing import Silent

WIDEST = 3
GEOMETRIES = list(itertools.product(range(1, 8), range(1, 5), range(1, 4), range(1, 15)))
WIDTHS = list(itertools.product(range(WIDEST + 1), repeat=2))


def cells(n: int) -> torch.Tensor:
    """Whole numbers of which no two neighbours, nor their differences, are alike."""
    return torch.tensor([float(place * place % 23 + place) for place in range(2, n + 2)], dtype=torch.float64)


def convolve(x: torch.Tensor, k: int, s: int, d: int) -> torch.Tensor:
    w = torch.arange(1.0, k + 1, dtype=torch.float64)
    return functional.conv1d(x.view(1, 1, -1), w.view(1, 1, -1), stride=s, dilation=d).view(-1)


def outputs_of(count: int) -> set[Interval]:
    """All runs of outputs in balanced splits over up to five workers."""
    return {run for workers in range(1, 6) for run in balanced(count, workers)}


@pytest.mark.timeout(300)
def test_every_geometry_in_balanced_pieces():
    checked = 0
    for k, s, d, n in GEOMETRIES:
        surrounded = functional.pad(cells(n), (WIDEST, WIDEST))
        for before, behind in WIDTHS:
            count = sliding_extent(n, k, s, (before, behind), d)
            whole = surrounded[WIDEST - before : WIDEST + n + behind]
            if len(whole) < (k - 1) * d + 1:
                assert count == 0
                continue
            expected = convolve(whole, k, s, d)
            assert len(expected) == count
            for first, stop in outputs_of(count):
                start, last = sliding((first, stop), k, s, before, d)
                if first == stop:
                    assert start == last
                    continue
                assert -before <= start and last <= n + behind
                piece = convolve(surrounded[start + WIDEST : last + WIDEST], k, s, d)
                assert torch.equal(piece, expected[first:stop]), (k, s, d, n, before, behind, first, stop)
                checked += 1
    assert checked > 75_000


BYTES = 15  # of one case


def decoded(numbers: bytes):
    """A case: the geometry, and where its inputs and its outputs are cut; as many times each."""
    kernel, stride, dilation, extent, before, behind, workers, *cuts = numbers
    n, most = extent % 14 + 1, workers % 5
    k, s, d = kernel % 7 + 1, stride % 4 + 1, dilation % 3 + 1
    return k, s, d, n, (before % 4, behind % 4), cuts[:most], cuts[4 : 4 + most]


def lengths(cuts: list[int], extent: int) -> list[int]:
    """Blocks between the cuts; of cuts that are alike, empty ones."""
    ends = [0, *sorted(cut % (extent + 1) for cut in cuts), extent]
    return [stop - start for start, stop in itertools.pairwise(ends)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("examples", [220, pytest.param(2200, marks=pytest.mark.every_case)])
def test_arbitrary_splits_of_inputs_and_outputs(examples):
    """Empty blocks included. The cells come through the plan from the blocks in which they lie."""
    seen = set()

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=16 * BYTES, max_size=16 * BYTES))
    def check(numbers):
        for at in range(0, len(numbers), BYTES):
            k, s, d, n, widths, cuts, out_cuts = decoded(numbers[at : at + BYTES])
            count = sliding_extent(n, k, s, widths, d)
            blocks, outputs = runs(lengths(cuts, n)), runs(lengths(out_cuts, count))
            case = (k, s, d, n, widths, blocks, outputs)
            if count == 0 or case in seen:
                continue
            x = cells(n)
            expected = convolve(functional.pad(x, widths), k, s, d)
            assert torch.equal(piece_by_piece(x, blocks, outputs, k, s, d, widths[0]), expected), case
            seen.add(case)

    check()
    assert len(seen) >= 9 * examples, len(seen)


@functools.cache
def line_of(workers):
    return Partition(Silent(0, workers)).reshape(workers)


def piece_by_piece(x, blocks, outputs, k, s, d, before):
    line = line_of(len(blocks))
    owned = Layout.of(line, [blocks])
    needed = Layout.of(line, [[sliding(run, k, s, before, d) for run in outputs]])
    windows = [torch.zeros(stop - start, dtype=x.dtype) for start, stop in needed.intervals[0]]
    for move in copy(owned, needed).moves:
        ((start, stop),), ((first, last),), (origin, end) = move.src, move.dst, blocks[move.source]
        assert origin + stop <= end
        windows[move.target][first:last] += x[origin + start : origin + stop]
    return torch.cat([convolve(window, k, s, d) for window in windows if len(window)])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_the_padding_that_keeps_the_extent():
    for k, d, n in itertools.product(range(1, 8), range(1, 4), range(1, 9)):
        ((before, behind),) = Sliding.of("C", 1, k, 1, 0, d).same("C").widths
        expected = functional.conv1d(cells(n).view(1, 1, n), torch.ones(1, 1, k).double(), padding="same", dilation=d)
        assert torch.equal(convolve_ones(functional.pad(cells(n), (before, behind)), k, d), expected.view(-1))
    with pytest.raises(ValueError, match="C needs stride 1 for padding 'same'; got"):
        Sliding.of("C", 2, 3, (1, 2), 0, 1).same("C")


def convolve_ones(x, k, d):
    return functional.conv1d(x.view(1, 1, -1), torch.ones(1, 1, k).double(), dilation=d).view(-1)


def test_runs_of_channels_in_groups():
    """Every run of output channels reads the groups that it touches, and is cut into what torch convolves at once."""
    for groups, inputs, produced in itertools.product(range(1, 5), range(1, 4), range(1, 4)):
        channels = Channels(groups * inputs, groups * produced, groups)
        whole = torch.nn.Conv1d(groups * inputs, groups * produced, 1, groups=groups, bias=False, dtype=torch.float64)
        x = torch.arange(1.0, groups * inputs + 1, dtype=torch.float64).view(1, -1, 1)
        expected = whole(x)
        for run in itertools.combinations(range(groups * produced + 1), 2):
            parts = channels.pieces(run)
            assert len(parts) <= 3 and [part[0] for part in parts] == [run[0], *(part[1] for part in parts[:-1])]
            assert channels.read_by(run) == (channels.read_by(parts[0])[0], channels.read_by(parts[-1])[1])
            for first, stop in parts:
                start, last = channels.read_by((first, stop))
                y = functional.conv1d(x[:, start:last], whole.weight[first:stop], groups=(last - start) // inputs)
                assert torch.equal(y, expected[:, first:stop])
    channels = Channels(4, 4, 2)
    assert channels.read_by((3, 3)) == (2, 2) and channels.pieces((3, 3)) == []
