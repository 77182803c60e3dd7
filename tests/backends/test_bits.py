"""Sums in the order of workers leave the same bits in each run; a transport that adds up as things arrive does not."""

import json
import sys

import pytest
from contract.bits import bits, late
from launchers import FOLDER, ended, mpirun

import distdl


def test_20_runs_leave_the_same_bits():
    """By 2, 3 and 4 workers in turn, of which each comes late to each exchange, in each run by other times."""

    def work():
        found = {}
        for run in range(20):
            workers = 2 + run % 3
            with late(seed=run):
                digests = bits(workers)
            assert digests == found.setdefault(workers, digests), f"run {run} of {workers} workers"
        return found

    found = distdl.run_workers(work)
    for workers in (2, 3):  # the same partition in a smaller world; but shares are those of all workers of a world
        alone = distdl.run_workers(lambda n=workers: bits(n), workers)
        assert [one[:3] for one in alone] == [one[workers][:3] for one in found[:workers]]


def test_sums_by_arrival_are_seen_by_the_digest():
    """The test above can fail: of primitives, and of gradients and losses of global tensors."""

    def work(run, arrived):
        with late(run, arrived):
            return bits(4)

    seen = [set(), set(), set(), set()]
    for run in range(20):
        arrived = {}
        for place, digest in enumerate(distdl.run_workers(lambda n=run, one=arrived: work(n, one))[0]):
            seen[place].add(digest)
        if len(seen[0]) > 1 and len(seen[2]) > 1:
            break
    assert len(seen[0]) > 1 and len(seen[2]) > 1, seen


@pytest.mark.every_case
@pytest.mark.timeout(2000)
def test_20_runs_on_each_backend_leave_the_same_bits():
    """For each of 2, 3 and 4 workers."""
    script, found = FOLDER / "run_bits.py", {}
    for backend in ("threads", "gloo", "mpi"):
        command = mpirun(4, script) if backend == "mpi" else [sys.executable, script, backend]
        done = ended(command, 900)
        assert done.returncode == 0, done.stderr
        found[backend] = json.loads(done.stdout)
    assert found["gloo"] == found["threads"] and found["mpi"] == found["threads"]
