import copy
import itertools

import numpy as np
import pytest
import torch
from helpers_layers import every_worker_raises, filled, noise, on_workers, penalty, take_weights
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.geometry.boxes import balanced, runs
from distdl.nn import (
    DistributedConv2d,
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from distdl.partition.layout import Layout
from distdl.testing import Counting, assert_adjoint, assert_matches_sequential

GEOMETRIES = [
    (k, s, p, d, more)
    for k, s, p, d in itertools.product((1, 2, 3, 4, 7), (1, 2, 3), (0, 1, 3), (1, 2))
    for more in {0, max(s, d) - 1}
]


def line(P, k, s, p, d, more, **options):
    options = {"in_channels": 2, "out_channels": 3, **options}
    return DistributedConvTranspose1d(
        P.reshape(1, 1, P.size), kernel_size=k, stride=s, padding=p, output_padding=more, dilation=d, **options
    ).double()


def reference(k, s, p, d, more, ins=2, outs=3, **options):
    return filled(torch.nn.ConvTranspose1d(ins, outs, k, s, p, more, dilation=d, **options))


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
def test_every_geometry_split_over_space(workers):
    """With 8 cells, kernels reach far beyond the neighbours' blocks."""

    def main(P):
        for number, geometry in enumerate(GEOMETRIES):
            if number % 4 == workers % 4:
                assert_matches_sequential(line(P, *geometry), reference(*geometry), noise(2, 2, 8))

    on_workers(workers, main)


@pytest.mark.parametrize("sizes", [[1, 0, 6, 1], [0, 0, 0, 8], [5, 0, 0, 3], [8, 0, 0, 0], [2, 3, 1, 2]])
def test_uneven_and_empty_blocks(sizes):
    def main(P):
        for geometry in GEOMETRIES[sum(sizes[:2]) :: 11]:
            layer, blocks = line(P, *geometry), [runs([2]), runs([2]), runs(sizes)]
            assert_matches_sequential(layer, reference(*geometry), noise(2, 2, 8), blocks)

    on_workers(4, main)


def test_outputs_that_no_input_reaches_are_the_bias():
    def main(P):
        for geometry in [(1, 4, 0, 1, 3), (1, 3, 1, 1, 2), (2, 4, 0, 3, 0), (3, 1, 0, 3, 2), (2, 1, 1, 3, 2)]:
            for cells in (1, 2, 3):
                for bias in (True, False):
                    layer = line(P, *geometry, bias=bias)
                    assert_matches_sequential(layer, reference(*geometry, bias=bias), noise(2, 2, cells))
        layer = DistributedConvTranspose2d(
            P.reshape(1, 1, 3, 2), in_channels=1, out_channels=2, kernel_size=1, stride=(4, 2), output_padding=(3, 1)
        )
        whole = filled(torch.nn.ConvTranspose2d(1, 2, 1, (4, 2), output_padding=(3, 1)))
        assert_matches_sequential(layer.double(), whole, noise(1, 1, 2, 3))

    on_workers(6, main)


@pytest.mark.parametrize(
    ("workers", "grid"), [(4, (1, 1, 2, 2)), (6, (1, 1, 3, 2)), (6, (1, 1, 1, 6)), (4, (2, 1, 2, 1)), (6, (3, 1, 1, 2))]
)
def test_two_dims_of_space_and_the_batch(workers, grid):
    def main(P):
        layer = DistributedConvTranspose2d(
            P.create_partition_inclusive(range(workers)[::-1]).reshape(*grid),
            in_channels=4,
            out_channels=6,
            kernel_size=(3, 2),
            stride=(1, 2),
            padding=(1, 0),
            output_padding=(0, 1),
            groups=2,
        )
        whole = filled(torch.nn.ConvTranspose2d(4, 6, (3, 2), (1, 2), (1, 0), (0, 1), groups=2))
        assert_matches_sequential(layer.double(), whole, noise(4, 4, 5, 4))
        if grid[0] == 1:
            assert_matches_sequential(layer, whole, noise(0, 4, 5, 4))

    on_workers(workers, main)


def test_three_dims_of_space():
    def main(P):
        layer = DistributedConvTranspose3d(
            P.reshape(1, 1, 2, 1, 2), in_channels=2, out_channels=2, kernel_size=3, stride=2, padding=1, bias=False
        )
        whole = filled(torch.nn.ConvTranspose3d(2, 2, 3, 2, 1, bias=False))
        assert_matches_sequential(layer.double(), whole, noise(1, 2, 5, 3, 4))

    on_workers(4, main)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("out", "inner", "space"), [(2, 2, 1), (1, 3, 1), (3, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 3)]
)
def test_split_over_channels_and_space(out, inner, space, bias):
    """The partitions of input, output and work lie on different workers of the world."""
    world = out * inner * space + 2

    def main(P):
        P_w = P[2:].reshape(out, inner, space)
        P_x = P.create_partition_inclusive(range(inner * space)).reshape(1, inner, space)
        P_y = P.create_partition_inclusive(range(world - out * space, world)[::-1]).reshape(1, out, space)
        for k, s, p, d, more in ((3, 1, 1, 1, 0), (2, 2, 0, 1, 1), (4, 2, 1, 1, 0), (3, 1, 2, 2, 1)):
            layer = DistributedConvTranspose1d(
                P_x, P_y, P_w, in_channels=5, out_channels=3, kernel_size=k, stride=s, padding=p, dilation=d,
                output_padding=more, bias=bias,
            ).double()  # fmt: skip
            whole = reference(k, s, p, d, more, 5, 3, bias=bias)
            assert_matches_sequential(layer, whole, noise(2, 5, 6))
            uneven = [runs([2]), runs([5] + [0] * (inner - 1)), runs([1] * (space - 1) + [7 - space])]
            assert_matches_sequential(layer, whole, noise(2, 5, 6), uneven)

    on_workers(world, main)


CUTS = [  # places along out and in; channels; groups
    (2, 2, 4, 4, 4), (2, 2, 4, 8, 2), (2, 2, 5, 5, 5), (1, 2, 4, 2, 2), (2, 1, 4, 4, 2), (2, 3, 6, 6, 6),
    (3, 2, 2, 2, 2), (4, 1, 6, 4, 2), (4, 2, 2, 8, 2), (2, 3, 9, 4, 1),
]  # fmt: skip


@pytest.mark.parametrize(("p_out", "p_in", "ins", "outs", "groups"), CUTS)
def test_groups_whose_outputs_are_in_one_block_or_cut_evenly(p_out, p_in, ins, outs, groups):
    def main(P):
        for space in (1, 2):
            P_x, P_y, P_w = P[: p_in * space], P[1 : 1 + p_out * space], P[: p_out * p_in * space]
            layer = DistributedConvTranspose1d(
                P_x.reshape(1, p_in, space), P_y.reshape(1, p_out, space), P_w.reshape(p_out, p_in, space),
                in_channels=ins, out_channels=outs, kernel_size=3, stride=2, padding=1, groups=groups,
            ).double()  # fmt: skip
            whole = reference(3, 2, 1, 1, 0, ins, outs, groups=groups)
            assert_matches_sequential(layer, whole, noise(2, ins, 5))
            uneven = [runs([2]), runs([ins - p_in + 1] + [1] * (p_in - 1)), runs([5] + [0] * (space - 1))]
            assert_matches_sequential(layer, whole, noise(2, ins, 5), uneven)

    on_workers(2 * max(p_out * p_in, p_out + 1), main)


def test_the_batch_may_be_split_with_the_channels():
    def main(P):
        P_x, P_w = P[:4].reshape(2, 2, 1), P.reshape(2, 2, 2, 1)
        for groups in (1, 2):
            layer = DistributedConvTranspose1d(
                P_x, P_x, P_w, in_channels=4, out_channels=6, kernel_size=3, stride=2, groups=groups
            ).double()
            assert_matches_sequential(layer, reference(3, 2, 0, 1, 0, 4, 6, groups=groups), noise(3, 4, 5))

    on_workers(8, main)


def test_a_depthwise_layer_split_over_channels_moves_nothing():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        layer = DistributedConvTranspose1d(
            team.reshape(1, 4, 1), in_channels=6, out_channels=6, kernel_size=3, groups=6
        ).double()
        assert_matches_sequential(layer, reference(3, 1, 0, 1, 0, 6, 6, groups=6), noise(2, 6, 5))
        x = torch.ones(1, 2 if P.rank < 2 else 1, 5).double().requires_grad_()
        layer(x)
        team.comm.reset()
        layer(x).sum().backward()
        assert [name for name, _ in team.comm.log] == ["all_max"]

    on_workers(4, main)


def test_it_is_the_adjoint_of_the_convolution_with_the_same_options():
    """<conv x, y> = <x, convT y>, both of them distributed; and so conv's backward is convT's forward."""

    def main(P):
        options = {"kernel_size": (3, 4), "stride": (2, 3), "padding": (1, 2), "dilation": (2, 1), "bias": False}
        grid, wide, slim, work = P.reshape(1, 1, 3, 2), P.reshape(1, 2, 3, 1), P[3:].reshape(1, 1, 3, 1), (3, 1)
        channels = (slim, wide, P.reshape(2, 1, *work)), (wide, slim, P.reshape(1, 2, *work))
        for there, back in (((grid,), (grid,)), channels):
            conv = DistributedConv2d(*there, in_channels=2, out_channels=4, **options).double()
            convt = DistributedConvTranspose2d(
                *back, in_channels=4, out_channels=2, output_padding=1, **options
            ).double()
            for layer in (conv, convt):
                layer.weight.data = layer.parameter_layouts["weight"].block(noise(4, 2, 3, 4)).clone()
            x = Layout.balanced(conv.P_x, (2, 2, 10, 10)).block(noise(2, 2, 10, 10)).clone().requires_grad_()
            y = Layout.balanced(convt.P_x, (2, 4, 4, 4)).block(noise(2, 4, 4, 4, seed=1)).clone()
            forth, home = conv(x), convt(y)
            products = [(forth.detach() * y).sum(), (x.detach() * home.detach().reshape(x.shape)).sum()]
            one, other = P.allreduce_data(torch.stack(products)).tolist()
            assert abs(one - other) < 1e-12 * abs(one)
            (gradient,) = torch.autograd.grad(forth, x, y)
            assert torch.allclose(gradient, home.reshape(x.shape), rtol=1e-12)
            assert_adjoint(convt, y)

    on_workers(6, main)


def test_the_extent_of_the_output_can_be_asked_for():
    def main(P):
        layer, whole = line(P, 3, 3, 1, 1, 0), reference(3, 3, 1, 1, 0)
        take_weights(layer, whole)
        x, mine = noise(2, 2, 5), slice(*balanced(5, 4)[P.rank])
        for size in ([13], [14], torch.Size([15]), (2, 3, 14), np.array([14]), None):
            expected = whole(x, None if size is None else list(size))
            place = slice(*balanced(expected.shape[-1], 4)[P.rank])
            assert torch.allclose(layer(x[..., mine], size), expected[..., place], rtol=1e-12)

    on_workers(4, main)


def test_weights_live_on_the_first_worker_and_elsewhere_have_a_gradient_too():
    def main(P):
        layer = DistributedConvTranspose2d(P.reshape(1, 1, 2, 2), in_channels=2, out_channels=3, kernel_size=2)
        assert layer.weight.shape == ((2, 3, 2, 2) if P.rank == 0 else (0,))
        assert layer.bias.shape == ((3,) if P.rank == 0 else (0,))
        layer(torch.ones(1, 2, 4, 4)).sum().backward()
        assert layer.weight.grad.shape == layer.weight.shape and layer.bias.grad.shape == layer.bias.shape
        if P.rank == 0:
            layer.weight.data = torch.ones(2, 3, 2, 2)
            layer.bias.data = torch.full((3,), 0.5)
        assert layer(torch.ones(1, 2, 4, 4))[0, 0, 0, 1].item() == (4.5 if P.rank < 2 else 8.5)

    on_workers(4, main)


def test_initial_weights_are_those_of_torch_in_range_and_do_not_depend_on_the_partition():
    def main(P):
        options = {"in_channels": 7, "out_channels": 6, "kernel_size": 3}
        torch.manual_seed(3)
        split = DistributedConvTranspose1d(
            P[:2].reshape(1, 2, 1), P[2:].reshape(1, 2, 1), P.reshape(2, 2, 1), **options
        )
        one = DistributedConvTranspose1d(distdl.world().reshape(1, 1, 4), **options)
        assert [layout.extents for layout in split.parameter_layouts.values()] == [(7, 6, 3), (6,)]
        assert one.parameter_layouts["weight"].extents == (7, 6, 3)
        # 126 values, uniform within 1 / sqrt(out * taps): torch takes the fan-in of this tensor
        if P.rank == 0:
            largest = one.weight.abs().max().item()
            assert 0.9 < largest * 18**0.5 <= 1 and one.bias.abs().max().item() * 18**0.5 <= 1

    on_workers(4, main)


def test_a_worker_outside_all_partitions_only_keeps_the_graph_alive():
    def main(P):
        layer = DistributedConvTranspose2d(P[:4].reshape(1, 1, 2, 2), in_channels=1, out_channels=1, kernel_size=3)
        x = torch.ones(2, 1, 3, 3) if P.rank < 4 else torch.zeros(2, 0)
        x.requires_grad_()
        y = torch.nn.Sequential(layer, torch.nn.ReLU())(x)
        y.sum().backward()
        assert y.shape[0] == 2 and x.grad.shape == x.shape and layer.weight.grad is not None
        assert copy.deepcopy(layer)(x).shape == y.shape

    on_workers(5, main)


def test_upsampling_by_two_split_2x2_sends_three_messages_each_way_and_agrees_once():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        layer = DistributedConvTranspose2d(
            team.reshape(1, 1, 2, 2), in_channels=1, out_channels=1, kernel_size=4, stride=2, padding=1
        )
        x = torch.ones(1, 1, 4, 4, requires_grad=True)
        layer(x)
        team.comm.reset()
        y = layer(x)
        assert y.shape == (1, 1, 8, 8)
        assert set(team.comm.sent.values()) == {1} and len(team.comm.sent) == 3 == len(team.comm.received)
        assert [name for name, _ in team.comm.log] == ["all_max", "exchange", "broadcast"]
        team.comm.reset()
        y.sum().backward()
        assert sorted(name for name, _ in team.comm.log) == ["exchange", "sum"]
        assert set(team.comm.sent.values()) == {1} and len(team.comm.sent) == 3

    on_workers(4, main)


def test_a_kernel_no_longer_than_the_stride_needs_no_neighbour():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        layer = DistributedConvTranspose1d(
            team.reshape(1, 1, 4), in_channels=1, out_channels=1, kernel_size=2, stride=2
        )
        layer(torch.ones(1, 1, 3))
        team.comm.reset()
        layer(torch.ones(1, 1, 3))
        assert [name for name, _ in team.comm.log] == ["all_max", "broadcast"]

    on_workers(4, main)


def test_double_backward_and_checkpoint_with_empty_workers():
    def main(P):
        whole_layer, layer = reference(3, 2, 0, 1, 0, 1, 2), line(P, 3, 2, 0, 1, 0, in_channels=1, out_channels=2)
        take_weights(layer, whole_layer)
        whole = noise(2, 1, 7).requires_grad_()

        penalty(whole_layer, whole).backward()
        cells = slice(*runs([3, 0, 3, 1])[P.rank])
        x = whole.detach()[..., cells].clone().requires_grad_()
        penalty(layer, x).backward()
        assert torch.allclose(x.grad, whole.grad[..., cells], rtol=1e-10)
        assert P.rank or torch.allclose(layer.weight.grad, whole_layer.weight.grad, rtol=1e-10)
        plain, again = (layer(x), checkpoint(layer, x, use_reentrant=False))
        dx = [torch.autograd.grad((y**2).sum(), x)[0] for y in (plain, again)]
        assert torch.equal(*dx)

    on_workers(4, main)


def test_autocast_on_all_workers_gives_what_it_gives_sequentially():
    def main(P):
        P_w = P.reshape(2, 2, 1, 1)
        layer = DistributedConvTranspose2d(
            P[:2].reshape(1, 2, 1, 1), P[2:].reshape(1, 2, 1, 1), P_w, in_channels=2, out_channels=2, kernel_size=1
        )
        x = torch.ones(1, 1, 2, 2) if P.rank < 2 else torch.zeros(1, 0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        assert y.dtype == torch.bfloat16 and y.shape == ((1, 1, 2, 2) if P.rank >= 2 else (1, 0))
        y.float().sum().backward()
        gaps = DistributedConvTranspose1d(
            P.reshape(1, 1, 4), in_channels=1, out_channels=1, kernel_size=1, stride=4, output_padding=3
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = gaps(torch.ones(1, 1, int(P.rank == 0)))
        assert y.dtype == torch.bfloat16 and y.shape == (1, 1, 1)

    on_workers(4, main)


def test_gradients_may_be_wanted_on_some_workers_and_in_some_calls_only():
    def main(P):
        geometry = (3, 4, 1, 1, 3)
        layer, whole = line(P, *geometry), reference(*geometry)
        take_weights(layer, whole)
        everything = noise(1, 2, 5).requires_grad_()
        whole(everything).sum().backward()
        for wants in (set(), {2}, {0, 1, 2, 3}):
            x = everything.detach()[..., slice(*balanced(5, 4)[P.rank])].clone().requires_grad_(P.rank in wants)
            layer.zero_grad()
            layer(x).sum().backward()
            if P.rank in wants:
                assert torch.allclose(x.grad, everything.grad[..., slice(*balanced(5, 4)[P.rank])], rtol=1e-12)
            assert P.rank or torch.allclose(layer.bias.grad, whole.bias.grad, rtol=1e-12)
        with torch.no_grad():
            assert not layer(x).requires_grad

    on_workers(4, main)


OPTIONS = {"in_channels": 2, "out_channels": 2, "kernel_size": 3}


def feature(P, **options):
    return DistributedConvTranspose2d(P.reshape(1, 1, 2, 2), **{**OPTIONS, **options})


def channel(P, P_y=None, **options):
    row = P[:2].reshape(1, 2, 1, 1)
    return DistributedConvTranspose2d(row, row if P_y is None else P_y, P.reshape(2, 2, 1, 1), **{**OPTIONS, **options})


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedConvTranspose2d(P.reshape(1, 2, 2, 1), **OPTIONS), "P_x: batch x 1 x 2 dims of space, or"),
    (lambda P: DistributedConvTranspose2d(P.reshape(1, 1, 2, 2), P_y=P, **OPTIONS), "both P_y and P_w, or neither"),
    (lambda P: channel(P, P_y=P.reshape(1, 4, 1, 1)), "P_y: 1x4x1x1"),
    (lambda P: feature(P, groups=3), "channels that 3 groups divide; got 2 and 2"),
    (lambda P: feature(P, groups=0), "channels that 0 groups divide"),
    (lambda P: channel(P, in_channels=6, out_channels=6, groups=3), "groups of 2 and blocks of 3, 3 output channels"),
    (lambda P: channel(P, in_channels=0), "channels that 1 groups divide; got 0 and 2"),
    (lambda P: feature(P, padding_mode="circular"), "padding_mode 'zeros'; got 'circular'"),
    (lambda P: feature(P, stride=0), "stride to be one whole number, or 2 of them, at least 1; got 0"),
    (lambda P: feature(P, output_padding=-1), "output_padding to be one whole number, or 2 of them, at least 0"),
    (lambda P: feature(P, output_padding=(0, 1)), "an output_padding smaller than the stride or the dilation; got out"),
    (lambda P: feature(P, stride=(1, 2), output_padding=1), "smaller than the stride or the dilation; got output_pad"),
    (lambda P: feature(P, buffer_manager=3), "buffer_manager"),
    (lambda P: feature(P)(torch.ones(1, 3, 4, 4)), "2 channels in dim 1; the global shape of the input is 1x3x8x8"),
    (lambda P: feature(P, padding=2)(torch.ones(1, 2, 1, 2)), "in dim 2 the input has 2 cells, and the output w"),
    (lambda P: feature(P)(torch.ones(1, 2, 0, 2)), "in dim 2 the input has 0 cells"),
    (lambda P: feature(P)(torch.ones(1, 2, 4)), "4 dims"),
    (lambda P: feature(P)(None if P.rank == 2 else torch.ones(1, 2, 4, 4)), "worker 2: DistributedConvTranspose2d"),
    (lambda P: feature(P)(torch.ones(1, 2, 4, 4 + (P.rank == 3))), "in dim 3, at place 1 of the axis"),
    (lambda P: feature(P)(torch.ones(1, 2, 4, 4, dtype=torch.float64)), "one dtype; got torch.float64"),
    (lambda P: feature(P)(torch.ones(1, 2, 4, 4), [10, 11]), "an output_size from 10 to 10 in dim 3, where the"),
    (lambda P: feature(P)(torch.ones(1, 2, 4, 4), [10, 10] if P.rank == 2 else None), "got None on worker 0 and [10"),
    (lambda P: feature(P, stride=2)(torch.ones(1, 2, 1, 1), [5 + P.rank % 2] * 2), "got [5, 5] on worker 0 and [6"),
    (lambda P: feature(P)(torch.ones(1, 2, 4, 4), 10 if P.rank else [10, 10]), "[10, 10] on worker 0 and something"),
    (lambda P: feature(P)(torch.ones(1, 2, 4, 4), [10] * (2 + (P.rank == 3))), "something else on worker 3"),
    (lambda P: feature(P)(torch.ones(1, 2, 4, 4), [10, 2**80]), f"got {2**62}"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(4, make)


def test_autocast_on_some_workers_only_is_an_agreed_error():
    def main(P):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=P.rank == 1):
            feature(P)(torch.ones(1, 2, 4, 4))

    assert "autocast to be on or off, and of one dtype" in every_worker_raises(4, main)


def test_numbers_of_any_whole_kind_are_options():
    def main(P):
        options = {"in_channels": np.int64(2), "out_channels": np.int64(4), "groups": np.int64(2)}
        layer = DistributedConvTranspose2d(
            P.reshape(1, 1, 1, 1), kernel_size=np.array([3, 2]), stride=torch.tensor(2), **options
        )
        assert layer(torch.ones(1, 2, 5, 5)).shape == (1, 4, 11, 10)

    on_workers(1, main)


@pytest.mark.parametrize(
    ("distributed", "sequential", "options"),
    [
        (DistributedConvTranspose2d, torch.nn.ConvTranspose2d, (4, 2, 1)),
        (DistributedConv2d, torch.nn.Conv2d, (3, 1, 1)),
    ],
)
def test_large_blocks_stay_where_they_lie(distributed, sequential, options):
    """Each dim is an exchange of its own then. Also where only some workers ask for the gradient of their x."""

    def main(P):
        k, s, p = options
        team = distdl.Partition(Counting(P.comm))
        layer = distributed(
            team.reshape(1, 1, 2, 2), in_channels=2, out_channels=2, kernel_size=k, stride=s, padding=p
        ).double()
        whole_layer, whole = filled(sequential(2, 2, k, s, p)), noise(2, 2, 96, 176).requires_grad_()
        assert_matches_sequential(layer, whole_layer, whole.detach())
        x = Layout.balanced(layer.P_x, whole.shape).block(whole.detach()).clone().requires_grad_(P.rank in (0, 3))
        y = layer(x)
        team.comm.reset()
        y = layer(x)
        assert [name for name, _ in team.comm.log] == ["all_max", "broadcast", "exchange", "exchange"]
        (y**2).sum().backward()
        (whole_layer(whole) ** 2).sum().backward()
        expected = Layout.balanced(layer.P_x, whole.shape).block(whole.grad)
        assert x.grad is None or torch.allclose(x.grad, expected, rtol=1e-10)
        assert x.requires_grad == (x.grad is not None)

        x, whole.grad = x.detach().requires_grad_(), None
        layer.zero_grad()
        whole_layer.zero_grad()
        penalty(layer, x).backward()
        penalty(whole_layer, whole).backward()
        assert torch.allclose(x.grad, Layout.balanced(layer.P_x, whole.shape).block(whole.grad), rtol=1e-10)
        assert P.rank or torch.allclose(layer.weight.grad, whole_layer.weight.grad, rtol=1e-10)
        dx = [torch.autograd.grad((y**2).sum(), x)[0] for y in (layer(x), checkpoint(layer, x, use_reentrant=False))]
        assert torch.equal(*dx)

    on_workers(4, main)
