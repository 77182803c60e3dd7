import copy
import inspect
import itertools
from typing import Required, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import pytest
import torch
from helpers_layers import every_worker_raises, filled, noise, on_workers, penalty, share, take_weights
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.geometry.boxes import runs
from distdl.nn import (
    DistributedChannelConv2d,
    DistributedConv1d,
    DistributedConv2d,
    DistributedConv3d,
    DistributedConvTranspose2d,
    DistributedEmbedding,
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedGeneralConv2d,
    DistributedLinear,
)
from distdl.testing import Counting, Silent, assert_matches_sequential

GEOMETRIES = [
    (k, s, p, d)
    for k, s, p, d in itertools.product((1, 2, 3, 4, 7), (1, 2, 3), (0, 1, 3), (1, 2))
    if (k - 1) * d < 10 + p
]


@pytest.mark.parametrize("of", [3, pytest.param(1, marks=pytest.mark.every_case)])
@pytest.mark.parametrize(("number", "workers"), list(enumerate([1, 2, 3, 4, 6])))
def test_every_geometry_split_over_space(number, workers, of):
    """With 11 cells, kernels reach far beyond the neighbours' blocks."""

    def main(P):
        for k, s, p, d in share(GEOMETRIES, number, of):
            layer = DistributedConv1d(
                P.reshape(1, 1, workers), in_channels=2, out_channels=3, kernel_size=k, stride=s, padding=p, dilation=d
            ).double()
            assert_matches_sequential(layer, filled(torch.nn.Conv1d(2, 3, k, s, p, d)), noise(2, 2, 11))

    on_workers(workers, main)


@pytest.mark.parametrize("of", [8, pytest.param(1, marks=pytest.mark.every_case)])
@pytest.mark.parametrize(
    ("number", "sizes"), list(enumerate([[1, 0, 9, 1], [0, 0, 0, 11], [5, 0, 0, 6], [11, 0, 0, 0], [2, 3, 1, 5]]))
)
def test_uneven_and_empty_blocks(number, sizes, of):
    def main(P):
        for k, s, p, d in share(GEOMETRIES, number, of):
            layer = DistributedFeatureConv1d(P.reshape(1, 1, 4), 2, 3, k, s, p, dilation=d).double()
            reference = filled(torch.nn.Conv1d(2, 3, k, s, p, d))
            assert_matches_sequential(layer, reference, noise(2, 2, 11), [runs([2]), runs([2]), runs(sizes)])

    on_workers(4, main)


def test_fewer_outputs_than_workers():
    def main(P):
        layer = DistributedConv1d(P.reshape(1, 1, 4), in_channels=1, out_channels=1, kernel_size=5, stride=3).double()
        assert_matches_sequential(layer, filled(torch.nn.Conv1d(1, 1, 5, 3)), noise(1, 1, 9))
        layer = DistributedConv1d(P.reshape(1, 1, 4), in_channels=1, out_channels=1, kernel_size=2, padding=1).double()
        assert_matches_sequential(layer, filled(torch.nn.Conv1d(1, 1, 2, padding=1)), noise(1, 1, 1))

    on_workers(4, main)


@pytest.mark.parametrize(
    ("workers", "grid"), [(4, (1, 1, 2, 2)), (6, (1, 1, 3, 2)), (6, (1, 1, 1, 6)), (4, (2, 1, 2, 1)), (6, (3, 1, 1, 2))]
)
def test_two_dims_of_space_and_the_batch(workers, grid):
    def main(P):
        layer = DistributedConv2d(
            P.reshape(*grid), in_channels=3, out_channels=4, kernel_size=(3, 2), stride=(1, 2), padding=(1, 0)
        )
        reference = filled(torch.nn.Conv2d(3, 4, (3, 2), (1, 2), (1, 0)))
        assert_matches_sequential(layer.double(), reference, noise(4, 3, 8, 9))

    on_workers(workers, main)


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_where_channels_are_not_split(groups):
    def main(P):
        layer = DistributedConv2d(
            P.reshape(1, 1, 2, 2), in_channels=4, out_channels=6, kernel_size=3, groups=groups
        ).double()
        assert_matches_sequential(layer, filled(torch.nn.Conv2d(4, 6, 3, groups=groups)), noise(2, 4, 7, 7))

    on_workers(4, main)


def test_three_dims_of_space():
    def main(P):
        layer = DistributedConv3d(
            P.reshape(1, 1, 2, 1, 2), in_channels=2, out_channels=2, kernel_size=3, padding=1, bias=False
        )
        assert_matches_sequential(
            layer.double(), filled(torch.nn.Conv3d(2, 2, 3, padding=1, bias=False)), noise(1, 2, 5, 3, 4)
        )

    on_workers(4, main)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("out", "inner", "space"), [(2, 2, 1), (1, 3, 1), (3, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 3)]
)
def test_split_over_channels_and_space(out, inner, space, bias):
    """The partitions of input, output and work lie on different workers of the world."""
    work, world = out * inner * space, out * inner * space + 2

    def main(P):
        P_w = P[2:].reshape(out, inner, space)
        P_x = P.create_partition_inclusive(range(inner * space)).reshape(1, inner, space)
        P_y = P.create_partition_inclusive(range(world - out * space, world)).reshape(1, out, space)
        for k, s, p in ((3, 1, 1), (2, 2, 0), (5, 1, 2)):
            layer = DistributedConv1d(
                P_x, P_y, P_w, in_channels=5, out_channels=3, kernel_size=k, stride=s, padding=p, bias=bias
            )
            assert_matches_sequential(layer.double(), filled(torch.nn.Conv1d(5, 3, k, s, p, bias=bias)), noise(2, 5, 9))
            uneven = [runs([2]), runs([5] + [0] * (inner - 1)), runs([1] * (space - 1) + [10 - space])]
            assert_matches_sequential(layer, filled(torch.nn.Conv1d(5, 3, k, s, p, bias=bias)), noise(2, 5, 9), uneven)
        assert work == P_w.workers.size

    on_workers(world, main)


def test_the_kind_of_layer_follows_from_the_partitions_on_every_worker():
    def main(P):
        options = {"in_channels": 4, "out_channels": 4, "kernel_size": 3}
        team = P.create_partition_inclusive(range(4))
        assert type(DistributedConv2d(team.reshape(1, 1, 2, 2), **options)) is DistributedFeatureConv2d
        row, work = team[:2].reshape(1, 2, 1, 1), team.reshape(2, 2, 1, 1)
        assert type(DistributedConv2d(row, row, work, **options)) is DistributedChannelConv2d
        square, work = team.reshape(1, 2, 2, 1), P.reshape(2, 2, 2, 1)
        assert type(DistributedConv2d(square, square, work, **options)) is DistributedGeneralConv2d

    on_workers(8, main)


def test_weights_live_on_the_first_worker_and_elsewhere_have_a_gradient_too():
    def main(P):
        layer = DistributedConv2d(P.reshape(1, 1, 2, 2), in_channels=2, out_channels=3, kernel_size=3)
        assert layer.weight.shape == ((3, 2, 3, 3) if P.rank == 0 else (0,)) and layer.bias.shape == (
            (3,) if P.rank == 0 else (0,)
        )
        layer(torch.ones(1, 2, 4, 4)).sum().backward()
        assert layer.weight.grad.shape == layer.weight.shape and layer.bias.grad.shape == layer.bias.shape
        if P.rank == 0:
            layer.weight.data = torch.ones(3, 2, 3, 3)
            layer.bias.data = torch.full((3,), 0.5)
        assert layer(torch.ones(1, 2, 4, 4))[0, 0, 0, 0].item() == 18.5

    on_workers(4, main)


def test_a_worker_outside_all_partitions_only_keeps_the_graph_alive():
    def main(P):
        layer = DistributedConv2d(P[:4].reshape(1, 1, 2, 2), in_channels=1, out_channels=1, kernel_size=3)
        x = torch.ones(2, 1, 3, 3) if P.rank < 4 else torch.zeros(2, 0)
        x.requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert y.shape[0] == 2 and x.grad.shape == x.shape and layer.weight.grad is not None

    on_workers(5, main)


def test_a_3x3_convolution_split_2x2_sends_three_messages_each_way_and_agrees_once():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        layer = DistributedConv2d(team.reshape(1, 1, 2, 2), in_channels=1, out_channels=1, kernel_size=3, padding=1)
        x = torch.ones(1, 1, 4, 4, requires_grad=True)
        layer(x)
        team.comm.reset()
        y = layer(x)
        assert set(team.comm.sent.values()) == {1} and len(team.comm.sent) == 3 == len(team.comm.received)
        assert [name for name, _ in team.comm.log] == ["all_max", "exchange", "broadcast"]
        team.comm.reset()
        y.sum().backward()
        assert sorted(name for name, _ in team.comm.log) == ["exchange", "sum"]
        assert set(team.comm.sent.values()) == {1} and len(team.comm.sent) == 3

    on_workers(4, main)


def test_an_input_that_needs_no_gradient_gets_none_and_sends_nothing_back():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        layer = DistributedConv2d(team.reshape(1, 1, 2, 2), in_channels=1, out_channels=1, kernel_size=3, padding=1)
        y = layer(torch.ones(1, 1, 4, 4))
        team.comm.reset()
        y.sum().backward()
        assert [name for name, _ in team.comm.log] == ["sum"] and layer.weight.grad is not None
        layer.requires_grad_(False)
        y = layer(torch.ones(1, 1, 4, 4, requires_grad=True))
        team.comm.reset()
        y.sum().backward()
        assert [name for name, _ in team.comm.log] == ["exchange"] and layer.weight.grad is not None

    on_workers(4, main)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_a_worker_sends_one_message_to_each_other_at_most(mode):
    """In a circle of two by two, each of the other three borders on it in four places."""

    def main(P):
        team = distdl.Partition(Counting(P.comm))
        options = {"in_channels": 1, "out_channels": 1, "kernel_size": 3, "padding": 1, "padding_mode": mode}
        layer = DistributedConv2d(team.reshape(1, 1, 2, 2), **options)
        x = torch.ones(1, 1, 4, 4, requires_grad=True)
        layer(x)
        team.comm.reset()
        y = layer(x)
        assert set(team.comm.sent.values()) == {1} and len(team.comm.sent) == 3 and team.comm.sent == team.comm.received
        assert [name for name, _ in team.comm.log] == ["all_max", "exchange", "broadcast"]
        team.comm.reset()
        y.sum().backward()
        assert sorted(name for name, _ in team.comm.log) == ["exchange", "sum"]
        assert set(team.comm.sent.values()) == {1} and team.comm.sent == team.comm.received

    on_workers(4, main)


@pytest.mark.parametrize("mode", ["circular", "zeros"])
def test_a_checkpoint_recomputes_the_same(mode):
    def main(P):
        options = {"in_channels": 2, "out_channels": 2, "kernel_size": 3, "padding": 1, "padding_mode": mode}
        layer = DistributedConv1d(P[:3].reshape(1, 1, 3), **options).double()
        cells = P.rank + (mode == "zeros")  # (without an empty block, all of it is one node)
        x = noise(1, 2, cells, seed=P.rank).requires_grad_() if P.rank < 3 else torch.zeros(1, 0).requires_grad_()
        gradients = []
        for network in (layer, copy.deepcopy(layer)):
            x.grad = None
            y = network(x) if network is layer else checkpoint(network, x, use_reentrant=False)
            y.square().sum().backward()
            gradients.append([x.grad, *(parameter.grad for parameter in network.parameters())])
        assert all(map(torch.equal, *gradients)) and (P.rank or gradients[0][1].abs().sum() > 0)

    on_workers(4, main)


@pytest.mark.parametrize(
    ("options", "blocks"),
    [({"stride": 2}, [3, 0, 3, 1]), ({"padding": 1}, [2, 1, 3, 1])],
    ids=["idle and empty workers", "all in one node"],
)
def test_double_backward(options, blocks):
    def main(P):
        reference = filled(torch.nn.Conv1d(1, 2, 3, **options))
        layer = DistributedConv1d(P.reshape(1, 1, 4), in_channels=1, out_channels=2, kernel_size=3, **options).double()
        take_weights(layer, reference)
        whole = noise(2, 1, 7).requires_grad_()

        penalty(reference, whole).backward()
        cells = slice(*runs(blocks)[P.rank])
        x = whole.detach()[..., cells].clone().requires_grad_()
        penalty(layer, x).backward()
        assert torch.allclose(x.grad, whole.grad[..., cells], rtol=1e-10)
        assert P.rank or torch.allclose(layer.weight.grad, reference.weight.grad, rtol=1e-10)

    on_workers(4, main)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("cells", [6, 1 << 14])  # windows that are saved whole, and as margins
def test_workers_without_gradients_of_their_own_take_part(cells, create_graph):
    """Only worker 1 asks for the gradient of x, and only worker 0 for that of the weights."""

    def main(P):
        team = distdl.Partition(Counting(P.comm))
        layer = DistributedConv1d(
            team.reshape(1, 1, 3), in_channels=2, out_channels=2, kernel_size=3, padding=1
        ).double()
        reference, whole = filled(torch.nn.Conv1d(2, 2, 3, padding=1)), noise(1, 2, 3 * cells).requires_grad_()
        take_weights(layer, reference)
        own = slice(cells * P.rank, cells * (P.rank + 1))
        (reference(whole) ** 3).sum().backward()
        for weights in (True, False):
            layer.zero_grad()
            layer.requires_grad_(weights and P.rank == 0)
            x = whole.detach()[..., own].clone().requires_grad_(P.rank == 1)
            y = layer(x)
            team.comm.reset()
            (y**3).sum().backward(create_graph=create_graph)
            moved = P.allgather_data([name for name, _ in team.comm.log])
            assert moved[0] == moved[1] == moved[2] and ("sum" in moved[0]) == weights and "exchange" in moved[0]
            assert P.rank != 1 or torch.allclose(x.grad, whole.grad[..., own], rtol=1e-10)
            assert P.rank or not weights or torch.allclose(layer.weight.grad, reference.weight.grad, rtol=1e-10)

    on_workers(3, main)


def test_autocast_on_all_workers_gives_what_it_gives_sequentially():
    def main(P):
        P_w = P.reshape(2, 2, 1, 1)
        layer = DistributedConv2d(
            P[:2].reshape(1, 2, 1, 1), P[2:].reshape(1, 2, 1, 1), P_w, in_channels=2, out_channels=2, kernel_size=1
        )
        x = torch.ones(1, 1, 2, 2) if P.rank < 2 else torch.zeros(1, 0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        assert y.dtype == torch.bfloat16 and y.shape == ((1, 1, 2, 2) if P.rank >= 2 else (1, 0))
        y.float().sum().backward()

    on_workers(4, main)


OPTIONS = {"in_channels": 2, "out_channels": 2, "kernel_size": 3}


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedConv2d(P.reshape(1, 2, 2, 1), **OPTIONS), "P_x: batch x 1 x 2 dims of space, or with gr"),
    (lambda P: DistributedConv2d(P.reshape(1, 1, 2, 2), P_y=P, **OPTIONS), "both P_y and P_w, or neither"),
    (lambda P: channel(P, P_y=P.reshape(1, 4, 1, 1)), "P_y: 1x4x1x1"),
    (lambda P: feature(P, groups=3), "channels that 3 groups divide; got 2 and 2"),
    (lambda P: feature(P, padding_mode="mirror"), "modes zeros, reflect, replicate, circular; got 'mirror'"),
    (lambda P: feature(P, padding="same", stride=2), "stride 1 for padding 'same'; got (2, 2)"),
    (lambda P: channel(P, P_y=P[:2].reshape(2, 1, 1, 1)), "P_w: batch x p_out x p_in x space (without"),
    (lambda P: feature(P, stride=0), "stride to be one whole number, or 2 of them, at least 1; got 0"),
    (lambda P: feature(P, padding=-1), "padding to be one whole number, or 2 of them, at least 0; got -1"),
    (lambda P: feature(P, padding="full"), "padding in cells, or 'same' or 'valid'; got 'full'"),
    (lambda P: feature(P, padding=8, padding_mode="reflect")(torch.ones(1, 2, 4, 4)), "in dim 2 the padding is 8 and"),
    (lambda P: feature(P, padding=9, padding_mode="circular")(torch.ones(1, 2, 4, 4)), "9 and 9 and the extent 8"),
    (lambda P: feature(P, kernel_size=2.7), "kernel_size to be one whole number"),
    (lambda P: feature(P, groups=0), "channels that 0 groups divide"),
    (lambda P: feature(P, buffer_manager=3), "buffer_manager"),
    (lambda P: feature(P)(torch.ones(1, 3, 4, 4)), "2 channels in dim 1; the global shape of the input is 1x3x8x8"),
    (lambda P: feature(P)(torch.ones(1, 2, 1, 4)), "in dim 2 the kernel spans 3 cells and the input has"),
    (lambda P: feature(P)(torch.ones(1, 2, 4)), "4 dims"),
    (lambda P: feature(P)(None if P.rank == 2 else torch.ones(1, 2, 4, 4)), "worker 2: DistributedFeatureConv2d"),
    (lambda P: feature(P)(torch.ones(1, 2, 4, 4 + (P.rank == 3))), "in dim 3, at place 1 of the axis"),
    (lambda P: feature(P)(torch.ones(1, 2, 4, 4, dtype=torch.float64)), "one dtype; got torch.float64"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(4, make)


def feature(P, **options):
    return DistributedConv2d(P.reshape(1, 1, 2, 2), **{**OPTIONS, **options})


def channel(P, P_y=None, **options):
    row = P[:2].reshape(1, 2, 1, 1)
    return DistributedConv2d(row, row if P_y is None else P_y, P.reshape(2, 2, 1, 1), **{**OPTIONS, **options})


def test_autocast_on_some_workers_only_is_an_agreed_error():
    def main(P):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=P.rank == 1):
            feature(P)(torch.ones(1, 2, 4, 4))

    assert "autocast to be on or off, and of one dtype" in every_worker_raises(4, main)


def test_numbers_of_any_whole_kind_are_options():
    def main(P):
        options = {"in_channels": np.int64(1), "out_channels": np.int64(2), "groups": np.int64(1)}
        layer = DistributedConv2d(
            P.reshape(1, 1, 1, 1), kernel_size=np.array([3, 2]), stride=torch.tensor(2), **options
        )
        assert layer(torch.ones(1, 1, 5, 5)).shape == (1, 2, 2, 2)

    on_workers(1, main)


def test_an_empty_input_of_the_default_dtype_takes_the_dtype_of_the_others():
    def main(P):
        layer = DistributedConv1d(P.reshape(1, 1, 2), in_channels=1, out_channels=1, kernel_size=1).double()
        x = torch.ones(1, 1, 3).double() if P.rank == 0 else torch.ones(1, 1, 0)
        y = layer(x.requires_grad_())
        y.sum().backward()
        assert y.dtype == torch.float64 and y.shape == (1, 1, 2 - P.rank) and x.grad.dtype == x.dtype

    on_workers(2, main)


AS_IN_TORCH = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "groups": 2}


@pytest.mark.parametrize("make", [DistributedConv1d, DistributedConv2d, DistributedConv3d])
def test_the_signature_of_a_factory_is_that_of_its_layers(make):
    """The options have types and names, and those of them that layers have no defaults for are required."""
    *partitions, options = inspect.signature(make).parameters.values()
    layer = inspect.signature(DistributedFeatureConv2d).parameters
    assert [one.name for one in partitions] == ["P_x", "P_y", "P_w", "buffer_manager"]
    named = get_args(get_type_hints(make)["options"])[0]
    assert options.kind is inspect.Parameter.VAR_KEYWORD and is_typeddict(named)
    assert {"P_x", "buffer_manager", *named.__annotations__} == set(layer)
    hints = get_type_hints(named, include_extras=True)
    required = {name for name, hint in hints.items() if get_origin(hint) is Required}
    assert {name for name in layer if layer[name].default is inspect.Parameter.empty} == {"P_x", *required}
    with pytest.raises(TypeError, match="missing 3 required positional arguments: 'in_channels', 'out_channels'"):
        distdl.run_workers(lambda: make(distdl.world().reshape(*[1] * (2 + int(make.__name__[-2])))), 1)


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedConv2d(P, 1, 8, 3), "DistributedConv2d takes 1 for P_y, which has to be a partition; behind "
     "the partitions, give the arguments by name: DistributedConv2d(P_x, in_channels=..., out_channels=..., kernel_si"),
    (lambda P: DistributedConv1d(P, None, 8, in_channels=3), "DistributedConv1d takes 8 for P_w"),
    (lambda P: DistributedFeatureConv2d(8, 3, 3, 3), "DistributedFeatureConv2d takes 8 for P_x"),
    (lambda P: DistributedGeneralConv2d(P, 1, 8, 3), "DistributedGeneralConv2d takes 1 for P_y"),
    (lambda P: DistributedConvTranspose2d(P, 1, 8, 3), "DistributedConvTranspose2d takes 1 for P_y"),
    (lambda P: DistributedLinear(P, 5, 3), "by name: DistributedLinear(P_x, P_y, P_w, in_features=..., out_feat"),
    (lambda P: DistributedEmbedding(P, 5, 3), "DistributedEmbedding takes 5 for P_y"),
])  # fmt: skip
def test_a_number_in_place_of_a_partition_is_named(make, words):
    assert words in every_worker_raises(2, make, TypeError)


@pytest.mark.parametrize(
    "make",
    [
        lambda P: DistributedFeatureConv2d(P.reshape(1, 1, 1, 1), 1, 1, 1, strides=2),
        lambda P: distdl.nn.DistributedConvTranspose2d(
            P.reshape(1, 1, 1, 1), in_channels=1, out_channels=1, kernel_size=1, strides=2
        ),
        lambda P: distdl.nn.DistributedMaxPool2d(P.reshape(1, 1, 1, 1), 2, strides=2),
        lambda P: distdl.nn.DistributedAdaptiveAvgPool2d(P.reshape(1, 1, 1, 1), 2, strides=2),
        lambda P: distdl.nn.DistributedDropout2d(P.reshape(1, 1, 1, 1), strides=2),
        lambda P: distdl.nn.DistributedLinear(*[P.reshape(1, 1)] * 3, 1, 1, strides=2),
    ],
)
def test_an_option_that_a_layer_does_not_have_is_an_error_that_names_the_class(make):
    with pytest.raises(
        TypeError,
        match=r"^Distributed\w+\.__init__\(\) got an unexpected keyword argument 'strides'(\. Did you mean|$)",
    ):
        make(distdl.Partition(Silent(0, 1)))


def test_a_constructor_that_classes_share_shows_its_arguments():
    shown = list(inspect.signature(distdl.nn.DistributedMaxPool2d).parameters)
    assert shown[:3] == ["P_x", "kernel_size", "stride"]


def every_kind(P):
    """A layer of each kind, and torch's."""
    row, square = P.reshape(1, 2), P.reshape(1, 2, 1, 1)
    options = {"in_channels": 4, "out_channels": 4, **AS_IN_TORCH}
    yield DistributedConv2d(P.reshape(1, 1, 2, 1), **options), torch.nn.Conv2d(4, 4, 3, 2, 1, 1, 2)
    yield DistributedConv2d(square, square, P.reshape(2, 1, 1, 1), **options), torch.nn.Conv2d(4, 4, 3, 2, 1, 1, 2)
    options["output_padding"] = (1, 1)
    transposed = torch.nn.ConvTranspose2d(4, 4, 3, 2, 1, 1, 2)
    yield DistributedConvTranspose2d(P.reshape(1, 1, 2, 1), bias=False, **options), transposed
    yield DistributedLinear(row, row[:, :1], row, 5, 3), torch.nn.Linear(5, 3)
    yield DistributedEmbedding(P[:1], row, row, 5, 4, padding_idx=1), torch.nn.Embedding(5, 4, padding_idx=1)


def test_options_can_be_read_as_in_torch_and_not_be_changed():
    def main(P):
        for ours, theirs in every_kind(P):
            unused = "output_padding" if isinstance(theirs, torch.nn.Conv2d) else ""
            names = [name for name in theirs.__constants__ if name != unused]
            assert len(names) > 1
            for name in names:
                assert getattr(ours, name) == getattr(theirs, name)
                with pytest.raises(AttributeError, match=f"^{type(ours).__name__} keeps the {name} that it was"):
                    setattr(ours, name, getattr(theirs, name))
            for name in ("P_x", "P_y", "P_w"):
                if hasattr(ours, name):
                    with pytest.raises(AttributeError, match="build a new layer with another P_"):
                        setattr(ours, name, P)
            again = copy.deepcopy(ours)
            assert all(getattr(again, name) == getattr(theirs, name) for name in names)
        named = DistributedConv1d(P.reshape(1, 1, 2), in_channels=1, out_channels=1, kernel_size=3, padding="same")
        assert named.padding == torch.nn.Conv1d(1, 1, 3, padding="same").padding

    on_workers(2, main)


def test_the_repr_of_a_layer_says_its_options_and_its_partitions():
    def main(P):
        shown = [repr(ours) for ours, _ in every_kind(P)]
        assert shown[0] == (
            "DistributedFeatureConv2d(4, 4, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1), "
            "groups=2, padding_mode='zeros', bias=True, P_x: 1x1x2x1 on workers 0, 1)"
        )
        assert "P_y: 1x2x1x1 on workers 0, 1; P_w: 2x1x1x1 on workers 0, 1" in shown[1]
        assert "output_padding=(1, 1)" in shown[2] and "bias=False" in shown[2]
        assert "in_features=5, out_features=3, bias=True, P_x: 1x2 on workers 0, 1; P_y: 1x1 on worker" in shown[3]
        assert "5, 4, padding_idx=1, P_x: 1 on workers 0; P_y: 1x2 on workers 0, 1; P_w: 1x2" in shown[4]

    on_workers(2, main)


@pytest.mark.parametrize("gradient", [True, False])
def test_no_layer_returns_a_view(gradient):
    """Also not of an empty block, nor on an idle worker, nor where nothing has to move."""

    def main(P):
        def check(layer, x):
            with torch.set_grad_enabled(gradient):
                y = layer(x.requires_grad_(gradient and x.dtype.is_floating_point))
            assert not y._is_view(), (layer, x.shape)
            assert y.requires_grad == gradient

        one, row, column = P[:1].reshape(1, 1), P[:2].reshape(1, 2), P[:2].reshape(2, 1)
        for partitions, block in (((one, one, one), 4), ((row, row[:, :1], row), 2), ((one, row, column), 4)):
            for bias, more in itertools.product((True, False), ((), (3,), (2, 3), (0,))):
                x = torch.ones(2, *more, block) if P.rank in partitions[0] else torch.zeros(2, 0)
                check(DistributedLinear(*partitions, 4, 4, bias), x)
        for make, more in (
            (DistributedConv1d, ()),
            (DistributedConv2d, (4,)),
            (DistributedConv3d, (4, 4)),
            (DistributedConvTranspose2d, (4,)),
        ):
            for options in ({}, {"padding": 1}, {"bias": False, "groups": 2}, {"padding": 1, "dilation": 2}):
                P_x = P[:2].reshape(1, 1, 2, *[1] * len(more))
                layer = make(P_x, in_channels=2, out_channels=2, kernel_size=2, **options)
                for batch, cells in ((2, 4), (0, 4), (2, 4 * (P.rank == 0))):
                    check(layer, torch.ones(batch, 2, cells, *more) if P.rank < 2 else torch.zeros(batch, 0))
        for partitions in ((P[:1], one, one), (P[:1], row, row), (P[:1], one, column)):
            layer = DistributedEmbedding(*partitions, 4, 4)
            for x in (torch.tensor([0, 3]), torch.zeros(0, dtype=torch.int64)):
                check(layer, x if P.rank == 0 else x[:0])

    on_workers(3, main)


def test_an_activation_in_place_behind_a_linear_layer_of_more_dims():
    """Twice backward, with an empty block, as sequentially."""

    def main(P):
        P_x = P.reshape(2, 1, 1)
        layer = DistributedLinear(P_x, P_x, P_x.reshape(2, 1, 1, 1), 4, 4).double()
        reference = filled(torch.nn.Linear(4, 4))
        layer.load_state_dict(reference.state_dict())
        whole = noise(3, 2, 4)

        def penalty(network, x):
            (dx,) = torch.autograd.grad(torch.nn.functional.relu_(network(x)).square().sum(), x, create_graph=True)
            (dx**2).sum().backward()
            return x.grad

        rows = slice(0, 3 * (P.rank == 0))
        dx = penalty(layer, whole[rows].clone().requires_grad_())
        expected = penalty(reference, whole.requires_grad_())
        assert torch.allclose(dx, expected[rows], rtol=1e-10)
        if P.rank == 0:
            assert torch.allclose(layer.sublinear.weight.grad, reference.weight.grad, rtol=1e-10)

    on_workers(2, main)


def test_a_bias_may_be_taken_away_from_a_layer_on_all_workers():
    def main(P):
        layer = DistributedConv1d(P.reshape(1, 1, 3), in_channels=1, out_channels=2, kernel_size=3, padding=1).double()
        reference = filled(torch.nn.Conv1d(1, 2, 3, padding=1))
        layer.load_state_dict(reference.state_dict())
        layer(noise(2, 1, 2))
        layer.bias, reference.bias = None, None
        assert_matches_sequential(layer, reference, noise(2, 1, 7))
        assert list(layer.parameter_layouts) == ["weight"]

    on_workers(3, main)
