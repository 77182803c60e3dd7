"""A short form of the long training of `make soak`: threads are killed, and gloo processes go on."""

from pathlib import Path

import pytest
from launchers import ended, imported


@pytest.mark.fault("threads")
@pytest.mark.timeout(120)
def test_processes_that_are_killed_go_on_to_the_same_weights(tmp_path):
    """On another number of workers and another back-end; memory, descriptors and threads stay as they are."""
    script = Path(__file__).parent / "soak.py"
    options = "--steps 200 --save 20 --kill 100 --backends threads,gloo --folder"
    command = [*imported(), script, *options.split(), tmp_path]
    done = ended(command, 110)
    assert done.returncode == 0 and "200 steps, 1 kills survived" in done.stdout, done.stdout + done.stderr
    assert "gloo, 3 workers, sharded: to the end" in done.stdout
