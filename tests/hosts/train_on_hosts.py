"""The job of ``endure``: training beside the sequential network, on the workers of both hosts. ``FOLDER LIMIT``.

Each worker has a folder in that folder, and writes there: ``refused``, what the first opening of the world said;
``step3`` when it has made three steps; ``same`` when its weights were compared, for which worker 0 finds a file
``compare``; and ``error``, how it ended. The limit is that of waits, in seconds, once training is on its way.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from host import DEVICE
from torch import nn

import distdl

TOLERANCE = 1e-10


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3)).double()
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(0.4 * noise(*parameter.shape, seed=number))
    return net


def opened(note: Path) -> distdl.Partition:
    """The world; with gloo, where each host's name means 127.0.1.1 to itself, after an error that tells the cure."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        try:
            distdl.world()
        except distdl.CommunicationError as error:
            write(note / "refused", str(error))
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    return distdl.world()


def main(folder: Path, limit: float) -> None:
    note = folder / os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", ""))
    note.mkdir()
    P = opened(note)
    grid = P.reshape(1, 1, P.size, 1)
    alone = network()
    nets = [alone, distdl.distribute(copy.deepcopy(alone), grid)]
    optimisers = [torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in nets]
    begun = time.monotonic()
    try:
        for step in itertools.count():
            (note / f"step{step}").touch()
            begun = time.monotonic()
            whole = noise(3, 2, 11, 7, seed=100 + step)
            for net, optimiser, x in zip(nets, optimisers, (whole, distdl.distribute_tensor(whole, grid)), strict=True):
                optimiser.zero_grad()
                net(x).square().mean().backward()
                optimiser.step()
            asked = P.rank == 0 and (folder / "compare").exists()
            if P.allreduce_data(int(asked), "max") and not (note / "same").exists():
                write(note / "same", f"{step + 1} steps, weights equal to {largest_difference(nets):.0e}")
            P.comm.timeout = limit  # from now on, for until here workers come when their imports are through
    except distdl.CommunicationError as error:
        write(note / "error", f"{time.monotonic() - begun:.1f} {error}")
        raise


def largest_difference(nets: Sequence[nn.Module]) -> float:
    """Between the weights of the two. Raises: AssertionError if it is more than rounding."""
    expected, state = (net.state_dict() for net in nets)
    error = max((entire(state[name]) - value).abs().max().item() for name, value in expected.items())
    assert error <= TOLERANCE, f"weights differ by {error}"
    return error


def entire(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, distdl.GlobalTensor) else tensor


def write(file: Path, text: str) -> None:
    """Write a file that is whole as soon as it is there."""
    part = file.with_suffix(".part")
    part.write_text(text)
    part.rename(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
