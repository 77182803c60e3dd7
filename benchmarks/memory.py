"""What each worker of a training run holds at most: python benchmarks/memory.py.

A U-Net of 16 channels on a picture of 1024 x 512, split over its rows, by distdl's modules and by global tensors; two
steps with momentum. Beside the sequential run: bytes of tensors, which are counted (workers are threads), and resident
memory beyond that before the model was built (workers are MPI processes; idle recycled memory counts, pages of
libraries, which the processes of a host share, do not). A worker's share is the weights and what the optimiser keeps of
them, and its part of the activations of the sequential run.

By default, glibc keeps much of what is freed for later, of arrays below 32 MiB, whoever makes them. So resident memory
is also measured of torch on a worker's part of the rows alone; and with MALLOC_MMAP_THRESHOLD_, with which glibc gives
back what is freed.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from networks import Plain, Split, UNet, distributed
from run import BIN, ENVIRONMENT
from torch import nn

import distdl
from distdl.nn import DistributedMSELoss
from distdl.workers.footprint import Footprint

ROWS, COLUMNS, CHANNELS = 1024, 512, 16
SMALL = 64, 32  # rows and columns of a first run, which brings the libraries' own memory, plans and communicators
WORKERS = (2, 4, 8)


def train(way, P, rows=ROWS, columns=COLUMNS):
    """Two steps of this worker. Returns the bytes of weights and momentum."""
    torch.manual_seed(0)
    x, truth = (torch.randn(1, channels, rows // P.size, columns) for channels in (1, 2))
    P_x = P.reshape(1, 1, P.size, 1)
    criterion = nn.functional.mse_loss
    if way == "modules":
        model, criterion = UNet(Split(P_x), CHANNELS), DistributedMSELoss(P_x)
    elif way == "global":
        model = distributed(UNet(Plain(2), CHANNELS), P_x)
        x, truth = (distdl.GlobalTensor.from_local(one, P_x) for one in (x, truth))
    else:
        model = UNet(Plain(2), CHANNELS)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        optimiser.zero_grad()
        criterion(model(x), truth).backward()
        optimiser.step()
    return 2 * sum(weight.nbytes for weight in model.parameters())


def counted(way):
    """The most bytes of tensors that each worker held, and those of its weights."""
    P = distdl.world()
    with Footprint() as footprint:
        kept = train(way, P)
    return footprint.peak, kept


def resident(way, parts):
    """The most resident bytes of this process, beyond those before the model was built.

    Args:
        parts: of the rows; the way "alone" trains on one of them, without other workers.
    """
    P = distdl.world()
    train(way, P, *SMALL)
    Path("/proc/self/clear_refs").write_text("5")
    before, libraries = _status("VmRSS"), _status("RssFile")
    train(way, P, ROWS // parts if way == "alone" else ROWS)
    return _status("VmHWM") - before - (_status("RssFile") - libraries), 0


def _status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def of_processes(malloc, way, workers):
    processes = 1 if way == "alone" else workers
    command = [BIN / "mpirun", "--oversubscribe", "-n", processes, sys.executable, __file__, way, workers]
    done = subprocess.run(
        [str(part) for part in command], env=os.environ | ENVIRONMENT | malloc, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    def threads(way, workers):
        return distdl.run_workers(functools.partial(counted, way), workers, "threads")

    measures = {"tensors": threads, "resident memory": functools.partial(of_processes, {})}
    given_back = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    measures["resident memory, freed blocks given back"] = functools.partial(of_processes, given_back)
    for what, measure in measures.items():
        [[whole, _]] = measure("alone", 1)
        weights = threads("alone", 1)[0][1]
        print(f"{what}: sequential {whole / 2**20:.1f} MiB, of which weights and momentum {weights / 2**20:.1f} MiB")
        for workers in WORKERS:
            share = weights + (whole - weights) / workers
            for way in ("modules", "global", *(["alone"] if measure is not threads else [])):
                most = max(peak for peak, _ in measure(way, workers))
                print(
                    f"  {workers} workers, {way:8}: at most {most / 2**20:6.1f} MiB, share {share / 2**20:6.1f} MiB, "
                    f"ratio {most / share:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        given, parts = sys.argv[1], int(sys.argv[2])
        found = distdl.run_workers(functools.partial(resident, given, parts), 1 if given == "alone" else parts)
        if distdl.world().rank == 0:
            print(json.dumps(found))
    else:
        main()
