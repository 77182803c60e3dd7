"""Each window against the sequential torch operator, applied piece by piece.

More of convolutions, pooling, transposed convolution and interpolation stands in files of their own beside this one.
"""

import itertools

import pytest
import torch
from torch.nn import functional

from distdl.boxes import balanced
from distdl.windows import Sliding, sliding, sliding_extent

CASES = [
    (k, s, p, d, n)
    for k, s, p, d, n in itertools.product(range(1, 6), range(1, 4), range(4), range(1, 4), range(1, 13))
]


def piece(x, interval):
    """The cells of an interval, zeros beyond the ends of x."""
    start, stop = interval
    n = x.shape[-1]
    inside = x[..., min(max(start, 0), n) : min(max(stop, 0), n)]
    left = min(max(-start, 0), stop - start)
    return functional.pad(inside, (left, stop - start - left - inside.shape[-1]))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_convolution_piece_by_piece(workers):
    checked = 0
    for k, s, p, d, n in CASES:
        x = torch.arange(1.0, n + 1, dtype=torch.float64).reshape(1, 1, n)
        w = torch.arange(1.0, k + 1, dtype=torch.float64).reshape(1, 1, k)
        count = sliding_extent(n, k, s, (p, p), d)
        if count == 0:
            with pytest.raises(RuntimeError):
                functional.conv1d(x, w, stride=s, padding=p, dilation=d)
            continue
        expected = functional.conv1d(x, w, stride=s, padding=p, dilation=d)
        assert expected.shape[-1] == count
        for outputs in balanced(count, workers):
            if outputs[0] < outputs[1]:
                window = piece(x, sliding(outputs, k, s, p, d))
                assert torch.equal(functional.conv1d(window, w, stride=s, dilation=d), expected[..., slice(*outputs)])
                checked += 1
    assert checked > 1700


def test_no_outputs_read_no_inputs():
    start, stop = sliding((3, 3), kernel=5, stride=2, padding=1)
    assert start == stop


def test_options_are_checked():
    assert Sliding.of("C", 2, 3, (1, 2), 0, 1) == Sliding((3, 3), (1, 2), (0, 0), (1, 1))
    for options in [((3,), 1, 0, 1), (0, 1, 0, 1), (3, 0, 0, 1), (3, 1, -1, 1), (3, 1, 0, (1, 0))]:
        with pytest.raises(ValueError, match="C needs"):
            Sliding.of("C", 2, *options)


def test_an_input_smaller_than_the_kernel_is_refused():
    with pytest.raises(ValueError, match="in dim 3 the kernel spans 5 cells and the input, with its padding, 4"):
        Sliding.of("C", 2, (1, 3), 1, 0, (1, 2)).windows("C", (9, 4), (2, 2))
