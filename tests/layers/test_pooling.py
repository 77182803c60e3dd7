import copy
import itertools
import threading
from functools import partial

import pytest
import torch
from helpers_layers import every_worker_raises, gathered, noise, on_workers, penalty, share

import distdl
from distdl.geometry.boxes import runs
from distdl.nn import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedLPPool1d,
    DistributedLPPool2d,
    DistributedLPPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from distdl.nn.pooling import sliding
from distdl.partition.layout import Layout
from distdl.testing import Counting, assert_matches_sequential

GEOMETRIES = [
    (k, s, p, d) for k, s, p, d in itertools.product((1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2)) if 2 * p <= k
]


@pytest.mark.parametrize("of", [2, pytest.param(1, marks=pytest.mark.every_case)])
@pytest.mark.parametrize(("number", "workers"), list(enumerate([1, 2, 3, 4, 6])))
def test_every_geometry(number, workers, of):
    def main(P):
        line = P.reshape(1, 1, workers)
        for k, s, p, d in share(GEOMETRIES, number, of):
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


@pytest.mark.parametrize(
    "make", [DistributedMaxPool1d, DistributedAvgPool1d, lambda P, *given: DistributedLPPool1d(P, 2, *given)]
)
def test_a_process_warns_once_of_a_stride_that_is_not_given(make, monkeypatch):
    monkeypatch.setattr(sliding, "_untold", threading.Lock())

    def main(P):
        line = P.reshape(1, 1, 3)
        for given in ((1,), (2, 1), (2, None), (2,), (2,)):
            make(line, *given)

    with pytest.warns(UserWarning, match="has stride 1 .* as published; torch's layer then has the size") as told:
        on_workers(3, main)
    assert [one.filename for one in told] == [__file__]


CEILED = [(k, s, p) for k, s, p in itertools.product((2, 3, 5), (2, 3, 4), (0, 1, 2)) if 2 * p <= k]


@pytest.mark.parametrize(("workers", "sizes"), [(1, [11]), (3, [4, 4, 3]), (4, [1, 0, 9, 1]), (6, [0, 0, 0, 0, 0, 11])])
def test_ceil_mode_and_the_divisors_of_an_average(workers, sizes):
    def main(P):
        line, blocks = P.reshape(1, 1, workers), [runs([2]), runs([1]), runs(sizes)]
        for number, (k, s, p) in enumerate(CEILED):
            options = {"ceil_mode": number % 3 > 0, "count_include_pad": number % 2 > 0}
            x = noise(2, 1, 11) - 5
            layer, reference = DistributedAvgPool1d(line, k, s, p, **options), torch.nn.AvgPool1d(k, s, p, **options)
            assert_matches_sequential(layer, reference, x, blocks)
            layer = DistributedMaxPool1d(line, k, s, p, 1 + number % 2, ceil_mode=True)
            assert_matches_sequential(layer, torch.nn.MaxPool1d(k, s, p, 1 + number % 2, ceil_mode=True), x, blocks)
            if p == 0:
                layer, reference = DistributedLPPool1d(line, 3, k, s, True), torch.nn.LPPool1d(3, k, s, True)
                assert_matches_sequential(layer, reference, x.abs(), blocks)

    on_workers(workers, main)


def test_every_option_in_two_and_three_dims():
    def main(P):
        plane, cube = P[:4].reshape(1, 1, 2, 2), P[1:].reshape(1, 2, 1, 1, 2)
        blocks = [
            [runs([1]), runs([2]), runs([1, 6]), runs([7, 2])],
            [runs([1]), runs([1, 2]), runs([5]), runs([4]), runs([0, 6])],
        ]
        x, z = noise(1, 2, 7, 9), noise(1, 3, 5, 4, 6)
        for ceil, include, divisor in [(False, True, None), (True, True, None), (True, False, None), (True, False, 5)]:
            options = {"ceil_mode": ceil, "count_include_pad": include, "divisor_override": divisor}
            geometry = ((3, 4), (2, 3), (1, 2))
            assert_matches_sequential(
                DistributedAvgPool2d(plane, *geometry, **options),
                torch.nn.AvgPool2d(*geometry, **options),
                x,
                blocks[0],
            )
            geometry = ((3, 2, 4), (2, 1, 3), (1, 0, 2))
            assert_matches_sequential(
                DistributedAvgPool3d(cube, *geometry, **options), torch.nn.AvgPool3d(*geometry, **options), z, blocks[1]
            )
        for norm in (1.0, 2, 3.5, float("inf"), -float("inf")):
            assert_matches_sequential(
                DistributedLPPool2d(plane, norm, (3, 2), 2, True),
                torch.nn.LPPool2d(norm, (3, 2), 2, True),
                x.abs(),
                blocks[0],
            )
            assert_matches_sequential(
                DistributedLPPool3d(cube, norm, 2, None), torch.nn.LPPool3d(norm, 2), z.abs(), blocks[1]
            )

    on_workers(5, main)


def test_a_window_of_fewer_cells_than_the_kernel_s():
    """torch's average in 3-d takes none, whatever the padding."""

    def main(P):
        layer = DistributedAvgPool3d(P.reshape(1, 1, 1, 2, 2), (2, 4, 3), (3, 2, 2), (1, 2, 1))
        reference = torch.nn.AvgPool3d((2, 4, 3), (3, 2, 2), (1, 2, 1))
        assert_matches_sequential(layer, reference, noise(1, 2, 2, 4, 5))

    on_workers(4, main)


def test_the_divisor_can_be_chosen_in_one_dim_too():
    def main(P):
        y = DistributedAvgPool1d(P.reshape(1, 1, 2), 2, divisor_override=4)(torch.ones(1, 1, 2))
        assert y.flatten().tolist() == [0.5, 0.5][: 2 - P.rank]

    on_workers(2, main)


def test_indices_are_those_of_the_flattened_global_space():
    def main(P):
        for grid, x, k, s, p, d in [
            (P.reshape(1, 1, 4), noise(2, 3, 13), 3, 2, 1, 2),
            (P.reshape(1, 1, 2, 2), noise(2, 1, 9, 7), (3, 2), (2, 1), (1, 0), (1, 2)),
            (P.reshape(2, 1, 1, 2, 1), noise(3, 1, 4, 6, 5), 3, 2, 1, 1),
        ]:
            name = f"MaxPool{x.dim() - 2}d"
            layer = getattr(distdl.nn, "Distributed" + name)(grid, k, s, p, d, ceil_mode=True, return_indices=True)
            expected, places = getattr(torch.nn, name)(k, s, p, d, return_indices=True, ceil_mode=True)(x)
            y, indices = layer(Layout.balanced(grid, x.shape).block(x))
            computed = Layout.balanced(grid, expected.shape)
            assert torch.equal(gathered(P, computed, y), expected)
            assert torch.equal(gathered(P, computed, indices), places) and indices.dtype == torch.int64

    on_workers(4, main)


@pytest.mark.parametrize("nothing", [float("-inf"), float("nan"), 1.0])
def test_among_equal_cells_torch_s_own_gets_the_gradient(nothing):
    """Of cells of minus infinity too: padding is none. A NaN wins, as in torch, and gets the gradient."""

    def main(P):
        reference = torch.nn.MaxPool2d(3, 2, 1, ceil_mode=True)
        for ties in range(3):
            x = torch.randint(0, 3, (1, 1, 7, 8), generator=torch.Generator().manual_seed(ties)).double()
            x[x == 1] = nothing
            x[..., 2:6, 3:] = nothing
            whole = x.clone().requires_grad_()
            reference(whole).sum().backward()
            blocks = [runs([1]), runs([1]), runs([3, 4]), runs([5, 3])]
            owned = Layout.of(P.reshape(1, 1, 2, 2), blocks)
            part = owned.block(x).clone().requires_grad_()
            DistributedMaxPool2d(owned.partition, 3, 2, 1, ceil_mode=True)(part).sum().backward()
            assert torch.equal(part.grad, owned.block(whole.grad))

    on_workers(4, main)


def test_a_window_of_padding_alone_is_minus_infinity_and_gives_no_gradient():
    def main(P):
        x = torch.ones(1, 1, 1, 1 - P.rank, dtype=torch.float64, requires_grad=True)
        y, indices = DistributedMaxPool2d(P.reshape(1, 1, 1, 2), 2, 1, 1, 2, return_indices=True)(x)
        y.sum().backward()
        assert y.flatten().tolist() == [float("-inf")][P.rank :] and not x.grad.any()
        assert indices.flatten().tolist() == [2][P.rank :]  # as torch has it: no cell

    on_workers(2, main)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bfloat16, torch.float16])
def test_dtypes_that_torch_pools(dtype):
    def main(P):
        line = P.reshape(1, 1, 1, 3)
        x = (noise(1, 1, 4, 9) * 20 + 60).to(dtype)
        block = Layout.balanced(line, x.shape).block(x)
        layers = [(DistributedMaxPool2d(line, 3, 2, 1, ceil_mode=True), torch.nn.MaxPool2d(3, 2, 1, ceil_mode=True))]
        if dtype not in (torch.int32, torch.uint8):
            options = {"ceil_mode": True, "count_include_pad": False}
            layers.append((DistributedAvgPool2d(line, 3, 2, 1, **options), torch.nn.AvgPool2d(3, 2, 1, **options)))
        for layer, reference in layers:
            expected = reference(x)
            y = layer(block)
            assert y.dtype == dtype and torch.equal(y, Layout.balanced(line, expected.shape).block(expected))

    on_workers(3, main)


def test_an_empty_block_of_the_default_dtype_takes_that_of_the_others():
    def main(P):
        x = torch.ones(1, 1, 4).double() if P.rank == 0 else torch.ones(1, 1, 0)
        y = DistributedAvgPool1d(P.reshape(1, 1, 2), 3)(x.requires_grad_())
        y.sum().backward()
        assert y.dtype == torch.float64 and y.shape == (1, 1, 1) and x.grad.dtype == x.dtype

    on_workers(2, main)


def test_windows_that_are_the_blocks_send_nothing():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        grid = team.reshape(1, 1, 2, 2)
        for layer in (
            DistributedMaxPool2d(grid, 2, 2),
            DistributedAvgPool2d(grid, 2, 2),
            DistributedLPPool2d(grid, 2, 2, None),
            DistributedMaxPool2d(grid, 2, None, ceil_mode=True),
        ):
            x = torch.rand(1, 1, 4, 4, requires_grad=True)
            layer(x)
            team.comm.reset()
            layer(x).sum().backward()
            assert [name for name, _ in team.comm.log] == ["all_max"], layer

    on_workers(4, main)


SMOOTH = {
    "max": (partial(DistributedMaxPool1d, kernel_size=3, stride=3), torch.nn.MaxPool1d(3)),
    "average": (
        partial(DistributedAvgPool1d, kernel_size=3, stride=2, padding=1, count_include_pad=False),
        torch.nn.AvgPool1d(3, 2, 1, count_include_pad=False),
    ),
    "lp": (partial(DistributedLPPool1d, norm_type=3, kernel_size=3, stride=2), torch.nn.LPPool1d(3, 3, 2)),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_double_backward_checkpoints_and_copies_with_idle_and_empty_workers(name):
    make, reference = SMOOTH[name]

    def main(P):
        layer = copy.deepcopy(torch.nn.Sequential(make(P[1:].reshape(1, 1, 4)), torch.nn.Identity()).double())
        whole = (noise(2, 1, 9).abs() + 1).requires_grad_()

        def checkpointed(x):
            return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

        penalty(reference, whole, 3).backward()
        owned = Layout.of(P[1:].reshape(1, 1, 4), [runs([2]), runs([1]), runs([3, 0, 5, 1])])
        for network in (layer, checkpointed):
            x = owned.block(whole.detach()).clone() if P.rank else torch.zeros(2, 0, dtype=torch.float64)
            x.requires_grad_()
            penalty(network, x, 3).backward()
            assert x.grad.shape == x.shape
            assert not P.rank or torch.allclose(x.grad, owned.block(whole.grad), rtol=1e-10)

    on_workers(5, main)


def test_requires_grad_may_differ_between_workers_and_calls():
    def main(P):
        layer = DistributedMaxPool1d(P.reshape(1, 1, 3), 3)
        for asks in ({0}, {2}, set(), {0, 1, 2}):
            x = torch.arange(3.0).reshape(1, 1, 3).requires_grad_(P.rank in asks)
            y = layer(x)
            if asks:
                y.sum().backward()
            assert (x.grad is not None) == (P.rank in asks)

    on_workers(3, main)


def test_autocast_gives_what_it_gives_sequentially():
    def main(P):
        for space in (2, 3):
            x = noise(1, 1, 5, 5, 5)[(slice(None),) * 2 + (slice(None),) * space + (0,) * (3 - space)].bfloat16().abs()
            grid = P.reshape(1, 1, 2, *[1] * (space - 1))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for name, options in [
                    ("MaxPool", (2, 1)), ("AvgPool", (3, 2, 1, True, False)), ("LPPool", (2, 3, 2, True))
                ]:  # fmt: skip
                    reference = getattr(torch.nn, f"{name}{space}d")(*options)
                    layer = getattr(distdl.nn, f"Distributed{name}{space}d")
                    if name == "AvgPool":
                        layer = partial(layer, ceil_mode=True, count_include_pad=False)
                        options = options[:3]
                    expected = reference(x)
                    part = Layout.balanced(grid, x.shape).block(x).clone().requires_grad_()
                    y = layer(grid, *options)(part)
                    assert y.dtype == expected.dtype
                    assert torch.equal(y, Layout.balanced(grid, expected.shape).block(expected))
                    y.float().sum().backward()
                    assert part.grad.dtype == torch.bfloat16

    on_workers(2, main)


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedAvgPool2d(P.reshape(1, 1, 1, 2), 2, dilation=2), "has no dilation; got 2"),
    (lambda P: DistributedMaxPool2d(P.reshape(1, 1, 1, 2), 2, padding=2), "at most half the kernel"),
    (lambda P: DistributedMaxPool2d(P.reshape(1, 1, 1, 2), 3, padding=2, dilation=2), "at most half the kernel"),
    (lambda P: DistributedAvgPool2d(P.reshape(1, 1, 1, 2), 2, divisor_override=0), "divisor_override to be a whole n"),
    (lambda P: DistributedAvgPool2d(P.reshape(1, 1, 1, 2), 2, divisor_override=2.5), "whole number or None; got 2.5"),
    (lambda P: DistributedLPPool2d(P.reshape(1, 1, 1, 2), 0, 2), "norm_type to be a number other than 0; got 0"),
    (lambda P: DistributedLPPool1d(P.reshape(1, 1, 2), "2", 2), "norm_type to be a number; got '2'"),
    (lambda P: DistributedMaxPool2d(P.reshape(1, 1, 2), 2), "batch x channels x 2 dims of space"),
    (lambda P: DistributedMaxPool2d(P.reshape(1, 1, 1, 2), 0), "kernel_size to be one whole number"),
    (lambda P: DistributedMaxPool1d(P.reshape(1, 1, 2), 5)(torch.ones(1, 1, 2)), "the kernel spans 5 cells"),
    (lambda P: DistributedMaxPool1d(P.reshape(1, 1, 2), 2)(torch.ones(1, 2)), "3 dims on all workers"),
    (lambda P: DistributedMaxPool1d(P.reshape(1, 1, 2), 2, 1, 1)(torch.ones(1, 1, 0)), "an input that is not empty"),
    (lambda P: DistributedAvgPool1d(P.reshape(1, 1, 2), 2)(torch.ones(1, 1, 2).int()), "torch.int32"),
    (lambda P: DistributedMaxPool1d(P.reshape(1, 1, 2), 2)(torch.ones(1, 1, 2 * P.rank).bool()), "got torch.bool"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(2, make, (ValueError, TypeError))


def test_channels_last_is_kept():
    def main(P):
        layer = DistributedMaxPool2d(P.reshape(1, 1, 2, 1), 3, 1, 1)
        x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
        y = layer(x)
        y.backward(torch.ones_like(y))
        for tensor in (y, x.grad):
            assert tensor.is_contiguous(memory_format=torch.channels_last)

    on_workers(2, main)


def test_a_maximum_saves_places_and_no_cells():
    def main(P):
        saved = []

        def pack(tensor):
            saved.append(tensor)
            return tensor

        x = noise(2, 3, 8, 8).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            distdl.nn.DistributedMaxPool2d(P.reshape(1, 1, 2, 1), 3, 2, 1)(x)
        assert [tensor.dtype for tensor in saved if tensor.numel()] == [torch.int64]

    on_workers(2, main)
