"""Interpolation in one dim, piece by piece and without workers, against torch's operator on the whole.

The input is the identity matrix, one row a sample, so that a result is the matrix of the map: equal matrices have equal
indices, weights and adjoints.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from distdl.geometry.boxes import balanced
from distdl.geometry.windows import reading
from distdl.ops.resampling import Resampler, Resampling
from distdl.ops.weighing import Weighing

# (kind, align_corners, whether the line is an image of height 1, torch's name of the mode)
KINDS = [
    ("nearest", False, False, "nearest"),
    ("nearest", False, True, "nearest"),
    ("nearest-exact", False, False, "nearest-exact"),
    ("nearest-exact", False, True, "nearest-exact"),
    ("linear", False, False, "linear"),
    ("linear", True, False, "linear"),
    ("cubic", False, True, "bicubic"),
    ("cubic", True, True, "bicubic"),
]
FACTORS = (0.1, 0.3, 1 / 3, 0.5, 2 / 3, 0.95, 1.0, 1.05, 1.5, 1.99999, 2.0, 2.0000001, 2.05, 2.3, 3.0000001, math.pi, 4)
SMALL = 128  # torch has another kernel for images whose height plus width is at most this


def by_torch(mode, corners, flat, n, size, factor, dtype):
    x = torch.eye(n, dtype=dtype).reshape(n, 1, 1, n) if flat else torch.eye(n, dtype=dtype).reshape(n, 1, n)
    options = {"size": (1, size) if flat else size} if factor is None else {"scale_factor": (1, factor)[not flat :]}
    if "nearest" not in mode:
        options["align_corners"] = corners
    return functional.interpolate(x, mode=mode, **options).reshape(n, -1)


def line(case, n, size, factor, dtype=torch.float64):
    """torch's matrix of the map, inputs x outputs, and our geometry of it."""
    kind, corners, flat, mode = case
    expected = by_torch(mode, corners, flat, n, size, factor, dtype)
    m = expected.shape[1]
    return expected, Resampling(kind, n, m, factor, corners, dtype is torch.float64, flat and 1 + m <= SMALL)


def check(case, n, size, factor, splits, dtype=torch.float64):
    """Each piece, computed from its window alone, has torch's bits. Returns the number of pieces."""
    expected, one = line(case, n, size, factor, dtype)
    x, samples, checked = torch.eye(n, dtype=dtype), Resampling("linear", n, n), 0
    for split in splits:
        runs = split(expected.shape[1])
        for run, window in zip(runs, reading(runs, one.ends), strict=True):
            y = Resampler([samples, one], ((0, n), window), ((0, n), run))(x[:, slice(*window)])
            piece = expected[:, slice(*run)]
            if case[0] == "cubic":  # four products may be added in another order
                assert torch.allclose(y, piece, rtol=0, atol={torch.float64: 2e-15, torch.float32: 2e-6}[dtype])
            elif case[:2] == ("linear", False) and dtype is torch.float32 and torch.__version__ >= "2.15":
                # (some of its kernels round a product before they add to it: a place among n cells, to n * 2^-24)
                assert torch.allclose(y, piece, rtol=0, atol=n * 2**-23), (case, n, size, factor, run, window)
            else:
                assert torch.equal(y, piece), (case, n, size, factor, run, window)
            checked += 1
    return checked


def check_windows(case, n, size, factor, runs):
    """Each window has all that torch reads, and begins and ends with a cell that an output reads."""
    expected, one = line(case, n, size, factor)
    read = expected.numpy() != 0
    for run, (start, stop) in zip(runs, reading(runs, one.ends), strict=True):
        if run[0] == run[1]:
            assert start == stop
            continue
        cells = [cells for cells, _ in one.taps(np.arange(*run))]
        assert (min(map(np.min, cells)), max(map(np.max, cells)) + 1) == (start, stop) and 0 <= start < stop <= n
        assert not read[:start, slice(*run)].any() and not read[stop:, slice(*run)].any()


def evenly(workers):
    return lambda m: balanced(m, workers)


@pytest.mark.parametrize("workers", [(2, 5), pytest.param((1, 2, 3, 4, 5), marks=pytest.mark.every_case)], ids=len)
@pytest.mark.parametrize("case", [case for case in KINDS if not (case[2] and "nearest" in case[0])])
def test_every_length_in_balanced_pieces(case, workers):
    splits = [evenly(one) for one in workers]
    checked = sum(check(case, n, m, None, splits) for n, m in itertools.product(range(1, 15), range(1, 29)))
    assert checked == 14 * 28 * sum(workers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", KINDS)
def test_factors_that_are_not_the_ratio_of_the_extents(case, dtype):
    lengths = (1, 2, 3, 5, 7, 10, 14, 19, 29, 100)
    pairs = [(n, factor) for n, factor in itertools.product(lengths, FACTORS) if int(n * factor)]
    assert sum(check(case, n, None, factor, [evenly(1), evenly(4)], dtype) for n, factor in pairs) > 700


@pytest.mark.parametrize("case", KINDS)
def test_long_ones_in_both_precisions(case):
    for (n, m), dtype in itertools.product([(997, 331), (1000, 1777)], [torch.float64, torch.float32]):
        check(case, n, m, None, [evenly(3)], dtype)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("examples", [300, pytest.param(2500, marks=pytest.mark.every_case)])
def test_any_extents_and_any_split(examples):
    """Each example is a case for each of the 8 kinds; blocks may be empty."""
    drawn = given(
        st.integers(1, 40),
        st.integers(1, 80),
        st.none() | st.sampled_from(FACTORS) | st.floats(0.05, 5),
        st.lists(st.integers(0, 200), max_size=4),
        st.sampled_from(KINDS),
    )
    settings(max_examples=examples, deadline=None, database=None)(drawn(check_any))()


def check_any(n, size, factor, cuts, computed):
    m = size if factor is None else max(int(n * factor), 1)
    if factor is not None and int(n * factor) == 0:
        factor = None
    runs = tuple(itertools.pairwise([0, *sorted(min(cut, m) for cut in cuts), m]))
    size = m if factor is None else None
    for case in KINDS:
        check_windows(case, n, size, factor, runs)
    check(computed, n, size, factor, [lambda _: runs])


def test_runs_without_outputs_read_nothing():
    one = Resampling("linear", 4, 6)
    assert reading([(0, 0), (0, 6), (6, 6)], one.ends) == [(0, 0), (0, 4), (0, 0)]
    assert reading([(2, 2)], one.ends) == [(0, 0)]


def test_a_nearest_doubling_reads_its_own_block_only():
    assert reading(balanced(16, 4), Resampling("nearest", 8, 16).ends) == list(balanced(8, 4))


@pytest.mark.parametrize(
    ("n", "m", "factor"), [(30, 60, None), (32, 48, 1.5), (60, 20, None), (7, 23, 3.3), (40, 37, None)]
)
@pytest.mark.parametrize("kind", ["nearest", "linear", "cubic"])
def test_the_adjoint_is_the_transpose_whatever_runs_there_are(kind, n, m, factor):
    """Each output is in one run of each tap, and regular runs are found where factors are small fractions."""
    one = Resampling(kind, n, m, factor)
    taps = one.taps(np.arange(1, m))
    weighing = Weighing.of(1, n, taps, 2, one.step)
    x, dy = torch.eye(n, dtype=torch.float64), torch.eye(m - 1, dtype=torch.float64)
    matrix = torch.zeros(n, m - 1, dtype=torch.float64)
    for cells, weights in taps:
        matrix[cells, np.arange(m - 1)] += torch.ones(m - 1).double() if weights is None else torch.from_numpy(weights)
    assert torch.allclose(weighing(x), matrix, atol=1e-15)
    assert torch.allclose(weighing.adjoint(dy), matrix.T, atol=1e-15)
    picked = [not isinstance(inputs, tuple) for run in weighing.runs for inputs, _ in run.taps]
    assert all(picked) if n in (7, 40) else not any(picked)
