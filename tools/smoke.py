"""Whether an installed distdl works: ``python tools/smoke.py``, in an environment that has it and nothing else of ours.

`make matrix` runs it for each Python. It reads no file of the repository.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import distdl


def step() -> float:
    """One step of training on this worker, with the loss behind it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 1, 3))
    model = distdl.distribute(model.double(), distdl.world().reshape(1, 1, 2, 1))
    image = torch.randn(1, 1, 9, 7, generator=torch.Generator().manual_seed(1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(image).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


def verified() -> bool:
    """Whether a model of torch computes the same on these workers."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, stride=2), torch.nn.BatchNorm2d(2)).double()
    return distdl.verify(model, (1, 1, 2, 1), torch.randn(2, 1, 11, 8).double()).largest < 1e-12


def main() -> None:
    """Try all of it, and print the versions."""
    if not Path(distdl.__file__).is_relative_to(sys.prefix):
        raise SystemExit(f"this distdl is not installed in {sys.prefix}: {distdl.__file__}")
    losses = distdl.run_workers(step, 2)
    if losses[0] != losses[1] or not 0 < losses[0] < 1:
        raise SystemExit(f"wrong losses: {losses}")
    if distdl.run_workers(verified, 2) != [True, True]:
        raise SystemExit("verify found no equal model")
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "conv.svg"
        draw = ["draw", "conv", "9x9", "--kernel", "3", "--workers", "2x1", "-o", str(picture)]
        for command in (["--version"], draw, ["doctor", "--timeout", "60"]):
            subprocess.run([sys.executable, "-m", "distdl", *command], check=True, cwd=folder)
        if "<svg" not in picture.read_text():
            raise SystemExit("distdl draw wrote no SVG")
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"distdl {distdl.__version__} works with Python {python} and torch {torch.__version__}")


if __name__ == "__main__":
    main()
