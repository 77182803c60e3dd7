"""Compiled steps of whole models: python benchmarks/programs.py [--launches N] [--models NAME ...] [--ways WAY ...].

Two MPI workers, float32, forward and backward. *eager* is torch's network by ``distdl.distribute``, *line* and
*inductor* are its step by ``distdl.compile``, *half* is torch's network on this worker's half of the data. Ways take
turns. What is printed is the slowest worker's time as a ratio to half, the median over all launches; of one worker
alone, to torch. Beside it stands the goal.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import networks
import torch
from networks import Plain, UNet
from torch import nn

import distdl

WAYS = ("eager", "line", "inductor")
MODELS = {  # how it is built, shapes of data and target (None: classes), workers, goals of the line and of inductor
    "U-Net 64x64": (lambda: UNet(Plain(2), 32), (1, 1, 64, 64), (1, 2, 64, 64), 2, (1.25, 1.12)),
    "U-Net 32x32": (lambda: UNet(Plain(2), 16), (1, 1, 32, 32), (1, 2, 32, 32), 2, (1.7, 1.4)),
    "U-Net 256x256": (lambda: UNet(Plain(2), 32), (1, 1, 256, 256), (1, 2, 256, 256), 2, (1.06, 1.0)),
    "LeNet": (networks.lenet, (32, 1, 32, 32), None, 2, (1.35, 1.25)),
    "ResNet-18": (lambda: networks.resnet18(Plain(2)), (8, 3, 224, 224), None, 2, (1.12, 1.08)),
    "decoder": (networks.decoder, (1, 8, 48, 48), (1, 3, 192, 192), 2, (1.35, 1.2)),
    "perceptron": (lambda: networks.mlp(512, 2048), (512, 512), (512, 512), 2, (1.2, 1.15)),
    "U-Net 64x64, alone": (lambda: UNet(Plain(2), 32), (1, 1, 64, 64), (1, 2, 64, 64), 1, (1.02, None)),
}


def stepping(network, criterion, wrap, *data):
    """A step that makes every gradient anew."""

    def step(x, target):
        loss = criterion(network(x), target)
        loss.backward()
        return loss

    step = wrap(step)

    def run():
        network.zero_grad()
        step(*data)

    return run


def ways(P, name, wanted):
    build, shape, target, _, _ = MODELS[name]
    n, x = P.size, torch.randn(shape)
    truth = torch.arange(shape[0]) % 10 if target is None else torch.randn(target)
    criterion = nn.functional.cross_entropy if target is None else nn.functional.mse_loss
    is_table = len(shape) == 2
    grid = P.reshape(n, 1) if is_table else P.reshape(1, 1, n, 1)
    split = 0 if is_table or name == "LeNet" else 2  # no part of LeNet's rows alone passes through it
    part = x.chunk(n, split)[0].clone()
    own = truth.chunk(n, split)[0].clone() if target is not None or split == 0 else truth
    found = {"half": stepping(build(), criterion, lambda one: one, part, own)}
    given = distdl.distribute_tensor(x, grid), truth if target is None else distdl.distribute_tensor(truth, grid)
    wraps = {
        "eager": lambda one: one,
        "line": distdl.compile,
        "inductor": lambda one: distdl.compile(one, backend="inductor"),
    }
    for way in wanted:
        network = networks.distributed(build(), grid, "sharded" if is_table else "replicated")
        found[way] = stepping(network, criterion, wraps[way], *given)
    return found


def worker(file, names, wanted, repeats):
    P = distdl.world()
    rows = {}
    for name in names:
        torch.manual_seed(0)
        steps = ways(P, name, wanted)
        for step in steps.values():
            for _ in range(6):  # the fifth call is the replay before which inductor compiles
                step()
        times = {way: [] for way in steps}
        for _ in range(repeats):
            for way, step in steps.items():
                P.allgather_data(torch.zeros(1))
                begin = time.perf_counter()
                step()
                times[way].append(time.perf_counter() - begin)
        everyone = [json.loads(one) for one in P.allgather_data(json.dumps(times))]
        rows[name] = {way: [max(both) for both in zip(*(one[way] for one in everyone), strict=True)] for way in times}
    if P.rank == 0:
        Path(file).write_text(json.dumps(rows))


def launch(workers, names, wanted, repeats):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        command = [
            Path(sys.executable).parent / "mpirun", "--oversubscribe", "-n", workers, sys.executable, __file__,
            "--worker", file, "--repeats", repeats, "--models", *names, "--ways", *wanted,
        ]  # fmt: skip
        environment = os.environ | {
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        subprocess.run([str(one) for one in command], env=environment, check=True)
        return json.loads(file.read_text())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--worker", help="the file of one launch's times")
    given = parser.parse_args()
    if given.worker:
        warnings.simplefilter("ignore")
        worker(given.worker, given.models, given.ways, given.repeats)
        return
    for name in given.models:
        workers, goals = MODELS[name][3:]
        found = [launch(workers, [name], given.ways, given.repeats)[name] for _ in range(given.launches)]
        cells = []
        for way in given.ways:
            ratios, least = [], []
            for times in found:
                ratios.append(statistics.median(times[way]) / statistics.median(times["half"]))
                least.append(min(times[way]) / min(times["half"]))
            goal = {"line": goals[0], "inductor": goals[1]}.get(way)
            wanted = f", at most {goal}" if goal else ""
            cells.append(f"{way} {statistics.median(ratios):.2f} (of minima {statistics.median(least):.2f}{wanted})")
        half = statistics.median(statistics.median(times["half"]) for times in found) * 1e3
        print(f"{name:20} half {half:.2f} ms   {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
