"""Convolutions: padding modes, groups of channels, and the batch split together with channels and space."""

import itertools
import threading
from collections import defaultdict

import pytest
import torch
from helpers_layers import filled, noise, on_workers

import distdl
from distdl.geometry.boxes import runs
from distdl.nn import DistributedConv1d, DistributedConv2d, DistributedConv3d, DistributedFeatureConv1d
from distdl.ops import kernel
from distdl.partition.layout import Layout
from distdl.testing import Counting, assert_matches_sequential


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_every_padding_mode(mode, workers):
    """Padding of 4 in 6 cells reaches over several blocks."""

    def main(P):
        uneven = {1: [6], 2: [0, 6], 3: [1, 0, 5], 4: [1, 4, 0, 1]}.get(workers, [0, 1, 0, 4, 0, 1])
        for k, s, p, d in [(3, 1, 1, 1), (2, 1, 1, 1), (3, 2, 4, 1), (5, 3, 4, 2), (1, 2, 3, 1), (4, 1, 0, 1)]:
            layer = DistributedConv1d(
                P.reshape(1, 1, workers), in_channels=2, out_channels=3, kernel_size=k, stride=s, padding=p, dilation=d,
                padding_mode=mode,
            ).double()  # fmt: skip
            reference = filled(torch.nn.Conv1d(2, 3, k, s, p, d, padding_mode=mode))
            assert_matches_sequential(layer, reference, noise(2, 2, 6))
            assert_matches_sequential(layer, reference, noise(2, 2, 6), [runs([2]), runs([2]), runs(uneven)])

    on_workers(workers, main)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes_in_two_dims_and_with_channels_split(mode):
    def main(P):
        options = {"in_channels": 3, "out_channels": 2, "kernel_size": (3, 2), "padding": (2, 1), "padding_mode": mode}
        reference = filled(torch.nn.Conv2d(**options))
        for grid in ((1, 1, 2, 2), (2, 1, 1, 2), (1, 1, 4, 1)):
            assert_matches_sequential(
                DistributedConv2d(P.reshape(*grid), **options).double(), reference, noise(3, 3, 5, 4)
            )
        P_x, P_y, P_w = P[:2].reshape(1, 1, 1, 2), P.reshape(1, 2, 1, 2), P.reshape(2, 1, 1, 2)
        assert_matches_sequential(DistributedConv2d(P_x, P_y, P_w, **options).double(), reference, noise(3, 3, 5, 4))

    on_workers(4, main)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_by_name(mode):
    def main(P):
        for padding, k, d in itertools.product(("same", "valid"), (1, 2, 3, 4), (1, 2)):
            layer = DistributedConv1d(
                P.reshape(1, 1, 3), in_channels=1, out_channels=2, kernel_size=k, dilation=d, padding=padding,
                padding_mode=mode,
            ).double()  # fmt: skip
            reference = filled(torch.nn.Conv1d(1, 2, k, dilation=d, padding=padding, padding_mode=mode))
            assert_matches_sequential(layer, reference, noise(1, 1, 8))

    on_workers(3, main)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("groups", [2, 3, 6])
def test_groups_with_channels_split(workers, groups):
    """Six groups are a depthwise convolution. With another number of workers, their channels cut through groups."""

    def main(P):
        reference = filled(torch.nn.Conv1d(6, 12, 3, padding=1, groups=groups))
        options = {"in_channels": 6, "out_channels": 12, "kernel_size": 3, "padding": 1, "groups": groups}
        row = P.reshape(1, workers, 1)
        layer = DistributedConv1d(row, **options).double()
        assert type(layer) is DistributedFeatureConv1d
        assert_matches_sequential(layer, reference, noise(2, 6, 5))
        uneven = [runs([2]), runs([0] * (workers - 1) + [6]), runs([5])]
        assert_matches_sequential(layer, reference, noise(2, 6, 5), uneven)
        assert_matches_sequential(
            DistributedConv1d(row, row, row.T.reshape(workers, 1, 1), **options).double(), reference, noise(2, 6, 5)
        )

    on_workers(workers, main)


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_with_channels_and_space_split_and_more_workers_than_blocks(groups):
    def main(P):
        options = {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "groups": groups, "bias": groups == 2}
        reference = filled(torch.nn.Conv2d(**options))
        assert_matches_sequential(
            DistributedConv2d(P[:4].reshape(1, 2, 1, 2), **options).double(), reference, noise(2, 4, 5, 6)
        )
        square = P[:4].reshape(1, 2, 2, 1)
        layer = DistributedConv2d(square, square, P.reshape(2, 2, 2, 1), **options).double()
        assert_matches_sequential(layer, reference, noise(2, 4, 5, 6))
        row = P[5:].reshape(1, 3, 1, 1)  # only the first column of P_w has work
        layer = DistributedConv2d(row, P[:2].reshape(1, 2, 1, 1), P[:6].reshape(2, 3, 1, 1), **options).double()
        assert_matches_sequential(layer, reference, noise(2, 4, 5, 6))

    on_workers(8, main)


def test_a_depthwise_convolution_moves_nothing_but_halos_and_weights():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        options = {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "padding": 1, "groups": 4}
        layer = DistributedConv2d(team.reshape(1, 4, 1, 1), **options)
        x = torch.ones(1, 1, 4, 4, requires_grad=True)
        layer(x)
        team.comm.reset()
        layer(x).sum().backward()
        assert [name for name, _ in team.comm.log if name != "exchange"] == ["all_max"] and not team.comm.sent
        layer = DistributedConv2d(team.reshape(1, 2, 1, 2), **options)
        x = torch.ones(1, 2, 4, 2, requires_grad=True)
        layer(x)
        team.comm.reset()
        layer(x).sum().backward()
        # a halo and its gradient; the weights, or their gradient
        assert team.comm.sent == {P.rank ^ 1: 3} and layer.weight.shape == ((2, 1, 3, 3) if P.rank % 2 == 0 else (0,))

    on_workers(4, main)


@pytest.mark.parametrize(
    ("batch", "out", "inner", "space"),
    [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 2, 2, 1), (3, 1, 2, 1), (2, 1, 2, 2)],
)
def test_the_batch_split_with_channels_and_space(batch, out, inner, space):
    """P_w has an axis for the batch; the weights live on its first place."""

    def main(P):
        P_w = P[1:].reshape(batch, out, inner, space)
        P_x = P.create_partition_inclusive(range(batch * inner * space)[::-1]).reshape(batch, inner, space)
        P_y = P[: batch * out * space].reshape(batch, out, space)
        layer = DistributedConv1d(P_x, P_y, P_w, in_channels=3, out_channels=4, kernel_size=3, padding=1).double()
        reference = filled(torch.nn.Conv1d(3, 4, 3, padding=1))
        assert_matches_sequential(layer, reference, noise(3, 3, 7))
        uneven = [runs([3] + [0] * (batch - 1)), runs([0] * (inner - 1) + [3]), runs([7] + [0] * (space - 1))]
        assert_matches_sequential(layer, reference, noise(3, 3, 7), uneven)

    on_workers(batch * out * inner * space + 1, main)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize("space", [2, 3])
def test_channels_last_is_kept(space, mode, monkeypatch):
    """In the window, in y and in the gradient of x; for windows in recycled memory, too."""

    windows = defaultdict(list)

    def see(inner):
        def seeing(x, *others):
            windows[threading.get_ident()].append(x)
            return inner(x, *others)

        return seeing

    name = f"conv{space}d"
    monkeypatch.setattr(torch.nn.functional, name, see(getattr(torch.nn.functional, name)))
    if space == 3 and mode != "zeros":
        monkeypatch.setattr(kernel, "_ONEDNN", see(kernel._ONEDNN))

    def main(P):
        extents = {2: (300, 300), 3: (20, 40, 70)}[space]
        options = {"kernel_size": 3, "padding": 1, "padding_mode": mode, "bias": False}
        layer = {2: DistributedConv2d, 3: DistributedConv3d}[space](
            P.reshape(1, 1, 2, 2, *[1] * (space - 2)), in_channels=4, out_channels=2, **options
        )
        reference = {2: torch.nn.Conv2d, 3: torch.nn.Conv3d}[space](4, 2, **options)
        layer.weight.data = layer.parameter_layouts["weight"].block(filled(reference).weight.detach().float())
        form = {2: torch.channels_last, 3: torch.channels_last_3d}[space]
        seen = windows[threading.get_ident()]
        block = Layout.balanced(layer.P_x, (1, 4, *extents)).block(noise(1, 4, *extents).float())
        outcomes = []
        for form_of_x in (torch.contiguous_format, form):
            x = block.contiguous(memory_format=form_of_x).requires_grad_()
            y = layer(x)
            outcomes.append((y, *torch.autograd.grad((y**2).sum(), x)))
        found = [window.is_contiguous(memory_format=form) for window in seen]
        assert found == ([] if mode == "zeros" else [False, True])  # (with zeros, blocks stay where they lie)
        for contiguous, last in zip(*outcomes, strict=True):
            assert last.is_contiguous(memory_format=form) or space == 3  # torch's operator does not keep it there
            assert torch.allclose(contiguous, last, rtol=1e-4, atol=1e-3)

    on_workers(4, main)
