import math

import pytest
import torch
from helpers_layers import on_workers

from distdl.nn import DistributedConv2d, DistributedLinear
from distdl.nn.placement import parameter_layouts, uniform_parameter
from distdl.partition.layout import Layout


def gathered(P, layout, parameter, shape):
    """The whole parameter, put together from its blocks."""
    whole = torch.full(shape, math.nan)
    for worker, block in enumerate(P.allgather_data(parameter.detach())):
        if worker in layout.partition:
            whole[tuple(slice(*interval) for interval in layout[worker])] = block
    return whole


@pytest.mark.parametrize("grid", [(1, 1), (1, 4), (4, 1), (2, 2), (3, 1)])
def test_initial_values_do_not_depend_on_the_partition(grid):
    torch.manual_seed(7)
    found = []

    def main(P):
        team = P[: grid[0] * grid[1]].reshape(*grid)
        layer = DistributedLinear(team[:1], team[:, :1].reshape(1, grid[0]), team, 9, 6)
        layouts = layer.parameter_layouts
        weight = gathered(P, layouts["sublinear.weight"], layer.sublinear.weight, (6, 9))
        bias = gathered(P, layouts["sublinear.bias"], layer.sublinear.bias, (6,))
        if P.rank == 0:
            found.append((weight, bias))

    on_workers(4, main)
    on_workers(1, lambda P: found.append(one_worker(P)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    weight = found[0][0]
    bound = 1 / math.sqrt(9)
    assert weight.abs().max() <= bound and weight.std() > 0.4 * bound and weight.unique().numel() == 54


def one_worker(P):
    layer = DistributedLinear(P.reshape(1, 1), P.reshape(1, 1), P.reshape(1, 1), 9, 6)
    return layer.sublinear.weight.detach(), layer.sublinear.bias.detach()


def test_the_bound_follows_from_the_global_fan_in():
    torch.manual_seed(1)

    def main(P):
        row = P[:2].reshape(1, 2, 1, 1)
        layer = DistributedConv2d(row, row, P.reshape(2, 2, 1, 1), in_channels=8, out_channels=40, kernel_size=3)
        largest = layer.weight.abs().max().item()
        assert 0.95 / math.sqrt(8 * 9) < largest <= 1 / math.sqrt(8 * 9)

    on_workers(4, main)


def test_parameters_differ_from_each_other_and_with_the_seed():
    def main(P):
        layout = Layout.balanced(P.reshape(1), (50,))
        torch.manual_seed(1)
        state = torch.get_rng_state()
        one, other = uniform_parameter(layout, 1.0), uniform_parameter(layout, 1.0)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        third = uniform_parameter(layout, 1.0)
        assert len({tuple(p.tolist()) for p in (one, other, third)}) == 3

    on_workers(1, main)


def test_layouts_of_a_network_by_name():
    def main(P):
        row = P.reshape(1, 2)
        layers = [
            DistributedLinear(row, row[:, :1], row, 4, 3),
            torch.nn.Tanh(),
            DistributedLinear(row[:, :1], row, P.reshape(2, 1), 3, 5),
        ]
        network = torch.nn.Sequential(*layers)
        layouts = parameter_layouts(network)
        assert list(layouts) == [f"{k}.sublinear.{name}" for k in (0, 2) for name in ("weight", "bias")]
        assert list(layouts) == [name for name, _ in network.named_parameters()]
        assert layouts["2.sublinear.weight"].extents == (5, 3)

    on_workers(2, main)
