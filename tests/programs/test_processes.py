"""The same on workers that are processes."""

from pathlib import Path

import pytest
from launchers import ended, mpirun, torchrun
from train_compiled import MODELS, NAMES

_HERE = Path(__file__).parent


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launch", [torchrun, mpirun], ids=["gloo", "mpi"])
def test_a_replay_has_the_bits_of_the_step(launch):
    done = ended(launch(3, _HERE / "train_compiled.py", "3"))
    assert done.returncode == 0, done.stderr
    told = [*(f"{name}, step" for name in NAMES), *(f"{name}, model" for name in MODELS)]
    assert [f"{one}: the same bits" in done.stdout for one in told] == [True] * len(told)
