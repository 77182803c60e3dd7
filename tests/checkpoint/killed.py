"""Processes that save again and again until one of them is killed, at random: ``python killed.py FOLDER KILLS``.

After each kill, another number of workers (one) has to load a complete checkpoint, not older than the last one that
was known to be complete. Workers are forked, which takes milliseconds where a start takes seconds; the process that
forks them has no other thread, which could hold a lock that a worker would wait for, so a process of its own keeps the
store.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # which optimisers import at their first use: here once, and not in each worker
import torch.distributed as dist

import distdl
from distdl.backends import find
from distdl.transport.job import Job, join
from distdl.workers.worlds import enter

WORKERS = 3


def model_of(step):
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 100))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float(step))
    return model


def work(folder, keep, rank, port, begin, report):
    """A worker: saves steps from ``begin`` on, for ever; writes each that is complete to ``report``."""
    torch.set_num_threads(1)
    join(Job(rank, WORKERS, rank, dist.TCPStore("127.0.0.1", port, is_master=False)))
    enter(find("gloo").opener(), "gloo")
    P = distdl.world()
    step = begin
    while True:
        model = distdl.distribute(model_of(step), P.reshape(-1, 1), weights="sharded")
        steps = torch.optim.SGD(model.parameters(), lr=float(step))
        distdl.save(folder, model, steps, step=step, keep=keep)
        if rank == 0:
            os.write(report, step.to_bytes(8, "little"))
        step += 1


def keep_store(listening):
    """Keep the store that workers meet in, for ever."""
    port, descriptor = listening.getsockname()[1], os.dup(listening.fileno())
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    while store:
        signal.pause()


def forked(function, *arguments):
    """A process that calls a function. Returns its number."""
    child = os.fork()
    if not child:
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return child


def kill_once(folder, keep, begin, delay):
    """Returns the last step that was known to be complete when a random worker was killed, and when."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        keeper, port = forked(keep_store, listening), listening.getsockname()[1]
    reading, writing = os.pipe()
    children = [forked(work, folder, keep, rank, port, begin, writing) for rank in range(WORKERS)]
    os.close(writing)
    complete = int.from_bytes(os.read(reading, 8), "little")  # the first is there
    time.sleep(delay)
    os.kill(random.choice(children), signal.SIGKILL)
    time.sleep(0.2)  # in which the others notice, and clean up
    for child in (*children, keeper):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    while told := os.read(reading, 8):
        complete = int.from_bytes(told, "little")
    os.close(reading)
    return complete


def main(folder, kills):
    random.seed(0)
    begin = 1
    for kill in range(kills):
        path = Path(folder, "steps" if kill % 2 else "one")
        complete = kill_once(path, 2 if kill % 2 else None, begin, random.uniform(0.0, 0.15))
        child = forked(check, path, complete)
        assert os.waitpid(child, 0)[1] == 0, f"after kill {kill}"
        begin = complete + 2
        print(f"kill {kill}: step {complete} complete", flush=True)
    print(f"{kills} kills survived")


def check(path, complete):
    """Load what is there, save over it, and end the process."""
    model = model_of(0)
    steps = torch.optim.SGD(model.parameters(), lr=1.0)
    found = distdl.load(path, model, steps)
    assert found in (complete, complete + 1), (found, complete)
    assert all((parameter == found).all() for parameter in model.parameters()), found
    assert steps.param_groups[0]["lr"] == found
    if path.name == "one":  # what interrupted saves have left is removed
        distdl.save(path, model, step=found)
        assert sorted(one.name[:5] for one in path.iterdir()) == [".lock", "data-", "index"]
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
