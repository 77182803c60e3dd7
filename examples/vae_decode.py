"""Decode a latent image over four workers without a seam: the decoder of an autoencoder, in plain torch.

    distdl run -n 4 examples/vae_decode.py       (or: python examples/vae_decode.py [PICTURE.png], with threads)

Pictures that are too large for one device are often decoded in tiles, each alone. Then every tile's convolutions see
zeros where the neighbour's pixels are, its normalisations have other means, and its attention cannot see the rest; the
tiles do not fit together, and the usual remedy is to let them overlap and to blend. ``distdl.distribute`` needs none::

      latent                 decoder: attention, convolutions, group norms, upsampling           picture
     +---+---+                                                                                +-------+-------+
     | 0 | 1 |    convolutions read the cells at the edges from their owners; statistics      |   0   |   1   |
     +---+---+    are those of the whole picture; keys and values come to every query         |       |       |
     | 2 | 3 |    each worker holds a quarter of every activation, and the cells that it      +-------+-------+
     +---+---+    reads of others                                                             |   2   |   3   |
                                                                                              |       |       |
                                                                                              +-------+-------+

The decoder is built as that of diffusers' ``AutoencoderKL`` is, but small. It has no pretrained weights; worker 0
trains it for some seconds on crops of the photograph that it decodes later (a temple under a clear sky, in which one
would see a seam), and ``distribute`` brings its weights to all workers.

It prints how far each way is from the sequential picture, along the seams and elsewhere, and what each worker holds at
most. With a file name it writes the three pictures one above the other: sequential, distributed, and in tiles.
"""

import functools
import sys

import torch
from torch import nn
from torch.nn import functional as F

import distdl
from distdl.workers.footprint import Footprint

LATENT = 8  # channels of a latent image, which has a quarter of the picture's rows and columns
SCALE = 4
STEPS = 60
MARGIN = 8  # pixels on either side of a seam that count as being along it


class Residual(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x):
        y = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Every position attends to all positions of the picture."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x):
        samples, channels, rows, columns = x.shape
        y = self.norm(x).view(samples, channels, rows * columns).transpose(1, 2)
        layers = self.query, self.key, self.value
        q, k, v = (layer(y).view(samples, -1, 1, channels).transpose(1, 2) for layer in layers)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(samples, -1, channels)
        return x + self.out(y).transpose(1, 2).reshape(samples, channels, rows, columns)


class Upsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Decoder(nn.Module):
    """From a latent image to a picture: attention where the picture is smallest, then up and up."""

    def __init__(self, channels=(32, 24, 16)):
        super().__init__()
        first, *rest = channels
        self.conv_in = nn.Conv2d(LATENT, first, 3, padding=1)
        self.middle = nn.Sequential(Residual(first, first), Attention(first), Residual(first, first))
        self.up = nn.Sequential()
        for inputs, outputs in zip(channels, rest, strict=False):
            self.up.extend([Residual(inputs, outputs), Residual(outputs, outputs), Upsample(outputs)])
        self.norm_out, self.conv_out = nn.GroupNorm(8, channels[-1]), nn.Conv2d(channels[-1], 3, 3, padding=1)

    def forward(self, z):
        return self.conv_out(F.silu(self.norm_out(self.up(self.middle(self.conv_in(z))))))


def photograph():
    """A photograph that scikit-learn ships, of half its size: ``(1, 3, 212, 316)``, from -1 to 1."""
    from sklearn.datasets import load_sample_image

    pixels = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1)[None] / 127.5 - 1
    return F.avg_pool2d(pixels, 2)[:, :, :212, :316]


def train(decoder, picture):
    """Train an autoencoder on crops of the picture, and give the latent image of all of it."""
    generator = torch.Generator().manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.SiLU(),
        nn.Conv2d(32, LATENT, 1), nn.Tanh(),
    )  # fmt: skip
    optimiser = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 4e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=STEPS)
    side = 48
    for _ in range(STEPS):
        rows, columns = (
            torch.randint(n - side, (8,), generator=generator).tolist() for n in (picture.shape[2], picture.shape[3])
        )
        crops = torch.cat([picture[:, :, i : i + side, j : j + side] for i, j in zip(rows, columns, strict=True)])
        optimiser.zero_grad()
        F.mse_loss(decoder(encoder(crops)), crops).backward()
        optimiser.step()
        rate.step()
    with torch.no_grad():
        return encoder(picture)


def show(what, decoded, expected, seams):
    """Print how far a picture is from the sequential one."""
    error = (decoded - expected).abs().amax((0, 1))
    along = torch.zeros_like(error, dtype=torch.bool)
    for dim, places in enumerate(seams):
        for place in places:
            along.narrow(dim, place - MARGIN, 2 * MARGIN).fill_(True)
    at_seams, elsewhere = error[along].max().item(), error[~along].max().item()
    print(f"{what}: differs from sequential by at most {at_seams:.1e} along the seams, {elsewhere:.1e} elsewhere")
    return at_seams, elsewhere


def write(path, *pictures):
    from PIL import Image

    pixels = torch.cat(pictures, 2)[0].permute(1, 2, 0)
    Image.fromarray(((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()).save(path)


def main(path=None):
    P = distdl.world()
    grid = P[:4].reshape(1, 1, 2, 2)
    decoder, z = Decoder(), None
    if P.rank == 0:  # one worker has the photograph
        picture = photograph()
        z = train(decoder, picture)
        with torch.no_grad(), Footprint() as sequential:
            expected = decoder(z)

    model = distdl.distribute(decoder, grid, fallback="error")
    latent = distdl.distribute_tensor(z, grid)
    del z
    with torch.no_grad(), Footprint() as own:
        decoded = model(latent)

    alone = Decoder()
    alone.load_state_dict(model.state_dict())  # the whole weights, on every worker
    with torch.no_grad():
        tiles = distdl.GlobalTensor.from_local(alone(latent.to_local()), grid)

    whole, tiled, peaks = decoded.full_tensor(on=0), tiles.full_tensor(on=0), P.allgather_data(own.peak)
    if P.rank == 0:
        error = F.mse_loss(expected, picture).sqrt().item()
        rows, columns = expected.shape[2:]
        print(f"sequential : a picture of {rows} x {columns}, whose error is {error:.2f} (root mean square)")
        seams = [[SCALE * start for start, _ in along[1:]] for along in latent.layout.intervals[2:]]
        exact = show("distributed", whole, expected, seams)
        naive = show("in tiles   ", tiled, expected, seams)
        print(f"sequential holds at most {sequential.peak / 2**20:.1f} MiB")
        for worker, peak in enumerate(peaks[:4]):
            print(f"worker {worker} holds at most   {peak / 2**20:.1f} MiB")
        if path is not None:
            write(path, expected, whole, tiled)
        assert max(exact) < 1e-4 < 0.1 < naive[0], "there is a seam"


if __name__ == "__main__":
    distdl.run_workers(functools.partial(main, *sys.argv[1:2]), 4)
