"""A worker that is killed at any moment of saving leaves the last complete checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.fault("gloo", count=6)
@pytest.mark.timeout(120)
def test_killed_processes_leave_the_last_complete_checkpoint(tmp_path):
    script = Path(__file__).parent / "killed.py"
    ended = subprocess.run([sys.executable, script, tmp_path, "6"], capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0 and "6 kills survived" in ended.stdout, ended.stdout + ended.stderr
