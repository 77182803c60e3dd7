"""Pooling as an operation: what all workers compute together is torch's function, and for averages its matrix."""

import pytest
import torch
from ops import Case, assert_computes, balanced_over, matrices, signature, site, together
from torch.nn import functional

from distdl.geometry.boxes import runs
from distdl.geometry.windows import PoolSliding
from distdl.ops.adaptive_pooling import AdaptiveAverage, AdaptiveMaximum
from distdl.ops.pooling import Average, Maximum, Pooling, Power
from distdl.partition import Layout


def line(P):
    return P[1:].reshape(1, 1, 4)


def uneven(P):
    """Three blocks of a line, one of them a single cell, and one worker without cells. Worker 0 has no part."""
    return [Layout.of(line(P), [runs([1]), runs([2]), runs([3, 0, 5, 1])])]


def plane(P):
    return P.reshape(2, 1, 1, 2)


def sliding(kernel, stride, padding=0, dilation=1, ceil_mode=False, space=1):
    return PoolSliding(*[(n,) * space for n in (kernel, stride, padding, dilation)], ceil_mode=ceil_mode)


def on_lines(op, sequential):
    return Case(5, op, line, uneven, sequential)


def on_planes(op, sequential):
    return Case(4, op, plane, lambda P: [balanced_over(3, 1, 4, 7)(plane(P))], sequential)


LINEAR = {
    "mean": on_lines(Pooling(Average(), sliding(3, 2, 1)), lambda x: functional.avg_pool1d(x, 3, 2, 1)),
    "mean of cells": on_lines(
        Pooling(Average(padded=False), sliding(4, 3, 2, ceil_mode=True)),
        lambda x: functional.avg_pool1d(x, 4, 3, 2, ceil_mode=True, count_include_pad=False),
    ),
    "sum over 7": on_planes(
        Pooling(Average(divisor=7), sliding(3, 2, 1, space=2)),
        lambda x: functional.avg_pool2d(x, 3, 2, 1, divisor_override=7),
    ),
    "to three": on_lines(AdaptiveAverage((3,)), lambda x: functional.adaptive_avg_pool1d(x, 3)),
    "to more": on_lines(AdaptiveAverage((13,)), lambda x: functional.adaptive_avg_pool1d(x, 13)),
    "to one": on_planes(AdaptiveAverage((None, 1)), lambda x: functional.adaptive_avg_pool2d(x, (None, 1))),
}
OTHERS = {
    "largest": on_lines(Pooling(Maximum(), sliding(2, 1, 1, 3)), lambda x: functional.max_pool1d(x, 2, 1, 1, 3)),
    "power mean": on_lines(Pooling(Power(2.0), sliding(3, 1)), lambda x: functional.lp_pool1d(x, 2.0, 3, 1)),
    "smallest": on_lines(
        Pooling(Power(float("-inf")), sliding(2, 2)), lambda x: -functional.max_pool1d(-x.abs(), 2, 2)
    ),
    "adaptive largest": on_lines(AdaptiveMaximum((4,)), lambda x: functional.adaptive_max_pool1d(x, 4)),
    "nothing to choose": on_lines(AdaptiveMaximum((None,)), lambda x: x * 1),
}
INDICES = {
    "sliding": on_planes(
        Pooling(Maximum(True), sliding(3, 2, 1, ceil_mode=True, space=2)),
        lambda x: functional.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True),
    ),
    "adaptive": on_planes(
        AdaptiveMaximum((3, 4), True), lambda x: functional.adaptive_max_pool2d(x, (3, 4), return_indices=True)
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_averages_are_torchs_and_so_are_their_matrices(name):
    assert_computes(LINEAR[name])
    ours, theirs = matrices(LINEAR[name])
    assert torch.allclose(ours, theirs, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_largest_is_torchs(name):
    assert_computes(OTHERS[name])


@pytest.mark.parametrize("name", INDICES)
def test_where_the_largest_stand(name):
    case = INDICES[name]
    whole = torch.randn(3, 1, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).round()
    expected = case.sequential(whole)

    def main(P):
        setup, (layout,) = case.set_up(P, [whole], False)
        found = setup.move_out(setup.local(*setup.move_in(layout.block(whole))))
        for one, result, theirs in zip(found, setup.results, expected, strict=True):
            assert torch.equal(one, result.block(theirs))

    together(4, main)


def test_a_setup_is_pure():
    """It sends nothing, and one worker alone can make it: also that of another worker's place."""

    def main(P):
        (layout,) = uneven(P)
        if P.rank == 2:
            return Pooling(Maximum(), sliding(3, 1)).setup(site(line(P)), signature(layout)).results[0].intervals[2]
        return None

    assert together(5, main)[2] == ((0, 2), (2, 4), (4, 6), (6, 7))


@pytest.mark.parametrize(("op", "words"), [
    (Pooling(Average(), sliding(12, 1)), "Op needs an input that is not empty, and at least as large as its window"),
    (AdaptiveAverage((3,)), "Op needs an input that is not empty in space; its shape is 1x2x0"),
    (AdaptiveMaximum((3,)), "Op needs an input that is not empty in space; its shape is 1x2x0"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_for_every_worker(op, words):
    empty = [0] * 4 if isinstance(op, (AdaptiveAverage, AdaptiveMaximum)) else [3, 0, 5, 1]

    def main(P):
        layout = Layout.of(line(P), [runs([1]), runs([2]), runs(empty)])
        with pytest.raises(ValueError) as error:
            op.setup(site(line(P)), signature(layout))
        return str(error.value)

    texts = together(5, main)
    assert words in texts[0] and len(set(texts)) == 1
