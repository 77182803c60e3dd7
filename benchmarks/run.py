"""Measure distdl beside its transports: python benchmarks/run.py [ROUNDS]. Writes a table, JSON and a plot to results/.

Two workers, float32, forward and backward. The back-ends take turns, round after round, each in a job of its own; in a
job, the ways to do one thing take turns too. What is compared is medians, over all rounds, of the slower worker's time.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
LAUNCH = {
    "mpi": [BIN / "mpirun", "--oversubscribe", "-n", "2", sys.executable],
    "gloo": [BIN / "torchrun", "--nproc-per-node", "2"],
    "threads": [sys.executable],
}
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
# goals: back-end, case and size, a way and another, and the most that the ratio of their times may be
COLLECTIVES = ("Broadcast", "SumReduce", "AllSumReduce", "Repartition", "AllGather", "ReduceScatter")
GOALS = [
    *(("mpi", name, "16 MiB", "ours", "floor", 0.95) for name in COLLECTIVES),
    *(("mpi", name, "256 KiB", "ours", "floor", 1.2) for name in COLLECTIVES),
    *(("mpi", name, "1 KiB", "ours", "floor", 1.25) for name in COLLECTIVES),
    *(("mpi", name, "1 KiB", "fixed shapes", "floor", 1.1) for name in COLLECTIVES),
    ("mpi", "Repartition", "2048x2048", "ours", "DTensor", 1 / 8),
    ("gloo", "Repartition", "2048x2048", "ours", "DTensor", 1 / 2),
    ("mpi", "Convolution", "4x16x256x256", "ours", "half", 1.05),
    ("mpi", "Convolution", "1x8x32x32", "ours", "half", 2.0),
    ("mpi", "Convolution", "4x16x256x256", "ours", "all", 1 / 1.9),
    ("mpi", "UNet step", "256x256", "ours", "half", 1.1),
    ("mpi", "UNet step", "64x64", "ours", "half", 1.3),
    *(("gloo", name, "16 MiB", "ours", "floor", 1.2) for name in COLLECTIVES),
    *(("gloo", name, "1 KiB", "ours", "floor", 1.8) for name in COLLECTIVES),
    *(("gloo", name, "1 KiB", "fixed shapes", "floor", 1.3) for name in COLLECTIVES),
]


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    times = {}
    for number in range(rounds):
        for backend, launch in LAUNCH.items():
            print(f"round {number + 1} of {rounds}: {backend}", flush=True)
            for row in job(backend, launch):
                for way, seconds in row["times"].items():
                    times.setdefault((backend, row["case"], row["size"]), {}).setdefault(way, []).extend(seconds)
    medians = {row: {way: statistics.median(found) for way, found in ways.items()} for row, ways in times.items()}
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    text = table(medians)
    (results / "table.txt").write_text(text)
    rows = [{"backend": b, "case": c, "size": s, "seconds": ways} for (b, c, s), ways in medians.items()]
    (results / "results.json").write_text(json.dumps({"machine": machine(), "rounds": rounds, "rows": rows}, indent=1))
    plot(medians, results / "ratios.png")
    print(f"\n{text}\nin {results}: table.txt, results.json, ratios.png")


def job(backend, launch):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        command = [*map(str, launch), str(HERE / "job.py"), backend, str(path)]
        done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=600)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return json.loads(path.read_text())


def table(medians):
    """Milliseconds of each way, and ours as a ratio of them; then the goals."""
    lines = [machine(), "", f"{'':8} {'':12} {'':13} ours, in ms, and as a ratio of the other ways"]
    for (backend, case, size), ways in medians.items():
        cells = [
            f"{way} {ways['ours'] / time:.2f}" for way, time in ways.items() if way not in ("ours", "fixed shapes")
        ]
        if "fixed shapes" in ways and "floor" in ways:
            cells.append(f"(with fixed shapes {ways['fixed shapes'] / ways['floor']:.2f})")
        lines.append(f"{backend:8} {case:13} {size:13} {ways['ours'] * 1e3:8.3f}   {'   '.join(cells)}")
    lines += ["", "goal                                                      at most    found"]
    for backend, case, size, way, other, most in GOALS:
        found = medians[backend, case, size][way] / medians[backend, case, size][other]
        what = f"{backend} {case} {size}: {way} / {other}"
        lines.append(f"{what:58} {most:6.3f}   {found:6.3f}   {'' if found <= most else 'MISSED'}".rstrip())
    for case in COLLECTIVES:
        found = medians["threads", case, "16 MiB"]["ours"] / medians["mpi", case, "16 MiB"]["ours"]
        lines.append(
            f"{f'threads / mpi {case} 16 MiB':58} {1:6.3f}   {found:6.3f}   {'' if found <= 1 else 'MISSED'}".rstrip()
        )
    return "\n".join(lines) + "\n"


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return (
        f"{models[0] if models else platform.processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )


def plot(medians, path):
    """Ratio to the floor, by primitive and size."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), sharey=True)
    for axis, backend in zip(axes, ("mpi", "gloo"), strict=True):
        names = list(dict.fromkeys(c for b, c, _ in medians if b == backend and "floor" in medians[b, c, _]))
        for place, size in enumerate(("1 KiB", "256 KiB", "16 MiB")):
            ratios = [medians[backend, name, size]["ours"] / medians[backend, name, size]["floor"] for name in names]
            axis.bar([at + 0.27 * (place - 1) for at in range(len(names))], ratios, 0.25, label=size)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axis.set_title(f"{backend}: time as a ratio of the floor")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
