"""Measure steps of whole models on a GPU: python benchmarks/gpu.py [--repeats N] [--device cpu].

Alone, one worker: torch's network on plain tensors (*plain*), the same by ``distdl.distribute`` (*global*), and both as
CUDA graphs. Under ``torchrun --nproc-per-node 2``, over NCCL with a GPU for each: *global* over the rows, and torch's
network on this worker's half of the rows (*share*), eager and as graphs. Two processes that share one GPU measure
what the messages and the other half's work cost together (NCCL refuses that, unless NCCL_HOSTID differs).

float32, forward, backward and a step of SGD. The ways take turns; what is printed is medians in ms, of the slowest
worker.
"""

import argparse
import copy
import json
import statistics
import time
import warnings

import networks
import torch
from networks import Plain, UNet
from torch import nn

import distdl

CASES = {
    "UNet 64x64": (lambda: UNet(Plain(2), 32), (1, 1, 64, 64), (1, 2, 64, 64)),
    "UNet 256x256": (lambda: UNet(Plain(2), 32), (1, 1, 256, 256), (1, 2, 256, 256)),
    "UNet 1024x1024": (lambda: UNet(Plain(2), 32), (1, 1, 1024, 1024), (1, 2, 1024, 1024)),
    "UNet 2048x2048": (lambda: UNet(Plain(2), 32), (1, 1, 2048, 2048), (1, 2, 2048, 2048)),
    "UNet 128x128x128": (lambda: UNet(Plain(3), 16), (1, 1, 128, 128, 128), (1, 2, 128, 128, 128)),
    "ResNet-18 8x224x224": (lambda: networks.resnet18(Plain(2)), (8, 3, 224, 224), None),
    "ResNet-18 64x224x224": (lambda: networks.resnet18(Plain(2)), (64, 3, 224, 224), None),
    "Decoder 48x48": (lambda: networks.decoder(), (1, 8, 48, 48), (1, 3, 192, 192)),
}


def training(network, x, truth):
    """A step, in which every gradient is made anew."""
    optimiser = torch.optim.SGD(network.parameters(), lr=0.01)
    loss = nn.functional.mse_loss if truth.is_floating_point() else nn.functional.cross_entropy

    def step():
        optimiser.zero_grad()
        loss(network(x), truth).backward()
        optimiser.step()

    return step


def graphed(step):
    """The replay of a step, which keeps what it reads and writes."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()

    def replay(kept=step):
        graph.replay()

    return replay


def ways(P, build, shape, target, device):
    """From the name of a way to its step."""
    made = build().to(device)
    x = torch.randn(shape, device=device)
    truth = torch.arange(shape[0], device=device) if target is None else torch.randn(target, device=device)
    rows = P.reshape(1, 1, P.size, *[1] * (len(shape) - 3))
    first = P.rank == 0
    network = distdl.distribute(copy.deepcopy(made), rows, fallback="error")
    labels = distdl.distribute_tensor(truth if first else None, rows, axes=(0,) if target is None else None)
    steps = {"global": lambda: training(network, distdl.distribute_tensor(x if first else None, rows), labels)}
    if P.size == 1:
        steps = {"plain": lambda: training(copy.deepcopy(made), x, truth), **steps}
    else:
        part = x.chunk(P.size, 2)[0].clone()
        own = truth if target is None else truth.chunk(P.size, 2)[0].clone()
        steps = {"share": lambda: training(copy.deepcopy(made), part, own), **steps}
    found = {name: make() for name, make in steps.items()}
    if device == "cuda":
        found |= {f"{name}, graph": graphed(make()) for name, make in steps.items()}
    return found


def measure(P, steps, repeats, wait):
    """Medians of the slowest worker's ms."""
    for step in steps.values():
        for _ in range(5):
            step()
    times = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            wait()
            P.allgather_data(torch.zeros(1))
            begin = time.perf_counter()
            for _ in range(5):
                step()
            wait()
            times[name].append((time.perf_counter() - begin) / 5 * 1e3)
    everyone = [json.loads(one) for one in P.allgather_data(json.dumps(times))]
    return {name: statistics.median(map(max, *(one[name] for one in everyone), [0] * repeats)) for name in times}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    given = parser.parse_args()
    wait = torch.cuda.synchronize if given.device == "cuda" else lambda: None
    P = distdl.world()
    torch.backends.cudnn.benchmark = True
    if P.rank == 0:
        kind = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
        print(f"{kind}, torch {torch.__version__}, {P.size} workers; ms a step (ratio to the first)", flush=True)
    for name in given.cases:
        build, shape, target = CASES[name]
        torch.manual_seed(0)
        found = measure(P, ways(P, build, shape, target, given.device), given.repeats, wait)
        if P.rank == 0:
            [base, *_] = found.values()
            print(f"{name:22}", "  ".join(f"{way} {t:.2f} ({t / base:.2f})" for way, t in found.items()), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    main()
