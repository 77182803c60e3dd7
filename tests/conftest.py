import functools
import gc
import os
import shutil
import sys

import pytest
import torch
from launchers import ENVIRONMENT, run_suites
from xdist.scheduler import LoadScopeScheduling

from distdl.partition import Partition
from distdl.testing import Silent

for name, value in {**ENVIRONMENT, "DISTDL_TIMEOUT": "40"}.items():  # here, and in what is started from here
    os.environ.setdefault(name, value)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # (else each process of a job compiles distdl anew: 0.5 s)


@pytest.fixture
def world():
    """``world(size, rank)``: the partition of all workers of a world that sends no messages."""
    return lambda size, rank=0: Partition(Silent(rank, size))


@pytest.fixture(scope="session")
def suites(tmp_path_factory):
    """``suites(backend)``: the folder in which the job of all suites wrote what they found, and what it printed."""

    @functools.cache
    def run(backend):
        folder = tmp_path_factory.mktemp(backend)
        return folder, run_suites(backend, folder)

    return run


@pytest.fixture(autouse=True)
def switches():
    """No test leaves a switch of the whole process changed: one that threads set and reset in turn can stay set."""
    before = _switches()
    yield
    after = _switches()
    torch.autograd.set_detect_anomaly(before["anomaly mode"])  # (so that one test fails, and not all that follow)
    assert after == before


def _switches():
    return {
        "anomaly mode": torch.is_anomaly_enabled(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        cuda = [item for item in items if item.get_closest_marker("cuda")]
        config.hook.pytest_deselected(items=cuda)
        items[:] = [item for item in items if item not in cuda]
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        cxx = [item for item in items if item.get_closest_marker("cxx")]
        config.hook.pytest_deselected(items=cxx)
        items[:] = [item for item in items if item not in cxx]
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        reason = "torch's compiler ends the process where two threads call it without the interpreter's lock"
        for item in items:
            if item.get_closest_marker("compiles"):
                item.add_marker(pytest.mark.skip(reason=reason))
    first = ("processes with limits", "processes")  # (the longest turns)
    items.sort(key=lambda item: first.index(turn) if (turn := turn_of(item.nodeid)) in first else len(first))


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pytest_runtest_setup(item):
    """Of several processes that run the tests, each takes one core for the threads of tests that compare values.

    Workers that are threads hand the interpreter to each other, thousands of times in a test, and one that is woken on
    another core comes later. In tests of how workers wait and move tensors they go on to use all cores.
    """
    process = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if process and CORES:
        alone = item.nodeid.startswith("tests/globals/") and "processes" not in turn_of(item.nodeid)
        os.sched_setaffinity(0, {CORES[int(process) % len(CORES)]} if alone else CORES)


def pytest_collection_finish():
    gc.freeze()  # (else every full collection looks at all modules and tests)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of the two processes that run the tests (see the Makefile), one gets all whose processes have limits of time.

    The other begins with the other tests that start processes; both then share the rest.
    """
    return Scheduler(config, log)


LIMITED = ("tests/backends/", "tests/hosts/", "tests/checkpoint/test_soak.py", "tests/checkpoint/test_killed.py")
STARTING = (
    "tests/backends/test_launched.py", "tests/backends/test_in_process.py", "tests/examples/", "tests/names/",
    "tests/layers/test_properties.py", "docs/code/",
)  # fmt: skip


def turn_of(nodeid):
    """Which tests come in one turn with this one: those with limits, those that start processes, those of its file."""
    if nodeid.startswith(LIMITED) and not nodeid.startswith(STARTING):
        return "processes with limits"
    return "processes" if nodeid.startswith(STARTING) or "processes" in nodeid else nodeid.rsplit("::", 1)[0]


class Scheduler(LoadScopeScheduling):
    def _split_scope(self, nodeid):
        return turn_of(nodeid)
