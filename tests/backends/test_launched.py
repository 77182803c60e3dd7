"""The contract on the back-ends whose workers are processes: one launch for the whole suite, one test for a check."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from contract import CHECKS
from launchers import FOLDER, mpirun, python_path

WORKERS = 4
LIMIT = 240  # seconds for a launch and all its checks


def launch(command, folder):
    environment = python_path()
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT)
        output = f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    except subprocess.TimeoutExpired as error:
        output = f"not ended after {LIMIT} s\n{error.stdout}\n{error.stderr}"
    reports = []
    for rank in range(WORKERS):
        file = folder / f"{rank}.jsonl"
        reports.append(dict(json.loads(line) for line in file.read_text().splitlines()) if file.exists() else {})
    return reports, output


@pytest.fixture(scope="session")
def gloo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    return launch([sys.executable, str(FOLDER / "run_contract.py"), str(folder), "gloo"], folder)


@pytest.fixture(scope="session")
def mpi(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mpi")
    return launch(mpirun(WORKERS, FOLDER / "run_contract.py", str(folder)), folder)


def assert_passed(run, check):
    reports, output = run
    for rank, report in enumerate(reports):
        assert check in report, f"{check} was not reached on worker {rank}\n{output}"
        assert report[check] == "ok", f"{check} failed on worker {rank}\n{report[check]}"


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("check", CHECKS)
def test_gloo(gloo, check):
    assert_passed(gloo, check)


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("check", CHECKS)
def test_mpi(mpi, check):
    assert_passed(mpi, check)
