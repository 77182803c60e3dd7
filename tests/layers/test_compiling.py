"""``torch.compile`` over networks of distributed layers: each layer is a break in the graph."""

import pytest
import torch
from helpers_layers import on_workers

from distdl.nn import DistributedBatchNorm, DistributedConv1d, DistributedMSELoss, Module, Repartition

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.timeout(120),  # the compiler alone takes seconds to import
    # the compiler looks at it, and hides what torch says of that in a way that a filter for errors comes before
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Network(torch.nn.Module):
    def __init__(self, P):
        super().__init__()
        grid = P[:3].reshape(1, 1, 3)  # the last worker is idle
        self.scatter = Repartition(P[:1].reshape(1, 1, 1), grid)
        self.convolution = DistributedConv1d(grid, in_channels=2, out_channels=3, kernel_size=3, padding=1)
        self.norm = DistributedBatchNorm(grid, 3)
        self.gather = Repartition(grid, P[:1].reshape(1, 1, 1))

    def forward(self, x):
        y = torch.tanh(self.convolution(self.scatter(x) * 2)) + 1
        return self.gather(self.norm(y).square() - 3)


def gradients(network, x, call):
    network.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in network.parameters())]


def test_a_compiled_network_gives_the_same_numbers_and_is_compiled_between_its_layers():
    def main(P):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph.code)
            return graph.forward

        network = Network(P)
        compiled = torch.compile(network, backend=backend)
        for samples in (2, 2, 3):  # the last with other shapes
            x = torch.randn(samples if P.rank == 0 else 0, 2, 7, generator=torch.Generator().manual_seed(samples))
            for one, other in zip(gradients(network, x, compiled), gradients(network, x, network), strict=True):
                assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
        assert any("tanh" in code for code in graphs) and any("square" in code for code in graphs)

    on_workers(4, main)


def test_the_eager_back_end_over_layers_in_sequence_and_a_loss():
    def main(P):
        grid = P.reshape(1, 1, 2)
        network = torch.nn.Sequential(
            DistributedConv1d(grid, in_channels=1, out_channels=2, kernel_size=3), torch.nn.ReLU()
        )
        loss, x = DistributedMSELoss(grid), torch.arange(3.0).reshape(1, 1, 3) + P.rank
        step = torch.compile(lambda x: loss(network(x), torch.ones(1, 2, 2)), backend="eager")
        expected = gradients(network, x, lambda x: loss(network(x), torch.ones(1, 2, 2)))
        for _ in range(2):
            for one, other in zip(gradients(network, x, step), expected, strict=True):
                assert torch.allclose(one, other)

    on_workers(2, main)


def test_a_layer_of_a_users_own_is_a_break_in_the_graph():
    class Doubled(Module):
        def __init__(self, P):
            super().__init__()
            self.P = P

        def forward(self, x):
            assert not torch.compiler.is_dynamo_compiling()
            return x * self.P.allreduce_data(2)

    def main(P):
        layer = Doubled(P)
        y = torch.compile(lambda x: layer(x + 1) - 1, backend="eager")(torch.ones(2))
        assert y.tolist() == [8 * P.size / 2 - 1] * 2

    on_workers(2, main)
