"""The networks of the page of models. Each is written once, and built of torch's layers or of distdl's."""

import torch
from torch import nn

import distdl
import distdl.nn as dnn


class Plain:
    """torch's layers, of some number of dims."""

    def __init__(self, dims):
        self.dims = dims

    def conv(self, inputs, outputs, kernel=3, stride=1, bias=True):
        return self._of("Conv")(inputs, outputs, kernel, stride, kernel // 2, bias=bias)

    def up(self, inputs, outputs):
        return self._of("ConvTranspose")(inputs, outputs, 2, stride=2)

    def norm(self, channels):
        return self._of("BatchNorm")(channels)

    def pool(self, kernel, stride, padding=0):
        return self._of("MaxPool")(kernel, stride, padding)

    def head(self, channels, classes):
        """Means over space, and scores of classes."""
        return nn.Sequential(self._of("AdaptiveAvgPool")(1), nn.Flatten(), nn.Linear(channels, classes))

    def _of(self, family):
        return getattr(nn, f"{family}{self.dims}d")


class Split(Plain):
    """distdl's modules in their place, over a partition of samples, channels and space."""

    def __init__(self, P):
        super().__init__(P.dim - 2)
        self.P = P

    def conv(self, inputs, outputs, kernel=3, stride=1, bias=True):
        return self._of("Conv")(
            self.P, in_channels=inputs, out_channels=outputs, kernel_size=kernel, stride=stride, padding=kernel // 2,
            bias=bias,
        )  # fmt: skip

    def up(self, inputs, outputs):
        return self._of("ConvTranspose")(self.P, in_channels=inputs, out_channels=outputs, kernel_size=2, stride=2)

    def norm(self, channels):
        return dnn.DistributedBatchNorm(self.P, channels)

    def pool(self, kernel, stride, padding=0):
        return self._of("MaxPool")(self.P, kernel, stride, padding)

    def head(self, channels, classes):
        first = self.P[tuple(slice(1) for _ in range(self.P.dim))]
        alone = first.reshape(1, 1)
        return nn.Sequential(
            self._of("AdaptiveAvgPool")(self.P, 1),
            dnn.Repartition(self.P, first),
            nn.Flatten(),
            dnn.DistributedLinear(alone, alone, alone, channels, classes),
        )

    def _of(self, family):
        return getattr(dnn, f"Distributed{family}{self.dims}d")


class UNet(nn.Module):
    """Three levels, two convolutions at each, normalised over the batch."""

    def __init__(self, of, channels):
        super().__init__()
        fine, middle, coarse = channels, 2 * channels, 4 * channels

        def twice(inputs, outputs):
            return nn.Sequential(
                of.conv(inputs, outputs), of.norm(outputs), nn.ReLU(inplace=True),
                of.conv(outputs, outputs), of.norm(outputs), nn.ReLU(inplace=True),
            )  # fmt: skip

        self.down = nn.ModuleList([twice(1, fine), twice(fine, middle), twice(middle, coarse)])
        self.pool = of.pool(2, 2)
        self.up = nn.ModuleList([of.up(coarse, middle), of.up(middle, fine)])
        self.merge = nn.ModuleList([twice(2 * middle, middle), twice(2 * fine, fine)])
        self.head = of.conv(fine, 2, 1)

    def forward(self, x):
        kept = []
        for block in self.down[:-1]:
            x = block(x)
            kept.append(x)
            x = self.pool(x)
        x = self.down[-1](x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, of, inputs, outputs, stride):
        super().__init__()
        self.way = nn.Sequential(
            of.conv(inputs, outputs, 3, stride, bias=False), of.norm(outputs), nn.ReLU(inplace=True),
            of.conv(outputs, outputs, bias=False), of.norm(outputs),
        )  # fmt: skip
        self.shortcut = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(of.conv(inputs, outputs, 1, stride, bias=False), of.norm(outputs))

    def forward(self, x):
        return torch.relu(self.way(x) + self.shortcut(x))


def resnet18(of):
    """He et al., arXiv:1512.03385, table 1."""
    stages, inputs = [], 64
    for outputs in (64, 128, 256, 512):
        stages += [Residual(of, inputs, outputs, 1 if outputs == inputs else 2), Residual(of, outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(
        of.conv(3, 64, 7, 2, bias=False), of.norm(64), nn.ReLU(inplace=True), of.pool(3, 2, 1), *stages,
        of.head(512, 1000),
    )  # fmt: skip


class _Meet(torch.autograd.Function):
    """Wait for the other workers, forward and backward."""

    @staticmethod
    def forward(ctx, x, barrier):
        ctx.barrier = barrier
        barrier()
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        ctx.barrier()
        return dy, None


def in_step(network, barrier):
    """The same network, in which all workers wait for each other after each layer that has weights."""
    for module in network.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(lambda module, inputs, y: _Meet.apply(y, barrier))
    return network


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Tanh(), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


def split_lenet(P):
    """Over rows, and where there are no more rows, over features."""
    n = P.size
    space, features = P.reshape(1, 1, n, 1), P.reshape(1, n)
    first, weights = P[:1].reshape(1, 1), P.reshape(n, 1)
    return nn.Sequential(
        dnn.DistributedConv2d(space, in_channels=1, out_channels=6, kernel_size=5), nn.Tanh(),
        dnn.DistributedMaxPool2d(space, 2, 2),
        dnn.DistributedConv2d(space, in_channels=6, out_channels=16, kernel_size=5), nn.Tanh(),
        dnn.DistributedMaxPool2d(space, 2, 2),
        dnn.Repartition(space, P[:1].reshape(1, 1, 1, 1)), nn.Flatten(),
        dnn.DistributedLinear(first, features, weights, 400, 120), nn.Tanh(),
        dnn.DistributedLinear(features, first, P.reshape(1, n), 120, 84), nn.Tanh(),
        dnn.DistributedLinear(first, first, first, 84, 10),
    )  # fmt: skip


def mlp(features, hidden):
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, features))


def split_mlp(P, features, hidden):
    """Hidden features split over the workers, as in Megatron-LM (arXiv:1909.08053)."""
    n, first, along = P.size, P[:1].reshape(1, 1), P.reshape(1, P.size)
    return nn.Sequential(
        dnn.DistributedLinear(first, along, P.reshape(n, 1), features, hidden), nn.ReLU(),
        dnn.DistributedLinear(along, first, P.reshape(1, n), hidden, features),
    )  # fmt: skip


class Attention(nn.Module):
    """Every position attends to all positions of the picture."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x):
        samples, channels, rows, columns = x.shape
        y = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (layer(y).unsqueeze(1) for layer in (self.query, self.key, self.value))
        y = self.out(nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + y.transpose(1, 2).reshape(samples, channels, rows, columns)


def decoder():
    """The decoder of an autoencoder, built as that of diffusers' AutoencoderKL is, but small."""

    def block(inputs, outputs):
        return [nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)]

    return nn.Sequential(
        nn.Conv2d(8, 64, 3, padding=1), *block(64, 64), Attention(64), *block(64, 64), nn.Upsample(scale_factor=2),
        *block(64, 32), *block(32, 32), nn.Upsample(scale_factor=2), *block(32, 16), *block(16, 3),
    )  # fmt: skip


def distributed(network, P, weights="replicated"):
    """A network of torch's layers, by ``distdl.distribute``."""
    return distdl.distribute(network, P, weights=weights, fallback="error")


def training(network, criterion, x, target):
    """A step, in which every gradient is made anew."""
    optimiser = torch.optim.SGD(network.parameters(), lr=0.01)

    def step():
        optimiser.zero_grad()
        criterion(network(x), target).backward()
        optimiser.step()

    return step
