"""What it takes to meet a size for the first time: python benchmarks/sizes.py.

The forward of a model, without gradients, on two MPI workers, by global tensors: pictures of ever other sizes, of which
each comes four times, and a text that grows by a word at a time, with samples split. The first time, plans are made;
later they are found. Medians of the slower worker, in milliseconds, beside torch on one worker with half of the rows
or samples.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import networks
import torch
from networks import Plain, UNet, decoder, distributed
from run import BIN, ENVIRONMENT
from torch import nn

import distdl

WORDS, FEATURES, HEADS, REPEATS = 100, 64, 4, 4


class Layer(nn.Module):
    """Causal attention and a perceptron, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(FEATURES) for _ in range(2))
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.mlp = networks.mlp(FEATURES, 4 * FEATURES)

    def forward(self, x):
        samples, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(samples, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


def text():
    return nn.Sequential(nn.Embedding(WORDS, FEATURES), *[Layer() for _ in range(4)], nn.Linear(FEATURES, WORDS))


def smooth():
    """Down and up again by bilinear and bicubic interpolation, with group norms, as decoders of pictures do."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Upsample(scale_factor=2, mode="bicubic"),
        nn.Conv2d(16, 1, 3, padding=1),
    )  # fmt: skip


def picture(channels):
    return lambda at: torch.ones(1, channels, 48 + 8 * at, 64)


# of each model: how it is made, its input, the dim that is split
CASES = {
    "U-Net of 16 channels": (lambda: UNet(Plain(2), 16), picture(1), 2),
    "bilinear and bicubic": (smooth, picture(1), 2),
    "decoder with attention": (decoder, picture(8), 2),
    "growing text": (text, lambda at: torch.zeros(4, 20 + at, dtype=torch.int64), 0),
}


def seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measured(make, given, dim, P):
    """Milliseconds of the first call for a size, of later ones, and of torch on its part."""
    torch.manual_seed(0)
    sequential = make().eval()
    model = distributed(make().eval(), P.reshape(*[P.size if one == dim else 1 for one in range(given(0).dim())]))
    first, later, half = [], [], []
    for at in range(12):
        x = given(at)
        part = x.chunk(P.size, dim)[0].clone()
        times = [seconds(lambda x=x: model(x)) for _ in range(REPEATS)]
        alone = [seconds(lambda part=part: sequential(part)) for _ in range(REPEATS)]
        if at > 1:  # (before, libraries are imported)
            first.append(times[0])
            later.append(min(times[1:]))
            half.append(min(alone))
    mine = [1e3 * statistics.median(one) for one in (first, later, half)]
    return [max(both) for both in zip(*map(json.loads, P.allgather_data(json.dumps(mine))), strict=True)]


def main():
    if "worker" not in sys.argv:
        command = [BIN / "mpirun", "-n", "2", "--oversubscribe", sys.executable, Path(__file__), "worker"]
        subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True)
        return
    P = distdl.world()
    if P.rank == 0:
        print(f"{'':24}{'first':>10}{'later':>10}{'torch':>10}")
    with torch.inference_mode():
        for name, case in CASES.items():
            found = measured(*case, P)
            if P.rank == 0:
                print(f"{name:24}" + "".join(f"{one:10.1f}" for one in found), flush=True)


if __name__ == "__main__":
    main()
