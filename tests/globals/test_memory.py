"""A worker needs what it stores of the weights, and its share of the activations of the sequential run."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distdl
from distdl.workers.footprint import Footprint


class Block(nn.Module):
    def __init__(self, dims, inputs, outputs):
        super().__init__()
        convolution, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
        self.first = convolution(inputs, outputs, 3, padding=1)
        self.second = convolution(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = norm(outputs), norm(outputs)

    def forward(self, x):
        x = F.relu(self.norm1(self.first(x)), inplace=True)
        return F.relu(self.norm2(self.second(x)), inplace=True)


class UNet(nn.Module):
    def __init__(self, dims, channels=(8, 16, 32)):
        super().__init__()
        up, coarser = getattr(nn, f"ConvTranspose{dims}d"), channels[:0:-1]
        self.pool = getattr(nn, f"MaxPool{dims}d")(2)
        self.down = nn.ModuleList(Block(dims, i, o) for i, o in zip((1, *channels[:-1]), channels, strict=True))
        self.up = nn.ModuleList(up(o, i, 2, stride=2) for i, o in zip(channels[-2::-1], coarser, strict=True))
        self.merge = nn.ModuleList(Block(dims, 2 * i, i) for i in channels[-2::-1])
        self.head = getattr(nn, f"Conv{dims}d")(channels[0], 2, 1)

    def forward(self, x):
        kept = []
        for block in self.down[:-1]:
            x = block(x)
            kept.append(x)
            x = self.pool(x)
        x = self.down[-1](x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x, beside = up(x), kept.pop()
            missing = [n - m for n, m in zip(beside.shape[2:], x.shape[2:], strict=True)]
            if any(missing):
                x = F.pad(x, [width for n in reversed(missing) for width in (0, n)], mode="replicate")
            x = merge(torch.cat([beside, x], 1))
        return self.head(x)


def _noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _unet(dims):
    model = UNet(dims)
    with torch.no_grad():  # (workers that are threads have one generator of random numbers)
        for weight in model.parameters():
            weight.copy_(_noise(*weight.shape) / 10)
    return model


def _train(model, x, truth):
    """Most bytes that were held in two steps, and the last loss."""
    optimiser = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    with Footprint() as footprint:
        footprint.count(*model.parameters())
        for _ in range(2):
            optimiser.zero_grad()
            loss = F.mse_loss(model(x), truth)
            loss.backward()
            optimiser.step()
    return footprint.peak, loss.item()


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        pytest.param((251, 198), (2, 2), id="2-d", marks=pytest.mark.every_case),
        pytest.param((384, 128), (4, 1), id="2-d, over rows"),
        pytest.param((90, 98, 24), (2, 2, 1), id="3-d"),
    ],
)
def test_a_worker_needs_its_share_of_a_unet(shape, grid):
    """Over four of five workers; the fifth holds no activations."""

    def work():
        root = distdl.world()
        P = root[:4].reshape(1, 1, *grid)
        x, truth = _noise(1, 1, *shape), _noise(1, 2, *shape)
        sequential = torch.zeros(2, dtype=torch.float64)
        if root.rank == 0:
            sequential = torch.tensor(_train(_unet(len(shape)), x.clone(), truth.clone()), dtype=torch.float64)
        peak, loss = distdl.distribute_tensor(sequential, root[:1].reshape(1)).full_tensor().tolist()
        model = distdl.distribute(_unet(len(shape)), P, fallback="error")
        stored = 3 * sum(weight.nbytes for weight in model.parameters())  # with gradients and momenta
        x, truth = distdl.distribute_tensor(x, P), distdl.distribute_tensor(truth, P)
        own, found = _train(model, x, truth)
        assert abs(found - loss) < 1e-4
        most = stored + (peak - stored) / 4 if root.rank < 4 else 2 * stored
        assert own <= 1.15 * most, f"worker {root.rank} needs {own} bytes, {own / most:.3f} of {most:.0f}"

    distdl.run_workers(work, 5)
