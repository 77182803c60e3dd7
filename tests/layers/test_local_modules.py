"""What needs no layer: torch's element-wise modules, sums, and concatenation along a dim that is not split."""

import pytest
import torch
from helpers_layers import filled, noise, on_workers, penalty
from torch import nn

from distdl.geometry.boxes import balanced, runs, slices
from distdl.nn import DistributedConv1d, DistributedMSELoss, DistributedPad, local
from distdl.nn.placement import parameter_layouts
from distdl.partition.layout import Layout
from distdl.utilities.torch import zero_volume_tensor

ELEMENT_WISE = [
    nn.ReLU(), nn.LeakyReLU(), nn.ELU(), nn.GELU(), nn.SiLU(), nn.Mish(), nn.Softplus(), nn.Tanh(), nn.Sigmoid(),
    nn.Hardtanh(), nn.Hardswish(), nn.LogSigmoid(), nn.Softsign(), nn.Identity(), nn.Dropout(0.5).eval(),
]  # fmt: skip


class Network(nn.Module):
    """Two convolutions with what torch does between them, block by block or on the whole tensor."""

    def __init__(self, first, second, module):
        super().__init__()
        self.first, self.second, self.module = first, second, module

    def forward(self, x):
        y = self.module(self.first(x))
        y = torch.cat([y, x, 2 * y], 1)  # the channels, which are not split
        y = y + torch.sin(y) * y
        return self.module(self.second(y)) - y[:, :2]


@pytest.mark.parametrize(("workers", "grid", "batches", "cells"), [
    (1, (1, 1, 1), [3], 5),
    (2, (1, 1, 2), [3], 1),
    (3, (1, 1, 3), [2], 5),
    (4, (2, 1, 2), [3, 1], 5),
    (6, (2, 1, 3), [3, 0], 2),
])  # fmt: skip
def test_a_network_with_local_modules_matches_the_sequential_one(workers, grid, batches, cells):
    """With two workers beside, an empty block of the batch and one of space; loss and gradients, once and twice."""

    def main(P):
        P_x = P.create_partition_inclusive([*range(1, workers), workers + 1]).create_cartesian_topology_partition(grid)
        blocks = [runs(batches), [(0, 2)], balanced(cells, grid[2])]
        owned = Layout.of(P_x, blocks)
        whole, target = noise(sum(batches), 2, cells), noise(sum(batches), 2, cells, seed=1)
        for module in (nn.ReLU(), nn.Tanh(), nn.Dropout(0.5).eval()):
            layers = [DistributedConv1d(P_x, in_channels=n, out_channels=2, kernel_size=3, padding=1) for n in (2, 6)]
            network = Network(*layers, module).double()
            sequential = filled(Network(*[nn.Conv1d(n, 2, 3, padding=1) for n in (2, 6)], module))
            for (name, layout), value in zip(parameter_layouts(network).items(), sequential.parameters(), strict=True):
                network.get_parameter(name).data = layout.block(value.detach()).clone()
            x = whole.clone().requires_grad_()
            expected = nn.MSELoss()(sequential(x), target)
            local = owned.block(whole).clone() if P_x.active else zero_volume_tensor(3, dtype=torch.float64)
            local.requires_grad_()
            t = owned.block(target) if P_x.active else zero_volume_tensor(3, dtype=torch.float64)
            loss = DistributedMSELoss(P_x)(network(local), t)
            assert abs(loss.item() - (expected.item() if P.rank == P_x.workers.flat[0] else 0.0)) < 1e-12
            (dx,) = torch.autograd.grad(expected, x, create_graph=True)
            (own,) = torch.autograd.grad(loss, local, create_graph=True)
            check(P, owned, own, dx.detach())
            ((dx**2).sum() + expected).backward()
            ((own**2).sum() + loss).backward()
            check(P, owned, local.grad, x.grad)
            for (name, layout), value in zip(parameter_layouts(network).items(), sequential.parameters(), strict=True):
                assert torch.allclose(network.get_parameter(name).grad, layout.block(value.grad), rtol=1e-10)

    on_workers(workers + 2, main)


def check(P, owned, gradient, expected):
    assert gradient is not None
    if P.rank in owned.partition:
        assert torch.allclose(gradient, expected[slices(owned[P.rank])], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("module", ELEMENT_WISE, ids=lambda module: type(module).__name__)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0), (0, 2, 4), (2, 3, 0)])
def test_element_wise_modules_keep_tensors_of_zero_volume_and_their_graph(module, shape):
    """So each worker that has moved something before them comes past that again in backward, twice as well."""
    x = torch.zeros(shape, requires_grad=True)
    y = module(x * 1)
    (dx,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    assert y.shape == dx.shape == x.shape and y.requires_grad and dx.requires_grad
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    assert ddx.shape == x.shape


def test_sums_and_concatenations_of_tensors_of_zero_volume():
    x = torch.zeros(3, 0, requires_grad=True)
    for dim, shape in ((0, (6, 0)), (1, (3, 0)), (-1, (3, 0))):
        y = torch.cat([x * x, x], dim)
        assert y.shape == shape and torch.autograd.grad(y.sum(), x, create_graph=True)[0].requires_grad
    assert (x + torch.zeros(3, 0)).shape == (3, 0)
    assert (torch.zeros(0, 0) + torch.zeros(0)).shape == (0, 0)
    with pytest.raises(IndexError):  # there is no such dim where a worker has no part: see docs/layers/index.md
        torch.cat([x, x], 2)


TRANSFORMS = {
    "fft": (torch.fft.fft, (3, 5)),
    "rfft": (torch.fft.rfft, (3, 3)),
    "fft2": (torch.fft.fft2, (3, 5)),
    "irfft": (lambda x: torch.fft.irfft(torch.complex(x, 2 * x), n=4), (3, 4)),
}


@pytest.mark.parametrize("empty", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_no_elements_have_a_graph(name, empty):
    transform, result = TRANSFORMS[name]
    shape = tuple(given and extent for given, extent in zip(empty, (2, *result), strict=True))
    x = torch.zeros(empty, dtype=torch.float64, requires_grad=True)
    y = local(transform, shape, (x, (1, 1, 5)))
    assert y.shape == shape and y.is_complex() == (name != "irfft")
    (dx,) = torch.autograd.grad((y.abs() ** 3).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad((dx**2).sum(), x)
    assert ddx.shape == dx.shape == x.shape and ddx.dtype == x.dtype


def autocorrelation(x):
    spectrum = torch.fft.rfft(x)
    return torch.fft.irfft(spectrum * spectrum.conj(), n=x.shape[-1])


def test_a_fourier_transform_along_a_dim_that_is_not_split():
    """Rows that move before it and after it, a worker without rows, and one outside; differentiated twice."""

    def main(P):
        P_x = P[1:].reshape(1, 1, 4, 1)
        before, after = DistributedPad(P_x, (0, 0, 1, 0), "circular"), DistributedPad(P_x, (0, 0, -1, 0))
        rows = [1, 1, 1, 0][P.rank - 1]
        blocks = (2, 3, rows, 5) if P.rank else (2, 0)
        whole = noise(2, 3, 2, 5).requires_grad_()

        def network(x):
            return after(local(autocorrelation, blocks, (before(x), (1, 1, 1, 5))))

        def sequential(x):
            return autocorrelation(nn.functional.pad(x, (0, 0, 1, 0), "circular"))[:, :, 1:]

        penalty(sequential, whole, 3).backward()
        owned = Layout.of(P_x, [runs([2]), runs([3]), runs([0, 2, 0, 0]), runs([5])])
        x = owned.block(whole.detach()).clone() if P.rank else torch.zeros((2, 0), dtype=torch.float64)
        penalty(network, x.requires_grad_(), 3).backward()
        assert x.grad.shape == x.shape
        assert not P.rank or torch.allclose(x.grad, owned.block(whole.grad), rtol=1e-10)

    on_workers(5, main)
