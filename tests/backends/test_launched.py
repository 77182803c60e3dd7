"""The contract on the back-ends whose workers are processes: one launch for all suites, one test for a check."""

from __future__ import annotations

import json

import pytest
from contract import CHECKS
from launchers import LIMIT
from run_suites import WORKERS


@pytest.fixture(scope="session")
def reports(suites):
    """``reports(backend)``: what each check gave on each worker, and what the job printed."""

    def read(backend):
        folder, output = suites(backend)
        files = [folder / f"{rank}.jsonl" for rank in range(WORKERS)]
        lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
        return [dict(json.loads(line) for line in one) for one in lines], output

    return read


def assert_passed(found, check):
    workers, output = found
    for rank, report in enumerate(workers):
        assert check in report, f"{check} was not reached on worker {rank}\n{output}"
        assert report[check] == "ok", f"{check} failed on worker {rank}\n{report[check]}"


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("check", CHECKS)
def test_gloo(reports, check):
    assert_passed(reports("gloo"), check)


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("check", CHECKS)
def test_mpi(reports, check):
    assert_passed(reports("mpi"), check)
