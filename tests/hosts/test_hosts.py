"""Training over two hosts: the link between them fails and comes back, is slow, loses packets, and goes for good."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from endure import WORKERS, Fault, endure
from hosts import FOLDER, refusal

SHORT = [
    Fault("dead", loss=1.0, seconds=1.5),
    Fault("slow", delay=0.1, steps=1),
    Fault("lossy", loss=0.05, steps=5),
]
LIMIT = 9.0  # seconds: more than TCP takes to go on after 1.5 s, and to make a connection whose packets are lost


@pytest.fixture(autouse=True)
def allowed():
    if refusal():
        pytest.skip(f"there can be no two hosts here: {refusal()}")


def test_nothing_runs_on_when_the_process_that_made_the_hosts_is_killed():
    code = """
import os, signal, subprocess
from hosts import inside, two_hosts, variables
with two_hosts() as hosts:
    environment = {**os.environ, **variables(hosts)}
    for host in hosts:
        command = inside(host, ["sh", "-c", "readlink /proc/self/ns/pid; exec sleep 600"], environment)
        assert subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline()
    print(*(host.number for host in hosts.values()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=50)
    assert done.returncode == -signal.SIGKILL, done.stderr
    keepers, until = done.stdout.split(), time.monotonic() + 20
    assert len(keepers) == 2
    while any(Path("/proc", keeper).exists() for keeper in keepers):
        assert time.monotonic() < until, "a host is still there"
        time.sleep(0.05)


@pytest.mark.fault(count=4)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.every_case), "mpi"])
def test_training_survives_a_bad_link_and_ends_in_an_error_without_one(backend):
    outcome = endure(backend, SHORT, LIMIT)
    assert len(outcome.compared) == WORKERS, outcome.output
    assert len({text.partition(",")[0] for text in outcome.compared}) == 1, outcome.compared
    assert all(made >= fault.steps for fault, made, _ in outcome.paces)
    if backend == "gloo":  # each host's name means 127.0.1.1 to itself, until the job does what the error says
        assert len(outcome.refused) == WORKERS
        assert {int(text.split()[1]) // 2 for _, text in outcome.errors} == {0, 1}, "the workers of both hosts say why"
        assert all("Connection refused" in text and "GLOO_SOCKET_IFNAME" in text for text in outcome.refused)
    assert outcome.status and all(outcome.status), outcome.output
    for seconds, text in outcome.errors:
        assert LIMIT <= seconds < LIMIT + 20 and f"waited longer than {LIMIT:g} s (DISTDL_TIMEOUT) in " in text, text
