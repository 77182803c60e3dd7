"""Rules of windows. Each kind against the sequential torch operator, piece by piece, stands in a file of its own."""

import pytest

from distdl.geometry.windows import Sliding, sliding


def test_no_outputs_read_no_inputs():
    start, stop = sliding((3, 3), kernel=5, stride=2, padding=1)
    assert start == stop


def test_options_are_checked():
    assert Sliding.of("C", 2, 3, (1, 2), 0, 1) == Sliding((3, 3), (1, 2), (0, 0), (1, 1))
    for options in [((3,), 1, 0, 1), (0, 1, 0, 1), (3, 0, 0, 1), (3, 1, -1, 1), (3, 1, 0, (1, 0))]:
        with pytest.raises(ValueError, match="C needs"):
            Sliding.of("C", 2, *options)


def test_an_input_smaller_than_the_kernel_is_refused():
    with pytest.raises(ValueError, match="in dim 3 the kernel spans 5 cells and the input has 4, with its padding 4"):
        Sliding.of("C", 2, (1, 3), 1, 0, (1, 2)).windows("C", (9, 4), (2, 2))
