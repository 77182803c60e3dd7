"""The contract on the back-ends that need no launcher: each check is a test of its own."""

import pytest
from contract import CHECKS

import distdl


@pytest.mark.parametrize("check", CHECKS)
def test_threads(check):
    distdl.run_workers(CHECKS[check], 4, "threads")


@pytest.mark.parametrize("check", CHECKS)
def test_serial(check):
    distdl.run_workers(CHECKS[check], 1, "serial")
