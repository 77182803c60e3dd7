"""Every primitive over random partitions: overlapping, disjoint, with idle workers and empty blocks."""

import numpy as np
import pytest
from cases import MAKERS
from checks import assert_derivatives, assert_value, my_input

import distdl
from distdl.testing import assert_adjoint


def on_threads(maker, seeds, check, workers):
    def main():
        P = distdl.world()
        for seed in seeds:
            check(MAKERS[maker](P, np.random.default_rng(seed)))
        return len(seeds)

    assert distdl.run_workers(main, workers) == [len(seeds)] * workers


@pytest.mark.parametrize("cases", [12, pytest.param(30, marks=pytest.mark.every_case)])
@pytest.mark.parametrize("workers", [1, 3, 6])
@pytest.mark.parametrize("maker", MAKERS)
def test_value_and_adjoint(maker, workers, cases):
    def check(case):
        assert_value(case)
        assert_adjoint(case.layer, my_input(case))

    on_threads(maker, range(100 * workers, 100 * workers + cases), check, workers)


@pytest.mark.parametrize("maker", MAKERS)
def test_derivatives_of_first_and_second_order_and_tangents(maker):
    on_threads(maker, range(12), assert_derivatives, 4)
