"""Interpolation as an operation: what all workers compute together is torch's function, and its matrix."""

import pytest
import torch
from ops import Case, assert_computes, balanced_over, matrices
from torch.nn import functional

from distdl.geometry.boxes import runs
from distdl.ops.interpolation import Interpolation
from distdl.ops.resampling import Mode
from distdl.partition import Layout


def line(P):
    return P[1:].reshape(1, 1, 4)


def on_lines(sequential, *options, size=None):
    """Three blocks of a line, one of them a single cell, and one worker without cells. Worker 0 has no part."""
    return Case(
        5,
        Interpolation(Mode.of("Op", 1, *options), size),
        line,
        lambda P: [Layout.of(line(P), [runs([1]), runs([2]), runs([3, 0, 5, 1])])],
        sequential,
    )


CASES = {
    "linear": on_lines(lambda x: functional.interpolate(x, scale_factor=1.5, mode="linear"), "linear", False, 1.5),
    "corners": on_lines(
        lambda x: functional.interpolate(x, 13, mode="linear", align_corners=True),
        "linear",
        True,
        None,
        size=(1, 2, 13),
    ),
    "nearest": on_lines(lambda x: functional.interpolate(x, scale_factor=3.0), "nearest", False, 3.0),
    "fewer than workers": on_lines(lambda x: functional.interpolate(x, 2), "nearest", False, None, size=(1, 2, 2)),
    "as it is": on_lines(lambda x: x * 1, "linear", False, None, size=(1, 2, 9)),
    "cubic": Case(
        4,
        Interpolation(Mode.of("Op", 2, "bicubic", False, 1.7)),
        lambda P: P.reshape(1, 1, 2, 2),
        lambda P: [balanced_over(1, 1, 4, 5)(P.reshape(1, 1, 2, 2))],
        lambda x: functional.interpolate(x, scale_factor=1.7, mode="bicubic"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_interpolation_is_torchs(name):
    assert_computes(CASES[name])
    ours, theirs = matrices(CASES[name])
    assert torch.allclose(ours, theirs, rtol=1e-13, atol=1e-15)
