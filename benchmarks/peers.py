"""Training with the samples split, beside torch's own: python benchmarks/peers.py [ROUNDS].

Two gloo processes of one job. A step (forward, backward, AdamW) of each model by torch's DistributedDataParallel and by
distdl with replicated weights, by torch's FSDP2 (``fully_shard`` of each layer) and by distdl with sharded weights, in
turn; and by each process alone on its half of the samples. Medians of all steps, in ms.
"""

import copy
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import distdl

STEPS = 4  # of one way, before the next one; the first is not counted


def encoder():
    layer = nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 128, 128)


def perceptron():
    return nn.Sequential(*[one for _ in range(6) for one in (nn.Linear(512, 512), nn.ReLU())]), torch.randn(256, 512)


def images():
    layers = [one for _ in range(5) for one in (nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 32, 1), *layers, nn.Conv2d(32, 3, 1)), torch.randn(8, 3, 48, 48)


def sharded_by_torch(model):
    for layer in getattr(model, "layers", model):
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def stepping(model, x):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def measure(build, rounds):
    torch.manual_seed(0)
    model, x = build()
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    P = distdl.world().reshape(-1, *[1] * (x.dim() - 1))
    steps = {
        "half": stepping(copy.deepcopy(model), mine),
        "DDP": stepping(nn.parallel.DistributedDataParallel(copy.deepcopy(model)), mine),
        "distdl, replicated": stepping(distdl.distribute(copy.deepcopy(model), P), distdl.distribute_tensor(x, P)),
        "FSDP2": stepping(sharded_by_torch(copy.deepcopy(model)), mine),
        "distdl, sharded": stepping(
            distdl.distribute(copy.deepcopy(model), P, weights="sharded"), distdl.distribute_tensor(x, P)
        ),
    }
    times = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            for number in range(STEPS):
                dist.barrier()
                begun = time.perf_counter()
                step()
                if turn and number:  # (the first of all make plans and buckets)
                    times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(each) * 1000 for name, each in times.items()}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    for build in (encoder, perceptron, images):
        found = measure(build, rounds)
        if not dist.get_rank():
            print(f"{build.__name__}: " + ", ".join(f"{name} {ms:.1f}" for name, ms in found.items()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([*launch, str(Path(__file__)), *sys.argv[1:]], env=environment).returncode)
