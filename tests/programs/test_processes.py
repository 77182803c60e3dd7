"""The same on workers that are processes."""

from pathlib import Path

import pytest
from launchers import ended, mpirun, torchrun
from train_compiled import NAMES

_HERE = Path(__file__).parent


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launch", [torchrun, mpirun], ids=["gloo", "mpi"])
def test_a_replay_has_the_bits_of_the_step(launch):
    done = ended(launch(3, _HERE / "train_compiled.py", "3"))
    assert done.returncode == 0, done.stderr
    assert [f"{name}: the same bits" in done.stdout for name in NAMES] == [True] * len(NAMES)
