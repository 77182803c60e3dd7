"""Measure distdl beside its transports: python benchmarks/run.py [ROUNDS] [primitives] [models] [--against TREE].

Writes tables, JSON and a plot to results/. float32, forward and backward, of models with a step of the optimiser. The
back-ends take turns, round after round, each in a job of its own, as times differ from launch to launch; in a job, the
ways to do one thing take turns too. What is compared is the slowest worker's time: its median in each launch, and the
median of those over all launches. Beside it stands that of the slowest launch.

Against another checkout of distdl, each job is launched with that one (*before*) and with this (*now*), in turn;
further words name the jobs, as mpi-2, if not all are wanted.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import goals
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
JOBS = {
    "primitives": [("mpi", 2), ("gloo", 2), ("threads", 2)],
    "models": [("mpi", 2), ("mpi", 4), ("gloo", 2), ("threads", 2)],
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="how many rounds, which pages, which back-ends")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--sizes", nargs="*", default=[], help="of --against: only these")
    given = parser.parse_args()
    words = given.words
    rounds = next((int(one) for one in words if one.isdigit()), 3)
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    pages = [page for page in JOBS if page in words] or list(JOBS)
    for page in pages:
        if given.against:
            jobs = [one for one in JOBS[page] if f"{one[0]}-{one[1]}" in words] or JOBS[page]
            sources = [given.against.absolute() / "src", HERE.parent / "src"]
            before, now = measure(page, jobs, rounds, sources, given.sizes)
            text = "\n".join([machine(), "", *compared(before[0], now[0])]) + "\n"
            (results / f"{page}-against.txt").write_text(text)
            print(f"\n{text}\nin {results}: {page}-against.txt")
            continue
        [(rows, kinds)] = measure(page, JOBS[page], rounds, [HERE.parent / "src"])
        text = "\n".join([machine(), "", *(primitives(rows) if page == "primitives" else models(rows, kinds))]) + "\n"
        (results / f"{page}.txt").write_text(text)
        (results / f"{page}.json").write_text(json.dumps({"machine": machine(), "rounds": rounds, "rows": [
            {"backend": backend, "workers": workers, "case": case, "size": size, "launches": launches}
            for (backend, workers, case, size), launches in rows.items()
        ]}, indent=1))  # fmt: skip
        if page == "primitives":
            plot(rows, results / "ratios.png")
        print(f"\n{text}\nin {results}: {page}.txt, {page}.json")


def measure(page, jobs, rounds, sources, sizes=()):
    """For each source: from (back-end, workers, case, size) to the median seconds of each way in each launch; kinds."""
    found = [({}, {}) for _ in sources]
    for number in range(rounds):
        for backend, workers in jobs:
            print(f"{page}, round {number + 1} of {rounds}: {workers} workers on {backend}", flush=True)
            explain = page == "models" and number == 0 and backend == "mpi" and len(sources) == 1
            for source, (rows, kinds) in list(zip(sources, found, strict=True))[:: -1 if number % 2 else 1]:
                for row in job(source, backend, workers, page, explain, sizes):
                    key = backend, workers, row["case"], row["size"]
                    for way, seconds in row["times"].items():
                        rows.setdefault(key, {}).setdefault(way, []).append(statistics.median(seconds))
                    if "kinds" in row:
                        kinds[key] = row["kinds"]
    return found


def job(source, backend, workers, page, explain, sizes):
    launch = {
        "mpi": [BIN / "mpirun", "--oversubscribe", "-n", workers, sys.executable],
        "gloo": [BIN / "torchrun", "--nproc-per-node", workers],
        "threads": [sys.executable],
    }[backend]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        options = [backend, path, "--workers", workers, "--page", page, *(["--explain"] if explain else [])]
        options += ["--sizes", *sizes] if sizes else []
        command = [str(part) for part in (*launch, HERE / "job.py", *options)]
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(source)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return json.loads(path.read_text())


def seconds(rows, key, way):
    return statistics.median(rows[key][way])


def ratio(rows, key, way, other):
    return seconds(rows, key, way) / seconds(rows, key, other)


def slowest(rows, key, way):
    """The time of the slowest launch."""
    return max(rows[key][way])


def highest(rows, key, way, other):
    """The ratio in the launch in which it is highest: ways take turns in a launch, so both had the same machine."""
    return max(one / beside for one, beside in zip(rows[key][way], rows[key][other], strict=True))


def primitives(rows):
    """Milliseconds of ours, of the median and the slowest launch, and ratios to the other ways; then the goals."""
    yield f"{'':38} ours, in ms: median, slowest launch; ratio to the other ways: of medians (in the worst launch)"
    for key, ways in rows.items():
        backend, _, case, size = key
        cells = [
            f"{way} {ratio(rows, key, 'ours', way):.2f} ({highest(rows, key, 'ours', way):.2f})"
            for way in ways if way not in ("ours", "fixed shapes")
        ]  # fmt: skip
        if "fixed shapes" in ways and "floor" in ways:
            cells.append(f"with fixed shapes {ratio(rows, key, 'fixed shapes', 'floor'):.2f}")
        time = f"{seconds(rows, key, 'ours') * 1e3:8.3f} {slowest(rows, key, 'ours') * 1e3:8.3f}"
        yield f"{backend:8} {case:15} {size:13} {time}   {'   '.join(cells)}".rstrip()
    yield from reached(rows, goals.PRIMITIVES)
    for case in goals.COLLECTIVES:
        found = seconds(rows, ("threads", 2, case, "16 MiB"), "ours") / seconds(
            rows, ("mpi", 2, case, "16 MiB"), "ours"
        )
        yield goal(f"threads / mpi {case} 16 MiB", 1, found)
    for case in goals.COLLECTIVES:
        found = seconds(rows, ("threads", 2, case, "1 KiB"), "ours")
        yield goal(f"threads {case} 1 KiB, ms", goals.THREADS_AT_1_KIB * 1e3, found * 1e3)


def models(rows, kinds):
    """Milliseconds of each way, of the median and the slowest launch; where the time goes; then the goals."""
    yield f"{'':8} workers {'':28} a step in ms: median-slowest launch (ratio of medians to share)"
    for key, ways in rows.items():
        backend, workers, case, size = key
        cells = []
        for way in ("share", *(way for way in ways if way != "share")):
            against = "" if way == "share" else f" ({ratio(rows, key, way, 'share'):.2f})"
            time = f"{seconds(rows, key, way) * 1e3:.1f}-{slowest(rows, key, way) * 1e3:.1f}"
            cells.append(f"{way} {time}{against}")
        yield f"{backend:8} {workers:7} {case:10} {size:15} {'   '.join(cells)}"
    names = ("agreement", "weights", "sums", "halos", "python")
    yield ""
    yield "where a step's ms go, on worker 0 (waits: calls a step)"
    yield f"{'':55}{'step':>8} {'share':>8} {'operators':>10} " + " ".join(f"{name:>16}" for name in names)
    for (backend, workers, case, size), of_ways in kinds.items():
        for way, times in of_ways.items():
            what = f"{backend} {workers} {case} {size}, {way}"
            calls = [f" ({times[f'{name} calls']:5.1f})" if f"{name} calls" in times else "" for name in names]
            cells = [f"{times[name]:8.1f}{count}" for name, count in zip(names, calls, strict=True)]
            found = f"{times['step']:8.1f} {times['share']:8.1f} {times['operators']:10.1f} "
            yield f"{what:55}{found}" + " ".join(f"{cell:>16}" for cell in cells)
    yield from reached(rows, goals.MODELS)


def compared(before, now):
    """Milliseconds of our ways before and now, the ratio of medians, and both as ratios to the first of the others."""
    yield f"{'':60} {'before, slowest':>19} {'now, slowest':>19}   now / before    as a ratio, before and now"
    for key, ways in now.items():
        backend, workers, case, size = key
        other = next((way for way in ("floor", "half", "share") if way in ways), None)
        for way in (way for way in ("ours", "fixed shapes", "modules", "global") if way in ways):
            times = [seconds(rows, key, way) * 1e3 for rows in (before, now)]
            worst = [slowest(rows, key, way) * 1e3 for rows in (before, now)]
            ratios = f"{other} {ratio(before, key, way, other):.2f} {ratio(now, key, way, other):.2f}" if other else ""
            both = " ".join(f"{median:9.3f} {most:9.3f}" for median, most in zip(times, worst, strict=True))
            cells = f"{way:12} {both}   {times[1] / times[0]:12.2f}    {ratios}"
            yield f"{backend:8} {workers:7} {case:15} {size:13} {cells}".rstrip()


def reached(rows, wanted):
    yield ""
    yield f"{'goal':58} at most    found"
    for backend, case, size, way, other, most in wanted:
        yield goal(f"{backend} {case} {size}: {way} / {other}", most, ratio(rows, (backend, 2, case, size), way, other))


def goal(what, most, found):
    return f"{what:58} {most:6.3f}   {found:6.3f}   {'' if found <= most else 'MISSED'}".rstrip()


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return (
        f"{models[0] if models else platform.processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )


def plot(rows, path):
    """Ratio to the floor, by primitive and size."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), sharey=True)
    for axis, backend in zip(axes, ("mpi", "gloo"), strict=True):
        names = list(dict.fromkeys(case for b, _, case, _ in rows if b == backend and (b, 2, case, "1 KiB") in rows))
        for place, size in enumerate(("1 KiB", "256 KiB", "16 MiB")):
            ratios = [ratio(rows, (backend, 2, name, size), "ours", "floor") for name in names]
            axis.bar([at + 0.27 * (place - 1) for at in range(len(names))], ratios, 0.25, label=size)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axis.set_title(f"{backend}: time as a ratio of the floor")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
