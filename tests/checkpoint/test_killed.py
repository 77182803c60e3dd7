"""A worker that is killed at any moment of saving leaves the last complete checkpoint."""

from pathlib import Path

import pytest
from launchers import imported, outcome


@pytest.mark.fault("gloo", count=6)
@pytest.mark.timeout(120)
def test_killed_processes_leave_the_last_complete_checkpoint(tmp_path):
    script = Path(__file__).parent / "killed.py"
    status, output = outcome([*imported(), script, tmp_path, "6"])
    assert status == 0 and "6 kills survived" in output, output
