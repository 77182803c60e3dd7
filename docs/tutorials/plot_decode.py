"""
Decoding an image without a seam
================================

Models that generate images end with a decoder. Its activations are many times larger than the image, so large images
are often decoded in tiles, each tile alone. Then the tiles do not fit together. This page decodes one photograph both
ways: in tiles, and by distdl, where each worker has one tile, too, but the result has no seam.
"""

import copy

import matplotlib.pyplot as plt
import torch
from matplotlib.cbook import get_sample_data
from torch import nn
from torch.nn import functional as F

import distdl

# %%
# The decoder
# -----------
#
# It is built as that of Stable Diffusion, but small, and it is plain PyTorch. Three things in it look beyond a tile.
# Convolutions read their neighbours. Group norms take means over the whole image. In the attention, every position
# looks at all others.


class Residual(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        y = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x):
        y = self.norm(x).flatten(2).transpose(1, 2)
        y = F.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y))
        return x + self.out(y).transpose(1, 2).reshape(x.shape)


class Decoder(nn.Sequential):
    """From a latent image of 8 channels to a picture of 4 times as many rows and columns."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(8, 32, 3, padding=1), Residual(32, 32), Attention(32), Residual(32, 24),
            nn.Upsample(scale_factor=2), nn.Conv2d(24, 24, 3, padding=1), Residual(24, 16),
            nn.Upsample(scale_factor=2), nn.Conv2d(16, 16, 3, padding=1),
            nn.GroupNorm(8, 16), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1),
        )  # fmt: skip


# %%
# A photograph, and a decoder that knows it
# -----------------------------------------
#
# Matplotlib ships a portrait of Grace Hopper. We train the decoder for some seconds on crops of it, together with an
# encoder that makes the latent image. One worker does that alone. It is no good autoencoder yet, and need not be: we
# only compare how it decodes.

torch.manual_seed(0)
with get_sample_data("grace_hopper.jpg") as file:
    pixels = torch.tensor(plt.imread(file, format="jpg")).permute(2, 0, 1)[None] / 127.5 - 1
photograph = F.avg_pool2d(pixels, 3)[:, :, :200, :168]
decoder = Decoder()
encoder = nn.Sequential(
    nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.SiLU(),
    nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(32, 8, 1), nn.Tanh(),
)  # fmt: skip
optimiser = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 4e-3)
for _ in range(80):
    places = zip(torch.randint(200 - 48, (8,)).tolist(), torch.randint(168 - 48, (8,)).tolist(), strict=True)
    crops = torch.cat([photograph[:, :, i : i + 48, j : j + 48] for i, j in places])
    optimiser.zero_grad()
    loss = F.mse_loss(decoder(encoder(crops)), crops)
    loss.backward()
    optimiser.step()
latent = encoder(photograph).detach()
print(f"The latent image is {tuple(latent.shape)}, the photograph {tuple(photograph.shape)}.")

# %%
# Decode it in three ways
# -----------------------
#
# - **On one worker**: this is what we want to have.
# - **By distdl**, on 2 x 2 workers.
# - **In tiles**: the same blocks, but each is decoded by a decoder that sees nothing else.

GRID = (1, 1, 2, 2)


def decode():
    model = distdl.distribute(copy.deepcopy(decoder), GRID)
    with torch.no_grad():
        return model(distdl.distribute_tensor(latent, GRID)).full_tensor()


with torch.no_grad():
    expected = decoder(latent)
    rows = [torch.cat([decoder(tile) for tile in row.chunk(2, 3)], 3) for row in latent.chunk(2, 2)]
tiled = torch.cat(rows, 2)
seamless = distdl.run_workers(decode, 4)[0]

for title, picture in {"distdl": seamless, "tiles": tiled}.items():
    print(f"{title:>6}: differs from one worker by at most {(picture - expected).abs().max().item():.1e}")

assert (seamless - expected).abs().max() < 1e-4
assert (tiled - expected).abs().max() > 0.1

# %%
# A colour is a number from -1 to 1. What distdl computes differs by rounding. The tiles have a grey line where they
# meet, and other colours on either side of it. The lower row shows how far each is from the picture of one worker. For
# distdl this would be black, so it is multiplied by 100,000.

figure, panels = plt.subplots(2, 3, figsize=(9, 7.4), layout="constrained")
for axes, (title, picture) in zip(
    panels[0], {"one worker": expected, "distdl, 4 workers": seamless, "4 tiles": tiled}.items(), strict=True
):
    axes.imshow(((picture[0].permute(1, 2, 0) + 1) / 2).clamp(0, 1))
    axes.set(title=title, xticks=[], yticks=[])
for axes, picture, factor in ((panels[1, 1], seamless, 100_000), (panels[1, 2], tiled, 1)):
    shown = axes.imshow(factor * (picture - expected)[0].abs().amax(0), cmap="magma", vmin=0, vmax=0.5)
    axes.set(title=f"difference x {factor:,}", xticks=[], yticks=[])
panels[1, 0].axis("off")
scale = figure.colorbar(shown, cax=panels[1, 0].inset_axes([0.85, 0.05, 0.06, 0.9]))
scale.ax.yaxis.set_ticks_position("left")

# %%
# Usually tiles overlap and are blended where they do. That hides the seam, computes the overlaps twice, and still gives
# each tile means of its own.
#
# What moves instead
# ------------------
#
# :func:`distdl.summary` says what worker 0 sends in a forward: cells along the edges of blocks for convolutions, some
# sums for group norms, and keys and values for the attention, where the image is smallest.

table = distdl.summary(decoder, GRID, latent.shape, backward=False)
for row in table.rows:
    for function, size in row.moves.items():
        print(f"{row.path:>7} {row.kind:<10} {function} sends {size} bytes")
print(f"peak of a worker: {table.totals.peak / 2**20:.2f} MiB; alone: {table.sequential.peak / 2**20:.2f} MiB")

assert table.totals.peak < 0.4 * table.sequential.peak

# %%
# ``examples/vae_decode.py`` of the repository is a program of this kind for MPI and ``torchrun``. The decoders of
# diffusers run unmodified, too: :doc:`/details/tried`.
