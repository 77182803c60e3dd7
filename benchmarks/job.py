"""One job of the benchmark: the workers of one back-end measure all cases of a page.

    job.py BACKEND FILE [--workers N] [--page primitives|models] [--explain] [--sizes SIZE ...]

It writes a list of rows as JSON to FILE: case, size, the seconds of each way, and with --explain, of models, where the
time goes (see kinds.py).
"""

import argparse
import functools
import json
import threading
import time

import cases
import floors
import kinds
import models
import torch

import distdl


def measure(case, barrier, gather):
    """Seconds per step of each way, measured in turn: of the slowest worker, in each repeat."""
    for step in case.steps.values():
        step()
        step()
    times = {name: [] for name in case.steps}
    for _ in range(case.repeats):
        for name, step in case.steps.items():
            barrier()
            begin = time.perf_counter()
            for _ in range(case.inner):
                step()
            times[name].append((time.perf_counter() - begin) / case.inner)
    everyone = gather(times)
    return {name: [max(both) for both in zip(*(one[name] for one in everyone), strict=True)] for name in times}


def main(arguments, meeting):
    torch.manual_seed(0)
    P = distdl.world()
    transport = floors.transport_of(arguments.backend)
    if transport:
        barrier, gather = transport.barrier, transport.gather
    else:
        barrier, gather = meeting.wait, lambda times: [json.loads(one) for one in P.allgather_data(json.dumps(times))]
    mesh = cases.mesh_of(P, arguments.backend)
    page = models.every(P, barrier, mesh, transport) if arguments.page == "models" else cases.every(P, transport, mesh)
    found = []
    for case in page:
        if arguments.sizes and case.size not in arguments.sizes:
            continue
        row = {"case": case.name, "size": case.size, "times": measure(case, barrier, gather)}
        if arguments.explain:
            row["kinds"] = kinds.of(case, barrier, P.comm)
        found.append(row)
    if P.rank == 0:
        with open(arguments.file, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("backend")
    parser.add_argument("file")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", default="primitives")
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--sizes", nargs="*")
    given = parser.parse_args()
    distdl.run_workers(functools.partial(main, given, threading.Barrier(given.workers)), given.workers)
