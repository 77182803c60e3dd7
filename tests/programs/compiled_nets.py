"""Models whose steps become lines in tests, and what a training of each leaves: bits that have to be the same."""

import torch
from torch import nn
from torch.nn import functional

import distdl

STEPS = 6


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.parts, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        samples, length, _ = x.shape
        q, k, v = (
            one.reshape(samples, length, 2, 4).transpose(1, 2) for one in self.parts(self.norm(x)).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(samples, length, 8))


class UNet(nn.Module):
    def __init__(self, channels=4):
        super().__init__()

        def twice(inputs, outputs):
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
                nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            )  # fmt: skip

        self.down, self.bottom = twice(1, channels), twice(channels, 2 * channels)
        self.up, self.merge = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2), twice(2 * channels, channels)
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, x):
        fine = self.down(x)
        coarse = self.up(self.bottom(functional.max_pool2d(fine, 2)))
        return self.head(self.merge(torch.cat([fine, coarse], 1)))


def perceptron():
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 3, 5), nn.Tanh(), nn.MaxPool2d(2, 2), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(16, 10), nn.Tanh(), nn.Linear(10, 4),
    )  # fmt: skip


def dropped():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Dropout(0.3), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))


class Looked(nn.Module):
    """Reads a table at places that are not split, as windows of attention do."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 8))
        self.register_buffer("places", torch.tensor([2, 0, 3, 1, 1, 0, 2]))

    def forward(self, x):
        return x * self.table[self.places]


def grouped():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))


def normalised():
    return nn.Sequential(nn.BatchNorm2d(1), nn.ReLU(), nn.Conv2d(1, 1, 1))


class Noisy(nn.Module):
    """Adds plain noise, which torch draws."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.conv(x) + 0.1 * torch.rand(16, 16)


SPACE, ROWS, BATCH = (1, 1, -1, 1), (1, 1, 1, -1), (-1, 1, 1)
PICTURE, LINES = (3, 1, 16, 16), (5, 7, 8)
NETS = {
    "perceptron": (perceptron, BATCH, LINES, LINES, {}),
    "lenet": (lenet, SPACE, PICTURE, (3, 4), {}),
    "u-net": (UNet, SPACE, PICTURE, PICTURE, {}),
    "u-net-columns": (UNet, ROWS, PICTURE, PICTURE, {}),
    "dropout": (dropped, SPACE, PICTURE, PICTURE, {}),
    "noise": (Noisy, SPACE, PICTURE, PICTURE, {}),
    "attention": (Attention, BATCH, LINES, LINES, {}),
    "attention-length": (Attention, (1, -1, 1), LINES, LINES, {}),
    "table": (Looked, BATCH, LINES, LINES, {}),
    "empty-blocks": (normalised, SPACE, (3, 1, 3, 4), (3, 1, 3, 4), {}),  # on four workers
    "group-norm": (grouped, SPACE, PICTURE, PICTURE, {}),
    "perceptron-sharded": (perceptron, BATCH, LINES, LINES, {"weights": "sharded"}),
    "u-net-sharded": (UNet, SPACE, PICTURE, PICTURE, {"weights": "sharded"}),
}


def weighted(model, seed=0):
    """The model with weights that are the same on every worker."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=generator) * 0.3)
    return model


def noise(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(tensor):
    tensor = tensor.detach()
    return (tensor._block if type(tensor) is distdl.GlobalTensor else tensor).clone()


def trained(name, wrap, steps=STEPS, zero=True, of="step"):
    """Train on this worker. Returns what was wrapped, and the bits that each step leaves.

    Args:
        of: what is wrapped: ``step``, or ``model``, whose inputs require gradients then.
    """
    make, grid, extents, targets, options = NETS[name]
    P = distdl.world()
    grid = tuple(P.comm.size if n == -1 else n for n in grid)
    model = distdl.distribute(weighted(make()), grid, **options)
    optimiser = torch.optim.AdamW(model.parameters(), 0.01)
    called = wrap(model) if of == "model" else model

    def step(x, target):
        loss = functional.mse_loss(called(x), target)
        loss.backward()
        return loss

    step = wrap(step) if of == "step" else step
    of_target = grid if len(targets) == len(extents) else (P.comm.size, 1)
    left = []
    for number in range(steps):
        x = distdl.distribute_tensor(noise(extents, number), grid).requires_grad_(of == "model")
        target = distdl.distribute_tensor(noise(targets, 100 + number), of_target)
        if zero:
            optimiser.zero_grad()
        loss = step(x, target)
        found = [("loss", bits(loss))] + ([("gradient of x", bits(x.grad))] if of == "model" else [])
        found += [(f"gradient of {key}", bits(one.grad)) for key, one in model.named_parameters()]
        optimiser.step()
        found += [(key, bits(one)) for key, one in (*model.named_parameters(), *model.named_buffers())]
        left.append(found)
    return (step if of == "step" else called), left
