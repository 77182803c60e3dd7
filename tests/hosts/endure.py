"""Training over two hosts whose link fails: ``python endure.py [BACK-END]``, which prints what was endured.

Used by ``test_hosts`` for a short form. The job is ``train_on_hosts.py``.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hosts import ADDRESSES, FOLDER, Host, inside, two_hosts, variables
from launchers import python_path

WORKERS = 4
_PATIENCE = 200.0  # seconds: a busy machine takes many for the imports alone


class Fault(NamedTuple):
    """A link that is bad while training makes so many steps, or for so many seconds.

    Attributes:
        name: in words.
        delay: seconds that a packet takes in each direction.
        loss: which part of the packets is lost.
        seconds, steps: it lasts for both.
    """

    name: str
    delay: float = 0.0
    loss: float = 0.0
    seconds: float = 0.0
    steps: int = 0


class Outcome(NamedTuple):
    """What came of it.

    Attributes:
        paces: for each fault, steps made and seconds until then (for one without steps: until the next step).
        compared: what each worker wrote when it had compared its weights with those of the sequential network.
        refused: what each worker was told when it opened the world without ``GLOO_SOCKET_IFNAME`` (gloo only).
        errors: what the workers raised after the link had gone for good, and after how many seconds of its last step.
        status: of each launcher.
        output: of all launchers.
    """

    paces: list[tuple[Fault, int, float]]
    compared: list[str]
    refused: list[str]
    errors: list[tuple[float, str]]
    status: list[int | None]
    output: str


def torchrun(script: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The commands that start the job, and where each is run."""
    for node, name in enumerate(ADDRESSES):
        place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "one", "--master-port", "29500"]
        yield name, [sys.executable, "-m", "torch.distributed.run", *place, "--nproc-per-node", "2", *script]


def mpirun(script: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """All workers share the processors of one machine: in one session, for Linux shares them out to sessions first.

    Where workers that wait for others kept a processor busy, those of a session of the other host's daemon got none
    for as long as 13 s.
    """
    agent = f"{sys.executable} {FOLDER / 'hosts.py'}"
    shared = ["--leave-session-attached", "--bind-to", "none"]
    command = [str(Path(sys.executable).parent / "mpirun"), "--prtemca", "plm_ssh_agent", agent, *shared]
    yield "one", [*command, "--host", "one:2,two:2", "-n", str(WORKERS), sys.executable, *script]


JOBS: dict[str, Callable[[Sequence[str]], Iterator[tuple[str, list[str]]]]] = {"gloo": torchrun, "mpi": mpirun}


def endure(backend: str, faults: Sequence[Fault], limit: float, tell: Callable[[str], None] = str) -> Outcome:
    """Train while one fault after the other befalls the link, compare, and then cut the link for good.

    Args:
        backend: ``gloo`` or ``mpi``.
        faults: in their order.
        limit: of a wait for other workers, in seconds.
        tell: called with a line about each fault, when it is over.
    """
    with tempfile.TemporaryDirectory() as name, two_hosts() as hosts:
        folder = Path(name)
        with _started(backend, folder, hosts, limit) as processes:

            def await_all(file: str, workers: int = WORKERS) -> None:
                until = time.monotonic() + _PATIENCE
                while len(list(folder.glob(f"*/{file}"))) < workers:
                    if time.monotonic() > until or all(process.poll() is not None for process in processes):
                        raise RuntimeError(f"no {file} of {workers} workers:\n{_output(folder)}")
                    time.sleep(0.02)

            def link(delay: float = 0.0, loss: float = 0.0) -> None:
                for host in hosts.values():
                    host.link(delay, loss)

            def steps() -> int:
                return next(n for n in itertools.count() if not (folder / "0" / f"step{n}").exists())

            await_all("step2")
            paces = []
            for fault in faults:
                first, begun = steps(), time.monotonic()
                link(fault.delay, fault.loss)
                time.sleep(fault.seconds)
                if fault.steps:
                    await_all(f"step{first + fault.steps}")
                link()
                await_all(f"step{steps() + 1}")
                paces.append((fault, steps() - first, time.monotonic() - begun))
                tell(f"{backend}: {fault.name}: {paces[-1][1]} steps in {paces[-1][2]:.1f} s")
            (folder / "compare").touch()
            await_all("same")
            link(loss=1.0)
            await_all("error", 1)  # (the launcher ends the others of a host, perhaps before they have found words)
            if backend == "mpi":
                time.sleep(1.0)
                link()  # mpirun waits for its daemon on the other host
            for process in processes:
                process.wait(_PATIENCE)
            errors = [file.read_text().partition(" ") for file in folder.glob("*/error")]
            return Outcome(
                paces,
                [file.read_text() for file in folder.glob("*/same")],
                [file.read_text() for file in folder.glob("*/refused")],
                [(float(seconds), text) for seconds, _, text in errors],
                [process.returncode for process in processes],
                _output(folder),
            )


def _output(folder: Path) -> str:
    return "".join(file.read_text() for file in sorted(folder.glob("*.txt")))


@contextmanager
def _started(
    backend: str, folder: Path, hosts: dict[str, Host], limit: float
) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = []
    (folder / "tmp").mkdir()  # Open MPI's files are named by process numbers, which are the same in each run
    limits = {"DISTDL_TIMEOUT": str(_PATIENCE), "DISTDL_GRACE": "2"}
    environment = python_path(TMPDIR=str(folder / "tmp"), **limits, **variables(hosts))
    script = [str(FOLDER / "train_on_hosts.py"), str(folder), str(limit)]
    try:
        for number, (host, command) in enumerate(JOBS[backend](script)):
            with (folder / f"{number}.txt").open("w") as output:
                command = inside(host, command, environment, ends=backend != "mpi")
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


LONG = [
    Fault("the link is dead for 20 s", loss=1.0, seconds=20),
    Fault("a round trip takes 200 ms", delay=0.1, steps=10),
    Fault("a round trip takes 1 s", delay=0.5, steps=2),
    Fault("1 % of the packets are lost", loss=0.01, steps=100),
    Fault("10 % of the packets are lost", loss=0.1, steps=20),
    Fault("20 % of the packets are lost", loss=0.2, steps=5),
    Fault("200 ms, and 5 % are lost", delay=0.1, loss=0.05, steps=5),
    *[Fault("the link is dead for 1 s", loss=1.0, seconds=1)] * 10,
]


if __name__ == "__main__":
    for backend in sys.argv[1:] or JOBS:
        outcome = endure(backend, LONG, 60.0, functools.partial(print, flush=True))
        print(f"{backend}: {outcome.compared[0]}, and the link is cut; after that:")
        for seconds, text in outcome.errors:
            print(f"{backend}: after {seconds:.1f} s: {text}")
