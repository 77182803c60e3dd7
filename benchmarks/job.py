"""One job of the benchmark: the workers of one back-end measure all cases."""

import json
import sys
import threading
import time

import cases
import floors
import torch

import distdl


def measure(case, barrier, gather):
    """Seconds per step of each way, measured in turn: the median over repeats of the slowest worker's time."""
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


def main():
    """Arguments: the back-end, the file to write, and the sizes to measure (all of them if none is given)."""
    backend, path, *sizes = sys.argv[1:]
    torch.manual_seed(0)
    P = distdl.world()
    transport = floors.transport_of(backend)
    if transport:
        barrier, gather = transport.barrier, transport.gather
    else:
        barrier, gather = meeting.wait, lambda times: [json.loads(one) for one in P.allgather_data(json.dumps(times))]
    found = []
    for case in cases.every(P, transport, cases.mesh_of(P, backend)):
        if not sizes or case.size in sizes:
            found.append({"case": case.name, "size": case.size, "times": measure(case, barrier, gather)})
    if P.rank == 0:
        with open(path, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    meeting = threading.Barrier(2)
    distdl.run_workers(main, 2)
