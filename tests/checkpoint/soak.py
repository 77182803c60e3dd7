"""A long training that is killed and resumed again and again: ``python soak.py --steps 20000`` (``make soak``).

First the training runs without interruption. Then every so often a worker of it, or the whole job, is killed, and it
goes on from the last complete checkpoint: on another number of workers, another back-end, and with weights stored in
another way. At the end it has to have the weights of the first. Memory, descriptors and threads have to stay as they
are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # which optimisers import at their first use: here once, and not in each worker
import torch.distributed as dist
from launchers import mpirun, python_path
from saved_models import make

import distdl
from distdl.backends import find
from distdl.transport.job import Job, join
from distdl.workers.worlds import enter

TOLERANCE = 1e-10
GROWTH = 6.0  # MiB that a process may grow in one leg, after its first steps
PATIENCE = 120.0  # seconds in which what is left of a killed job has to end by itself


class Leg(NamedTuple):
    """A stretch of the training, from where the last one was killed.

    Attributes:
        backend, workers, weights: how it runs.
    """

    backend: str
    workers: int
    weights: str


class Plan(NamedTuple):
    """How long a training is.

    Attributes:
        steps: of all.
        save: steps from one checkpoint to the next.
        kill: steps from one kill to the next, roughly.
    """

    steps: int
    save: int
    kill: int


LEGS = (
    Leg("threads", 4, "replicated"),
    Leg("gloo", 3, "sharded"),
    Leg("mpi", 2, "modules"),
    Leg("threads", 4, "sharded"),
    Leg("gloo", 2, "modules"),
    Leg("mpi", 3, "replicated"),
)


# -- in a worker


def batch(step):
    """The input and the target of a step, of 1 to 9 samples: the same on any number of workers."""
    generator = torch.Generator().manual_seed(step)
    size = int(torch.randint(1, 10, (), generator=generator))
    x = torch.randn(size, 2, 7, 6, generator=generator, dtype=torch.float64)
    a, b = x[:, 0], x[:, 1]
    return x, torch.stack([a.mean((1, 2)), (a * b).mean((1, 2)), b.square().mean((1, 2))], 1)


def work(leg, plan, folder, number):
    """Train from the last checkpoint to the end. Progress and samples go to files in the folder."""
    P = distdl.world()
    assert P.size == leg.workers
    (folder / f"process-{number}-{os.getpid()}").touch()
    model = make(leg.weights, P)
    # (AdamW of a large eps makes rounding errors smaller from step to step, not larger)
    steps = torch.optim.AdamW(model.parameters(), 0.003, eps=0.03, weight_decay=0.03)
    schedule = torch.optim.lr_scheduler.StepLR(steps, plan.save, 0.95)
    saved = folder / "steps"
    begin = distdl.load(saved, model, steps, schedule) if saved.exists() else 0
    samples = (folder / f"samples-{number}-{P.rank}.jsonl").open("w", buffering=1)
    print(json.dumps([begin, *sample()]), file=samples)
    progress = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)
    grid = P.reshape(2, 1, 2, 1) if P.size == 4 and leg.weights != "modules" else P.reshape(1, 1, P.size, 1)
    for step in range(begin, plan.steps):
        x, target = batch(step)
        x = distdl.distribute_tensor(x, grid)
        x = x + 0.1 * torch.randn_like(x)  # whose draws go on where those of the checkpoint were
        steps.zero_grad()
        (model(x) - target).square().mean().backward()
        steps.step()
        schedule.step()
        done = step + 1
        if P.rank == 0:
            os.pwrite(progress, note(done, done % plan.save == 0), 0)
        if done % plan.save == plan.save // 2:
            distdl.finish_saving()  # (whose thread and files are no leak)
            if P.rank == 0 or leg.backend != "threads":  # (threads share what is sampled)
                print(json.dumps([done, *sample()]), file=samples)
        if done % plan.save == 0:
            distdl.save(saved, model, steps, schedule, step=done, keep=2, wait=bool(done // plan.save % 2))
    distdl.finish_saving()
    os.close(progress)
    samples.close()


def note(step, saving):
    return step.to_bytes(8, "little") + saving.to_bytes(8, "little")


def sample():
    """MiB, descriptors and threads of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, len(os.listdir("/proc/self/fd")), int(status["Threads"])


def run_threads(leg, *arguments):
    distdl.run_workers(lambda: work(leg, *arguments), leg.workers, "threads")


def run_gloo(rank, port, leg, *arguments):
    torch.set_num_threads(1)
    join(Job(rank, leg.workers, rank, dist.TCPStore("127.0.0.1", port, is_master=False)))
    communicator = find("gloo").opener()
    enter(communicator, "gloo")
    work(leg, *arguments)
    communicator.leave()


# -- outside


class Running:
    """A job. Threads and gloo processes are forked from this process, which takes milliseconds; MPI's are launched.

    Attributes:
        children: the processes that this one has started, of the launcher or of the workers.
    """

    def __init__(self, leg, plan, folder, number):
        self.leg, self.folder, self.number = leg, folder, number
        arguments = (plan, folder, number)
        self.children = []
        self._store = None
        if leg.backend == "threads":
            self.children = [forked(folder, run_threads, leg, *arguments)]
        elif leg.backend == "gloo":
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
            self.children = [forked(folder, run_gloo, rank, port, leg, *arguments) for rank in range(leg.workers)]
        else:
            text = json.dumps([leg, plan, str(folder), number])
            command = mpirun(leg.workers, __file__, "work", text)
            with (folder / "output").open("a") as output:
                self._launcher = subprocess.Popen(command, stdout=output, stderr=output, env=python_path())
            self.children = [self._launcher.pid]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pid in self.children:  # if something has gone wrong, or this process is being ended
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    os.kill(pid, signal.SIGKILL)

    def processes(self):
        """The workers' processes, and the launcher's."""
        found = self.folder.glob(f"process-{self.number}-*")
        return {*self.children, *(int(path.name.rpartition("-")[2]) for path in found)}

    def kill(self, everyone, choose):
        """Kill the whole job or a worker of it, and wait until the rest has ended by itself; returns who was killed."""
        workers = sorted(self.processes() - ({self.children[0]} if self.leg.backend == "mpi" else set()))
        if self.leg.backend == "threads":
            victims, who = workers, "the process"
        elif everyone and self.leg.backend == "mpi":
            victims, who = self.children, "mpirun"
        else:
            victims, who = (workers, "all workers") if everyone else ([choose(workers)], "one worker")
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        assert any(self.wait(PATIENCE)), "a job of which a worker was killed ended as if it had done all its work"
        return who

    def wait(self, limit):
        """Wait until all its processes have ended; returns their exit codes, of those that were started here."""
        deadline = time.monotonic() + limit
        codes = {}
        while left := [pid for pid in self.processes() if pid not in codes and alive(pid, codes)]:
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"{len(left)} processes of {self.leg} have not ended after {limit:.0f} s")
            time.sleep(0.02)
        self._store = None
        return [codes[pid] for pid in self.children]


def alive(pid, codes):
    """Whether a process goes on; if it was a child of this one, its exit code is noted."""
    try:
        found, code = os.waitpid(pid, os.WNOHANG)
        if found:
            codes[pid] = os.waitstatus_to_exitcode(code)
        return not found
    except ChildProcessError:  # a worker that a launcher has started
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False


def forked(folder, function, *arguments):
    child = os.fork()
    if child:
        return child
    code = 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.manual_seed(0)  # (from which the draws of a world follow)
    try:
        function(*arguments)
        code = 0
    except BaseException:
        with (folder / "output").open("a") as output:
            traceback.print_exc(file=output)
    finally:
        os._exit(code)


def output(folder):
    path = folder / "output"
    return path.read_text()[-4000:] if path.exists() else "no output"


def named(leg):
    return f"{leg.backend}, {leg.workers} workers, {leg.weights}"


def uninterrupted(leg, plan, folder):
    """Train from the first step to the last; returns the weights."""
    folder.mkdir(parents=True)
    begun = time.monotonic()
    with Running(leg, plan, folder, 0) as job:
        codes = job.wait(float("inf"))
    assert not any(codes), (codes, output(folder))
    tell(f"{named(leg)}: {plan.steps} steps without interruption", begun, folder, 0)
    return weights(folder, plan)


def interrupted(legs, plan, folder, choose):
    """The same with a kill every so often; returns the weights, and how many kills there were."""
    folder.mkdir(parents=True)
    for number, leg in enumerate(legs):
        last = (number + 1) * plan.kill
        name = f"{number}: {named(leg)}"
        begun = time.monotonic()
        with Running(leg, plan, folder, number) as job:
            if last >= plan.steps:
                codes = job.wait(float("inf"))
                assert not any(codes), (codes, output(folder))
                tell(f"{name}: to the end", begun, folder, number)
                return weights(folder, plan), number
            in_saving = choose((True, False, False))
            target = last if in_saving else last + choose(range(plan.save))
            while (reached := progress(folder))[0] < target or (in_saving and not reached[1]):
                codes = {}
                assert all(alive(pid, codes) for pid in job.children), (codes, output(folder))
                time.sleep(0.002)
            who = job.kill(choose((True, False)), choose)
        tell(f"{name}: {who} killed after step {reached[0]}", begun, folder, number)
    raise AssertionError("there are too few legs")


def progress(folder):
    path = folder / "progress"
    found = path.read_bytes() if path.exists() else b""
    return (int.from_bytes(found[:8], "little"), bool(found[8:9] != b"\0")) if len(found) == 16 else (0, False)


def tell(what, begun, folder, number):
    """Check that memory, descriptors and threads have not grown, and print what there was."""
    took = time.monotonic() - begun
    grown = []
    for path in sorted(folder.glob(f"samples-{number}-*.jsonl")):
        first, *found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        settled = found[len(found) // 4 :]
        if not settled:
            continue
        (_, before, descriptors, threads), (_, after, _, _) = settled[0], settled[-1]
        assert after - before < GROWTH, f"{what}: {path.name} grows from {before:.1f} to {after:.1f} MiB: {found}"
        later = settled[len(settled) // 2 :]  # (one sample may have met a thread that writes a checkpoint)
        assert min(one[2] for one in later) <= descriptors, f"{what}: {path.name} opens more and more: {found}"
        assert min(one[3] for one in later) <= threads, f"{what}: {path.name} starts more and more threads: {found}"
        grown.append(f"{before:.0f} -> {after:.0f} MiB, {descriptors} descriptors, {threads} threads")
        what = what if "from step" in what else f"{what}, from step {first[0]}"
    print(f"{what}; {took:.0f} s; {'; '.join(grown) or 'no samples'}", flush=True)


def weights(folder, plan):
    """What the last checkpoint has, as plain torch on one worker loads it."""
    model = make("plain", None)
    assert distdl.load(folder / "steps", model) == plan.steps
    left = sorted(one.name for one in (folder / "steps").iterdir())
    kept = [f"step-{step:09d}" for step in (plan.steps - plan.save, plan.steps)]
    assert left == [".lock", *kept], f"saving has left {left}"
    return dict(model.state_dict())


def main(plan, folder, legs, seed):
    """Raises AssertionError if something is not as it should be."""
    expected = uninterrupted(legs[0], plan, folder / "uninterrupted")
    found, kills = interrupted(islice(cycle(legs), 1000), plan, folder / "interrupted", random.Random(seed).choice)
    off = max((found[key] - one).abs().max().item() for key, one in expected.items())
    assert off <= TOLERANCE, f"the weights differ by {off:.3g} from those of the uninterrupted run"
    print(
        f"{plan.steps} steps, {kills} kills survived; the weights differ by {off:.3g} from those without interruption"
    )


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--save", type=int, default=500, help="steps from one checkpoint to the next")
    parser.add_argument("--kill", type=int, default=2000, help="steps from one kill to the next, roughly")
    parser.add_argument("--backends", default="threads,gloo,mpi")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed, and when")
    parser.add_argument("--folder", type=Path, help="where checkpoints lie; it is removed if all is well")
    given = parser.parse_args(arguments)
    if given.steps % given.save:
        parser.error("--steps has to be a multiple of --save")
    return given


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        leg, plan, where, number = json.loads(sys.argv[2])
        torch.set_num_threads(1)
        torch.manual_seed(0)
        work(Leg(*leg), Plan(*plan), Path(where), number)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that jobs are ended first
        given = parsed(sys.argv[1:])
        folder = given.folder or Path(tempfile.mkdtemp(prefix="distdl-soak-"))
        legs = [leg for leg in LEGS if leg.backend in given.backends.split(",")]
        main(Plan(given.steps, given.save, given.kill), folder, legs, given.seed)
        shutil.rmtree(folder)
