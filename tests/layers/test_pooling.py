import itertools

import pytest
import torch
from helpers_layers import every_worker_raises, noise, on_workers

from distdl.boxes import runs
from distdl.nn import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from distdl.testing import assert_matches_sequential

GEOMETRIES = [
    (k, s, p, d) for k, s, p, d in itertools.product((1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2)) if 2 * p <= k
]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
def test_every_geometry(workers):
    def main(P):
        line = P.reshape(1, 1, workers)
        for k, s, p, d in GEOMETRIES:
            x = noise(2, 2, 11) - 5  # all below zero: zeros at the border would win
            assert_matches_sequential(DistributedMaxPool1d(line, k, s, p, d), torch.nn.MaxPool1d(k, s, p, d), x)
            if d == 1:
                assert_matches_sequential(DistributedAvgPool1d(line, k, s, p), torch.nn.AvgPool1d(k, s, p), x)

    on_workers(workers, main)


@pytest.mark.parametrize("sizes", [[1, 0, 9, 1], [0, 0, 0, 11], [11, 0, 0, 0]])
def test_uneven_and_empty_blocks(sizes):
    def main(P):
        blocks = [runs([2]), runs([2]), runs(sizes)]
        for k, s, p, d in GEOMETRIES:
            layer, reference = DistributedMaxPool1d(P.reshape(1, 1, 4), k, s, p, d), torch.nn.MaxPool1d(k, s, p, d)
            assert_matches_sequential(layer, reference, noise(2, 2, 11), blocks)

    on_workers(4, main)


def test_all_dims_may_be_split_and_workers_left_out():
    def main(P):
        grid = P[:4].reshape(2, 2, 1, 1)
        x = noise(3, 3, 6, 5)
        assert_matches_sequential(
            DistributedMaxPool2d(grid, (2, 3), (2, 1), (1, 0)), torch.nn.MaxPool2d((2, 3), (2, 1), (1, 0)), x
        )
        assert_matches_sequential(DistributedAvgPool2d(grid, 2, 2), torch.nn.AvgPool2d(2), x)
        cube = P[1:].reshape(1, 1, 2, 1, 2)
        x = noise(1, 2, 5, 4, 6)
        assert_matches_sequential(DistributedMaxPool3d(cube, 2, 2), torch.nn.MaxPool3d(2), x)
        assert_matches_sequential(DistributedAvgPool3d(cube, 3, padding=1), torch.nn.AvgPool3d(3, 1, 1), x)

    on_workers(5, main)


def test_the_stride_is_one_by_default():
    def main(P):
        assert DistributedMaxPool2d(P.reshape(1, 1, 1, 1), 2)(torch.ones(1, 1, 4, 4)).shape == (1, 1, 3, 3)

    on_workers(1, main)


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedAvgPool2d(P.reshape(1, 1, 1, 2), 2, dilation=2), "has no dilation; got 2"),
    (lambda P: DistributedMaxPool2d(P.reshape(1, 1, 1, 2), 2, padding=2), "at most half the kernel"),
    (lambda P: DistributedMaxPool2d(P.reshape(1, 1, 2), 2), "batch x channels x 2 dims of space"),
    (lambda P: DistributedMaxPool2d(P.reshape(1, 1, 1, 2), 0), "kernel_size to be one whole number"),
    (lambda P: DistributedMaxPool1d(P.reshape(1, 1, 2), 5)(torch.ones(1, 1, 2)), "the kernel spans 5 cells"),
    (lambda P: DistributedMaxPool1d(P.reshape(1, 1, 2), 2)(torch.ones(1, 2)), "3 dims on all workers"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(2, make)
