"""The state of a sequential layer, read and written."""

import copy

import pytest
import torch
from helpers_layers import noise, on_workers

from distdl.nn import DistributedConv2d, DistributedEmbedding, DistributedLinear
from distdl.nn.placement import parameter_layouts


def one_worker_layers(P):
    one = P[:1]
    yield DistributedLinear(one.reshape(1, 1), one.reshape(1, 1), one.reshape(1, 1), 5, 3), torch.nn.Linear(5, 3)
    square = one.reshape(1, 1, 1, 1)
    options = {"in_channels": 2, "out_channels": 3, "kernel_size": 3}
    yield DistributedConv2d(square, **options), torch.nn.Conv2d(**options)
    yield DistributedConv2d(square, square, square, **options, bias=False), torch.nn.Conv2d(**options, bias=False)
    column = one.reshape(1, 1)
    yield DistributedEmbedding(one, column, column, 5, 3), torch.nn.Embedding(5, 3)


def test_one_worker_has_the_sequential_keys_both_ways():
    """Also beside idle workers, in a network, and in a copy."""

    def main(P):
        for ours, theirs in one_worker_layers(P):
            ours, theirs = torch.nn.Sequential(torch.nn.Tanh(), copy.deepcopy(ours)), torch.nn.Sequential(
                torch.nn.Tanh(), theirs
            )  # fmt: skip
            state = {
                key: noise(*value.shape, seed=n).float() for n, (key, value) in enumerate(theirs.state_dict().items())
            }
            before = dict(state)
            ours.load_state_dict(state, strict=True)
            assert state == before and list(ours.state_dict()) == list(state)
            if P.rank == 0:
                assert all(torch.equal(ours.state_dict()[key], value) for key, value in state.items())
                theirs.load_state_dict(ours.state_dict(), strict=True)
                assert all(torch.equal(theirs.state_dict()[key], value) for key, value in state.items())
            ours.load_state_dict(ours.state_dict(), strict=True)
            with pytest.raises(RuntimeError, match="Unexpected key"):
                ours.load_state_dict({**state, "1.other": torch.ones(1)})

    on_workers(2, main)


def test_split_parameters_read_their_blocks_of_a_sequential_state():
    def main(P):
        network = torch.nn.Sequential(
            DistributedLinear(P[:2].reshape(1, 2), P[:2].reshape(1, 2), P.reshape(2, 2), 5, 3),
            DistributedConv2d(P.reshape(1, 1, 2, 2), in_channels=2, out_channels=3, kernel_size=3),
        )
        sequential = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Conv2d(2, 3, 3))
        for parameter in sequential.parameters():
            parameter.data = noise(*parameter.shape).float()
        network.load_state_dict(sequential.state_dict(), strict=True)
        assert [*network.state_dict()] == ["0.sublinear.weight", "0.sublinear.bias", "1.weight", "1.bias"]
        layouts = parameter_layouts(network)
        for (name, layout), whole in zip(layouts.items(), sequential.parameters(), strict=True):
            assert torch.equal(network.get_parameter(name), layout.block(whole))
        network.load_state_dict(network.state_dict(), strict=True)

    on_workers(4, main)
